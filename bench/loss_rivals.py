"""The runs that `bench.losses` compares: the same loss, PPO's clip, by flowkernels and its peers.

Each function gives the runs of one path as {implementation: what to time}; a run returns what its
error is measured on: log-probs, or the gradient by the logits or by the hidden states. Peers are
called as their sources have it: TRL 1.16's log-probs of logits and its chunked head, Liger 0.8.5's
GRPO loss on logits and its `FusedLinearScaledCrossEntropy` (CuTe on sm_90, chunks of 512 tokens in
torch elsewhere), whose number per token takes any loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from flowkernels import (
    LossSpec,
    linear_logprobs,
    linear_policy_loss,
    logprobs,
    policy_loss,
)
from torch import Tensor

MODULES = {"trl": "trl.kernels", "liger": "liger_kernel.transformers.grpo_loss"}
PEERS = ("torch", "compile", *MODULES, "gemm")
"""gemm: from hidden states, the bare products and nothing else."""
SPEC = LossSpec(clip_low=0.2, clip_high=0.28)
LENGTH = 512
"""Tokens of a sequence; advantages are constant within it, because Liger's kernel takes no others.
"""
Runs = dict[str, Callable[[], Tensor]]
Loss = Callable[..., Tensor]


def missing(peer: str, device: str) -> str | None:
    """Why a peer cannot be measured; None if it can."""
    if peer == "liger" and device == "cpu":
        return "its kernels need a GPU"
    if peer in MODULES:
        try:
            importlib.import_module(MODULES[peer])
        except Exception as error:  # noqa: BLE001  # foreign code may fail in any way
            return f"{MODULES[peer]} cannot be imported: {error}"
    return None


@dataclass(frozen=True)
class Tokens:
    """What is known of the tokens of a case; ratios on both sides of the clip."""

    target_ids_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    old_logprob_T: Tensor

    @classmethod
    def make(cls, target_ids_T: Tensor, logprob_T: Tensor, rng: torch.Generator) -> Tokens:
        num_tokens, device = len(logprob_T), logprob_T.device
        noise_2T = torch.randn(2, num_tokens, generator=rng, device=device)
        return cls(
            target_ids_T,
            noise_2T[0, ::LENGTH].repeat_interleave(LENGTH)[:num_tokens].contiguous(),
            torch.full((num_tokens,), 1 / num_tokens, device=device),
            logprob_T + 0.2 * noise_2T[1],
        )

    def clipped(self, logprob_T: Tensor) -> Tensor:
        """PPO's loss of log-probs, in plain torch."""
        ratio_T = (logprob_T - self.old_logprob_T).exp()
        bounded_T = ratio_T.clamp(1 - SPEC.clip_low, 1 + SPEC.clip_high)
        surrogate_T = torch.minimum(ratio_T * self.advantage_T, bounded_T * self.advantage_T)
        return -(self.weight_T * surrogate_T).sum()

    def loss_by(self, score: Loss) -> Loss:
        """The loss on log-probs that another function makes of inputs and targets."""
        return lambda *inputs: self.clipped(score(*inputs, self.target_ids_T))

    def our_loss(self, function: Callable[..., Any], **options: Any) -> Loss:
        """The loss as one of flowkernels' functions makes it of its inputs."""
        tokens = {name: getattr(self, name) for name in ("advantage_T", "weight_T")}
        options |= {"old_logprob_T": self.old_logprob_T, "spec": SPEC, **tokens}
        return lambda *inputs: function(*inputs, self.target_ids_T, **options).loss


@dataclass(frozen=True)
class Batch:
    """One case on logits."""

    logits_TV: Tensor
    tokens: Tokens

    @classmethod
    def make(cls, num_tokens: int, num_vocab: int, dtype: torch.dtype, device: str) -> Batch:
        rng = torch.Generator(device).manual_seed(0)
        logits_TV = torch.empty(num_tokens, num_vocab, dtype=dtype, device=device)
        for rows in logits_TV.split(512):  # no fp32 copy of all of it
            rows.copy_(3 * torch.randn(rows.shape, generator=rng, device=device))
        target_ids_T = torch.randint(num_vocab, (num_tokens,), generator=rng, device=device)
        scores = logprobs(logits_TV, target_ids_T)
        return cls(logits_TV, Tokens.make(target_ids_T, scores.logprob_T, rng))


