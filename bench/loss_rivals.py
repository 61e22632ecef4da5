"""The runs that `bench.losses` compares: the same loss, PPO's clip, by flowkernels and by each
peer that is installed.

Each function gives the runs of one path as {implementation: what to time}; a run returns what its
error is measured on: log-probs, or the gradient by the logits or by the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from flowkernels import (
    LossSpec,
    branching_score,
    linear_logprobs,
    linear_policy_loss,
    logprobs,
    policy_loss,
)
from torch import Tensor

from bench import head_peers

PEERS = ("torch", "compile", *head_peers.MODULES, "linear_cross_entropy", "gemm")
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LENGTH = 512
"""Tokens of a sequence; advantages are constant within it, because Liger's kernel takes no others.
"""
Runs = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Batch:
    """One case; ratios on both sides of the clip."""

    logits_TV: Tensor
    target_ids_T: Tensor
    advantage_T: Tensor
    old_logprob_T: Tensor
    weight_T: Tensor
    cu_seqlens_S1: Tensor

    @classmethod
    def make(cls, num_tokens: int, num_vocab: int, dtype: torch.dtype, device: str) -> Batch:
        rng = torch.Generator(device).manual_seed(0)
        logits_TV = torch.empty(num_tokens, num_vocab, dtype=dtype, device=device)
        for rows in logits_TV.split(512):  # no fp32 copy of all of it
            rows.copy_(3 * torch.randn(rows.shape, generator=rng, device=device))
        target_ids_T = torch.randint(num_vocab, (num_tokens,), generator=rng, device=device)
        return cls(
            logits_TV, target_ids_T, *_tokens(logprobs(logits_TV, target_ids_T).logprob_T, rng)
        )


@dataclass(frozen=True)
class HeadBatch:
    """One case from hidden states; logits of about N(0, 3)."""

    hidden_TD: Tensor
    weight_VD: Tensor
    target_ids_T: Tensor
    advantage_T: Tensor
    old_logprob_T: Tensor
    weight_T: Tensor
    cu_seqlens_S1: Tensor

    @classmethod
    def make(
        cls, num_tokens: int, size: int, num_vocab: int, dtype: torch.dtype, device: str
    ) -> HeadBatch:
        rng = torch.Generator(device).manual_seed(0)
        hidden_TD = torch.randn(num_tokens, size, generator=rng, device=device).to(dtype)
        weight_VD = (
            3 * size**-0.5 * torch.randn(num_vocab, size, generator=rng, device=device)
        ).to(dtype)
        target_ids_T = torch.randint(num_vocab, (num_tokens,), generator=rng, device=device)
        return cls(
            hidden_TD,
            weight_VD,
            target_ids_T,
            *_tokens(linear_logprobs(hidden_TD, weight_VD, target_ids_T).logprob_T, rng),
        )


def _tokens(logprob_T: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(advantage, old, weight, cu_seqlens)."""
    num_tokens, device = len(logprob_T), logprob_T.device
    noise_2T = torch.randn(2, num_tokens, generator=rng, device=device)
    advantage_T = noise_2T[0, ::LENGTH].repeat_interleave(LENGTH)[:num_tokens].contiguous()
    bounds = torch.tensor([*range(0, num_tokens, LENGTH), num_tokens], device=device)
    return (
        advantage_T,
        logprob_T + 0.2 * noise_2T[1],
        torch.full((num_tokens,), 1 / num_tokens, device=device),
        bounds,
    )


def logprobs_runs(batch: Batch, peers: list[str]) -> Runs:
    logits, targets = batch.logits_TV, batch.target_ids_T
    compiled = torch.compile(naive_scores, dynamic=True)
    runs: Runs = {
        "flowkernels": lambda: logprobs(logits, targets).logprob_T,
        "torch": lambda: naive_scores(logits, targets)[0],
        "compile": lambda: compiled(logits, targets)[0],
        "trl": lambda: _trl_scores(logits, targets),
    }
    return _chosen(runs, peers)


def loss_runs(batch: Batch, peers: list[str]) -> Runs:
    compiled = torch.compile(naive_loss, dynamic=True)
    runs: Runs = {
        "flowkernels": lambda: flowkernels_gradient(batch),
        "torch": lambda: _logits_gradient(naive_loss, batch),
        "compile": lambda: _logits_gradient(compiled, batch),
        "trl": lambda: _logits_gradient(_trl_loss, batch),
    }
    if "liger" in peers and len(batch.target_ids_T) % LENGTH == 0:
        runs["liger"] = _liger_run(batch)
    return _chosen(runs, peers)


