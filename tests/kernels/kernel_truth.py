"""Random batches, the losses as plain formulas in fp64, the device and the memory of a call."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from flowkernels import LossSpec, SamplingMask
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

_RUNS_TRITON = torch.cuda.is_available() or importlib.util.find_spec("numpy") is not None
IMPLS = ("torch", "triton") if _RUNS_TRITON else ("torch",)
"""Triton's interpreter, which stands in for a GPU, needs numpy."""
BF16_ROUNDING = 2**-8
"""Largest relative error of one rounding."""
Batch = dict[str, Any]
"""Tensors on the CPU by the names of `policy_loss`'s arguments."""


def device_of(impl: str) -> str:
    """Kernels run on the GPU where there is one; their reference is a matter of the CPU."""
    return "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"


def on_device(batch: Batch, impl: str) -> Batch:
    """The batch where `impl` runs; what is there already is not copied."""
    device = device_of(impl)

    def move(value: Any) -> Any:
        if isinstance(value, SamplingMask):
            return SamplingMask(value.token_ids_K.to(device), value.offsets_T1.to(device))
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: move(value) for name, value in batch.items()}


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that a call has allocated at one time, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def random_batch(
    num_tokens: int = 20,
    vocab: int = 17,
    temperature: float | Tensor = 1.0,
    spread: float = 0.5,
    seed: int = 1,
) -> Batch:
    """Logits and tokens with ratios on both sides of every clip, odd weights, targets of -1."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, vocab, generator=rng)
    targets = torch.randint(vocab, (num_tokens,), generator=rng)
    logp = (
        (logits / torch.as_tensor(temperature).reshape(-1, 1))
        .log_softmax(-1)
        .gather(1, targets[:, None])[:, 0]
    )
    noise = torch.randn(5, num_tokens, generator=rng)
    weight = noise[3].clone()
    weight[::5] = 0
    targets[3::8] = -1
    old = logp + spread * noise[1]
    return {
        "logits_TV": logits,
        "target_ids_T": targets,
        "advantage_T": noise[0],
        "weight_T": weight,
        "old_logprob_T": old,
        "ref_logprob_T": logp + spread * noise[2],
        "sampler_logprob_T": old + spread * noise[4],
        "cu_seqlens_S1": torch.tensor(
            [0, num_tokens // 3, num_tokens // 3, num_tokens // 2, num_tokens]
        ),
    }


def counted(batch: Batch) -> Tensor:
    """bool [T]: the rows that take part."""
    is_counted: Tensor = (batch["weight_T"] != 0) & (batch["target_ids_T"] >= 0)
    return is_counted


def mask_of(subsets: list[list[int]]) -> SamplingMask:
    """The CSR form of one list of ids per row, with ids as the trainer packs them."""
    offsets = torch.tensor([0] + [len(ids) for ids in subsets]).cumsum(0)
    return SamplingMask(
        torch.tensor([i for ids in subsets for i in ids], dtype=torch.int32), offsets
    )


def subsets_of(mask: SamplingMask) -> list[list[int]]:
    """One list of ids per row."""
    ids, offsets = mask.token_ids_K.tolist(), mask.offsets_T1.tolist()
    return [ids[begin:end] for begin, end in itertools.pairwise(offsets)]


def plain_rows(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    subsets: list[list[int]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) in the dtype of the logits; `subsets`: ids by row."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    z = logits / torch.as_tensor(temperature, dtype=logits.dtype).reshape(-1, 1)
    logp_all = torch.log_softmax(z, dim=-1)
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    logp = logp_all.gather(1, targets[:, None])[:, 0]
    if subsets:
        rows = zip(z, targets.tolist(), subsets, strict=True)
        total = torch.stack(
            [(row[sorted({*ids, y})] if ids else row).logsumexp(-1) for row, y, ids in rows]
        )
        logp = z.gather(1, targets[:, None])[:, 0] - total
    return logp, entropy, z.logsumexp(-1)


def plain_tokens(
    spec: LossSpec, logp: Tensor, entropy: Tensor, lse: Tensor, tokens: Batch
) -> tuple[Tensor, Tensor]:
    """(loss, weight) of each token, as each paper has it; `tokens` is [T], and `sequence_T`."""
    old, limit = tokens["old_logprob_T"].to(logp.dtype), spec.log_ratio_limit
    advantage, weight, ref, sampler = (
        tokens.get(name, old).to(logp.dtype)
        for name in ("advantage_T", "weight_T", "ref_logprob_T", "sampler_logprob_T")
    )
    behind = torch.exp(old - sampler)
    if spec.mis is not None:
        weight = weight * ((behind >= spec.mis[0]) & (behind <= spec.mis[1]))
    if spec.tis is not None:
        advantage = advantage * behind.clamp(max=spec.tis)
    log_ratio = logp - old
    if spec.loss_type == "gspo":
        log_ratio = sequence_means(log_ratio, weight, tokens["sequence_T"])
    ratio = torch.exp(log_ratio.clamp(-limit, limit))
    if spec.loss_type == "nll":
        loss = -advantage * logp
    elif spec.loss_type == "cispo":
        loss = -ratio.clamp(max=1 + spec.clip_high).detach() * advantage * logp
    else:  # A > 0 pays up to 1 + high; A < 0 costs from 1 - low on and up to the dual bound
        one = torch.ones_like(ratio)
        least = torch.where(advantage > 0, 0 * one, (1 - spec.clip_low) * one)
        dual = (spec.dual_clip or math.inf) * one
        most = torch.where(advantage > 0, (1 + spec.clip_high) * one, dual)
        loss = -advantage * ratio.clamp(least, most)
    u = (ref - logp).clamp(-limit, limit)
    k3 = torch.exp(u) - 1 - u
    kl = {"k1": -u, "k2": u**2 / 2, "k3": k3, "low_var_kl": k3.clamp(-10, 10)}[spec.kl]
    more = spec.kl_coef * kl - spec.entropy_coef * entropy + spec.z_loss_coef * lse**2
    return loss + more, weight


def sequence_means(value: Tensor, weight: Tensor, sequence: Tensor) -> Tensor:
    """Of the tokens with weight of each sequence, at all of its tokens; 0 where there are none."""
    mean = torch.zeros_like(value)
    for each in sequence.unique():
        rows = (sequence == each) & (weight != 0)
        if rows.any():
            mean = torch.where(sequence == each, value[rows].mean(), mean)
    return mean


def plain_loss(spec: LossSpec, logp: Tensor, entropy: Tensor, lse: Tensor, tokens: Batch) -> Tensor:
    """The sum over tokens that count."""
    loss, weight = plain_tokens(spec, logp, entropy, lse, tokens)
    return (weight * loss).sum()


def counted_tokens(batch: Batch) -> Batch:
    """Everything [T] of the rows that take part, with the sequence of each."""
    rows, bounds = counted(batch), batch["cu_seqlens_S1"]
    sequence = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    tokens = {k: x for k, x in batch.items() if k.endswith("_T") and x is not None}
    return {name: value[rows] for name, value in {**tokens, "sequence_T": sequence}.items()}