@dataclass(frozen=True)
class HeadBatch:
    """One case from hidden states; logits of about N(0, 3)."""

    hidden_TD: Tensor
    weight_VD: Tensor
    tokens: Tokens

    @classmethod
    def make(
        cls, num_tokens: int, size: int, num_vocab: int, dtype: torch.dtype, device: str
    ) -> HeadBatch:
        rng = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=rng, device=device)
        hidden_TD = normal(num_tokens, size).to(dtype)
        weight_VD = (3 * size**-0.5 * normal(num_vocab, size)).to(dtype)
        target_ids_T = torch.randint(num_vocab, (num_tokens,), generator=rng, device=device)
        scores = linear_logprobs(hidden_TD, weight_VD, target_ids_T)
        return cls(hidden_TD, weight_VD, Tokens.make(target_ids_T, scores.logprob_T, rng))


def logprobs_runs(batch: Batch, peers: Sequence[str]) -> Runs:
    inputs = batch.logits_TV, batch.tokens.target_ids_T
    compiled = torch.compile(naive_scores, dynamic=True)
    runs: Runs = {
        "flowkernels": lambda: logprobs(*inputs).logprob_T,
        "torch": lambda: naive_scores(*inputs)[0],
        "compile": lambda: compiled(*inputs)[0],
        "trl": lambda: trl_scores(*inputs),
    }
    return _chosen(runs, peers)


def loss_runs(batch: Batch, peers: Sequence[str]) -> Runs:
    tokens = batch.tokens
    naive = tokens.loss_by(naive_logprobs)
    losses = {
        "flowkernels": tokens.our_loss(policy_loss),
        "torch": naive,
        "compile": torch.compile(naive, dynamic=True),
        "trl": tokens.loss_by(trl_scores),
    }
    runs: Runs = {name: partial(gradient, loss, batch.logits_TV) for name, loss in losses.items()}
    if "liger" in peers and len(tokens.target_ids_T) % LENGTH == 0:
        runs["liger"] = _liger_run(batch)
    return _chosen(runs, peers)


def head_forward_runs(batch: HeadBatch, peers: Sequence[str]) -> Runs:
    hidden, weight, targets = batch.hidden_TD, batch.weight_VD, batch.tokens.target_ids_T
    scores: dict[str, Loss] = {
        "flowkernels": lambda *inputs: linear_logprobs(*inputs).logprob_T,
        "torch": naive_head,
        "compile": torch.compile(naive_head, dynamic=True),
        "trl": trl_head,
        "liger": liger_head,
    }
    if hidden.dtype != torch.float32:
        scores["flowkernels fp32"] = lambda *inputs: (
            linear_logprobs(*inputs, fp32_logits=True).logprob_T
        )
    runs: Runs = {name: partial(score, hidden, weight, targets) for name, score in scores.items()}
    return _chosen(runs | {"gemm": lambda: hidden @ weight.t()}, peers)


def head_loss_runs(batch: HeadBatch, peers: Sequence[str]) -> Runs:
    """ "top 20 %": every fifth token has weight; "frozen": the weight takes no gradient."""
    tokens, inputs = batch.tokens, (batch.hidden_TD, batch.weight_VD)
    is_fifth_T = torch.arange(len(tokens.weight_T), device=tokens.weight_T.device) % 5 == 0
    sparse = replace(tokens, weight_T=torch.where(is_fifth_T, tokens.weight_T, 0.0))
    naive, ours = tokens.loss_by(naive_head), tokens.our_loss(linear_policy_loss)
    losses = {
        "flowkernels": ours,
        "flowkernels top 20 %": sparse.our_loss(linear_policy_loss),
        "torch": naive,
        "compile": torch.compile(naive, dynamic=True),
        "trl": tokens.loss_by(trl_head),
        "liger": tokens.loss_by(liger_head),
    }
    if batch.hidden_TD.dtype != torch.float32:
        losses["flowkernels fp32"] = tokens.our_loss(linear_policy_loss, fp32_logits=True)
    runs: Runs = {name: partial(gradient, loss, *inputs) for name, loss in losses.items()}
    runs["flowkernels frozen"] = lambda: gradient(lambda h: ours(h, inputs[1]), inputs[0])
    return _chosen(runs | {"gemm": partial(_gemms, batch)}, peers)