def branching_runs(batch: Batch) -> Runs:
    scores = logprobs(batch.logits_TV, batch.target_ids_T)
    arguments = (scores.logprob_T, batch.old_logprob_T, scores.entropy_T, batch.cu_seqlens_S1)
    return {"flowkernels": lambda: branching_score(*arguments).score_T}


def head_forward_runs(batch: HeadBatch, peers: list[str]) -> Runs:
    hidden, weight, targets = batch.hidden_TD, batch.weight_VD, batch.target_ids_T
    compiled = torch.compile(lambda h, w, y: naive_scores(h @ w.t(), y)[0], dynamic=True)
    runs: Runs = {
        "flowkernels": lambda: linear_logprobs(hidden, weight, targets).logprob_T,
        "torch": lambda: naive_scores(hidden @ weight.t(), targets)[0],
        "compile": lambda: compiled(hidden, weight, targets),
        **{
            peer: partial(run, hidden, weight, targets) for peer, run in head_peers.LOGPROBS.items()
        },
        "gemm": lambda: _gemm_forward(hidden, weight),
    }
    if hidden.dtype != torch.float32:
        runs["flowkernels fp32"] = lambda: (
            linear_logprobs(hidden, weight, targets, fp32_logits=True).logprob_T
        )
    return _chosen(runs, peers)


def head_loss_runs(batch: HeadBatch, peers: list[str]) -> Runs:
    """ "top 20 %": every fifth token has weight; "frozen": the weight takes no gradient; "gemm":
    the three products and nothing else.
    """
    sparse_T = torch.where(
        torch.arange(len(batch.weight_T), device=batch.weight_T.device) % 5 == 0,
        batch.weight_T,
        0.0,
    )
    sparse = replace(batch, weight_T=sparse_T)
    compiled = torch.compile(_naive_head_loss, dynamic=True)
    runs: Runs = {
        "flowkernels": lambda: _head_gradient(_flowkernels_head_loss, batch),
        "flowkernels top 20 %": lambda: _head_gradient(_flowkernels_head_loss, sparse),
        "flowkernels frozen": lambda: _head_gradient(_flowkernels_head_loss, batch, frozen=True),
        "torch": lambda: _head_gradient(_naive_head_loss, batch),
        "compile": lambda: _head_gradient(compiled, batch),
        **{
            peer: partial(_head_gradient, partial(_peer_loss, peer), batch)
            for peer in head_peers.LOGPROBS
        },
        "linear_cross_entropy": lambda: _head_gradient(
            partial(_cross_entropy, head_peers.torch_cross_entropy), batch
        ),
        "gemm": lambda: _gemms(batch),
    }
    if len(batch.target_ids_T) % LENGTH == 0:
        runs["liger_grpo"] = lambda: _head_gradient(_liger_grpo, batch)
    if batch.hidden_TD.dtype != torch.float32:
        runs["flowkernels fp32"] = lambda: _head_gradient(
            partial(_flowkernels_head_loss, fp32_logits=True), batch
        )
    return _chosen(runs, peers)


def naive_scores(logits_TV: Tensor, target_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy as a trainer without kernels does."""
    logp_TV = logits_TV.float().log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_TV.gather(1, target_ids_T[:, None])[:, 0], entropy_T


def naive_loss(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_logprob_T: Tensor,
) -> Tensor:
    """The loss alone: without the entropy that ours returns beside it."""
    logprob_T = logits_TV.float().log_softmax(-1).gather(1, target_ids_T[:, None])[:, 0]
    return clipped(logprob_T, advantage_T, weight_T, old_logprob_T)


def clipped(
    logprob_T: Tensor, advantage_T: Tensor, weight_T: Tensor, old_logprob_T: Tensor
) -> Tensor:
    ratio_T = (logprob_T - old_logprob_T).exp()
    surrogate_T = torch.minimum(
        ratio_T * advantage_T, ratio_T.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage_T
    )
    return -(weight_T * surrogate_T).sum()


def _chosen(runs: Runs, peers: list[str]) -> Runs:
    return {name: run for name, run in runs.items() if name.split()[0] in ("flowkernels", *peers)}


def flowkernels_gradient(batch: Batch, inplace: bool = False) -> Tensor:
    logits_TV = batch.logits_TV.detach().requires_grad_()
    spec = LossSpec(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    tokens: dict[str, Any] = {
        "advantage_T": batch.advantage_T,
        "weight_T": batch.weight_T,
        "old_logprob_T": batch.old_logprob_T,
    }
    out = policy_loss(logits_TV, batch.target_ids_T, spec=spec, inplace=inplace, **tokens)
    return torch.autograd.grad(out.loss, logits_TV)[0]


def head_gradient(batch: HeadBatch, memory_budget: int | None) -> Tensor:
    """Ours with its gradients, in chunks of so many bytes of logits, or its own."""
    return _head_gradient(partial(_flowkernels_head_loss, memory_budget=memory_budget), batch)


def _logits_gradient(loss: Callable[..., Tensor], batch: Batch) -> Tensor:
    logits_TV = batch.logits_TV.detach().requires_grad_()
    value = loss(
        logits_TV, batch.target_ids_T, batch.advantage_T, batch.weight_T, batch.old_logprob_T
    )
    return torch.autograd.grad(value, logits_TV)[0]


def _trl_scores(logits_TV: Tensor, target_ids_T: Tensor) -> Tensor:
    """TRL's released log-probs with entropy: a Triton kernel on a GPU, chunks of torch on a CPU."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logprob_T: Tensor = selective_log_softmax_and_entropy(
        logits_TV, target_ids_T, entropy_requires_grad=False
    )[0]
    return logprob_T