def head_gradient(batch: HeadBatch, memory_budget: int | None) -> Tensor:
    """Ours with its gradients, in chunks of so many bytes of logits, or its own."""
    ours = batch.tokens.our_loss(linear_policy_loss, memory_budget=memory_budget)
    return gradient(ours, batch.hidden_TD, batch.weight_VD)


def gradient(loss: Loss, *inputs: Tensor) -> Tensor:
    """The gradient by the first input; those by the others are computed, too."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(*leaves), leaves)[0]


def naive_scores(logits_TV: Tensor, target_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy as a trainer without kernels does."""
    logp_TV = logits_TV.float().log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_TV.gather(1, target_ids_T[:, None])[:, 0], entropy_T


def naive_logprobs(logits_TV: Tensor, target_ids_T: Tensor) -> Tensor:
    """Without the entropy that ours returns beside it."""
    return logits_TV.float().log_softmax(-1).gather(1, target_ids_T[:, None])[:, 0]


def naive_head(hidden_TD: Tensor, weight_VD: Tensor, target_ids_T: Tensor) -> Tensor:
    return naive_logprobs(hidden_TD @ weight_VD.t(), target_ids_T)


def trl_scores(logits_TV: Tensor, target_ids_T: Tensor) -> Tensor:
    """TRL's released log-probs with entropy: a Triton kernel on a GPU, chunks of torch on a CPU."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    inputs = logits_TV, target_ids_T
    logprob_T: Tensor = selective_log_softmax_and_entropy(*inputs, entropy_requires_grad=False)[0]
    return logprob_T


def trl_head(hidden_TD: Tensor, weight_VD: Tensor, target_ids_T: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    options = (1.0, 8192, None, 1.0, ("entropy",))
    found = ChunkedLogProbFunction.apply(hidden_TD, weight_VD, None, target_ids_T, *options)
    logprob_T: Tensor = found[0]
    return logprob_T


def liger_head(hidden_TD: Tensor, weight_VD: Tensor, target_ids_T: Tensor) -> Tensor:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function: Any = module.LigerFusedLinearScaledCrossEntropyFunction
    loss_T: Tensor = function.apply(hidden_TD, weight_VD, target_ids_T)
    return -loss_T


def _liger_run(batch: Batch) -> Callable[[], Tensor]:
    """Liger's logits are [B, L + 1, V] and contiguous, with a last position that it drops: a copy
    made before the clock starts.
    """
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    tokens, (num_tokens, num_vocab) = batch.tokens, batch.logits_TV.shape
    shape = num_tokens // LENGTH, LENGTH
    padded = batch.logits_TV.new_zeros(shape[0], LENGTH + 1, num_vocab)
    padded[:, :LENGTH] = batch.logits_TV.view(*shape, num_vocab)
    old, ids = tokens.old_logprob_T.view(shape), tokens.target_ids_T.view(shape)
    options: dict[str, Any] = {
        "temperature": 1.0, "beta": 0.0, "eps_low": SPEC.clip_low, "eps_high": SPEC.clip_high,
        "inplace": False, "loss_type": "grpo", "reduce": False,
    }  # fmt: skip

    def loss(logits: Tensor) -> Tensor:
        given = logits, old, None, ids, tokens.advantage_T[::LENGTH]
        per_token: Tensor = triton_grpo_loss(*given, **options)[0]
        return (per_token * tokens.weight_T.view(shape)).sum()

    return lambda: gradient(loss, padded)[:, :LENGTH].flatten(0, 1)


def _gemms(batch: HeadBatch) -> Tensor:
    logits_TV = batch.hidden_TD @ batch.weight_VD.t()
    hidden_gradient = logits_TV @ batch.weight_VD
    weight_gradient = logits_TV.t() @ batch.hidden_TD
    assert weight_gradient.shape == batch.weight_VD.shape
    return hidden_gradient


def _chosen(runs: Runs, peers: Sequence[str]) -> Runs:
    return {name: run for name, run in runs.items() if name.split()[0] in ("flowkernels", *peers)}