def _trl_loss(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_logprob_T: Tensor,
) -> Tensor:
    return clipped(_trl_scores(logits_TV, target_ids_T), advantage_T, weight_T, old_logprob_T)


def _liger_run(batch: Batch) -> Callable[[], Tensor]:
    """Liger's logits are [B, L + 1, V] and contiguous, with a last position that it drops: a copy
    made before the clock starts.
    """
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    num_tokens, num_vocab = batch.logits_TV.shape
    size = num_tokens // LENGTH
    padded = batch.logits_TV.new_zeros(size, LENGTH + 1, num_vocab)
    padded[:, :LENGTH] = batch.logits_TV.view(size, LENGTH, num_vocab)
    old, ids = batch.old_logprob_T.view(size, LENGTH), batch.target_ids_T.view(size, LENGTH)
    options: dict[str, Any] = {
        "temperature": 1.0,
        "beta": 0.0,
        "eps_low": CLIP_LOW,
        "eps_high": CLIP_HIGH,
        "inplace": False,
    }

    def run() -> Tensor:
        logits = padded.detach().requires_grad_()
        per_token, _, _ = triton_grpo_loss(
            logits,
            old,
            None,
            ids,
            batch.advantage_T[::LENGTH],
            loss_type="grpo",
            reduce=False,
            **options,
        )
        loss = (per_token * batch.weight_T.view(size, LENGTH)).sum()
        return torch.autograd.grad(loss, logits)[0][:, :LENGTH].flatten(0, 1)

    return run


def _head_gradient(loss: Callable[..., Tensor], batch: HeadBatch, frozen: bool = False) -> Tensor:
    """Gradient by the hidden states, and by the weight unless it is frozen."""
    hidden_TD, weight_VD = (
        batch.hidden_TD.detach().requires_grad_(),
        batch.weight_VD.detach().requires_grad_(not frozen),
    )
    value = loss(
        hidden_TD,
        weight_VD,
        batch.target_ids_T,
        batch.advantage_T,
        batch.weight_T,
        batch.old_logprob_T,
    )
    return torch.autograd.grad(value, [hidden_TD] if frozen else [hidden_TD, weight_VD])[0]


def _flowkernels_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    old: Tensor,
    **options: Any,
) -> Tensor:
    spec = LossSpec(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    tokens: dict[str, Any] = {
        "advantage_T": advantage,
        "weight_T": token_weight,
        "old_logprob_T": old,
    }
    return linear_policy_loss(hidden, weight, targets, spec=spec, **tokens, **options).loss


def _naive_head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *tokens: Tensor) -> Tensor:
    return naive_loss(hidden @ weight.t(), targets, *tokens)


def _peer_loss(
    peer: str, hidden: Tensor, weight: Tensor, targets: Tensor, *tokens: Tensor
) -> Tensor:
    return clipped(head_peers.LOGPROBS[peer](hidden, weight, targets), *tokens)


def _liger_grpo(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantage: Tensor, _: Tensor, old: Tensor
) -> Tensor:
    return head_peers.liger_grpo(
        hidden, weight, targets, advantage, old, LENGTH, (CLIP_LOW, CLIP_HIGH)
    )


def _cross_entropy(
    function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor, *_: Tensor
) -> Tensor:
    return function(hidden, weight, targets)


def _gemm_forward(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return hidden_TD @ weight_VD.t()


def _gemms(batch: HeadBatch) -> Tensor:
    logits_TV = batch.hidden_TD @ batch.weight_VD.t()
    hidden_gradient = logits_TV @ batch.weight_VD
    weight_gradient = logits_TV.t() @ batch.hidden_TD
    assert weight_gradient.shape == batch.weight_VD.shape
    return hidden_gradient
