"""Attention over whole token trees, each way to compute it:

    python -m bench.gpu --stages attention --out DIR [--dry-run]

Rows of AgentFlow's shape with 3 and with 10 turns (`bench/agentflow_shape.py`), and a chain; at
scale 1 they have 18,017, 64,460 and 16,384 tokens. Heads of Qwen2.5 0.5B and 7B.

flex         what the trainer takes
rectangles   what others see of the tree's root by cuDNN, the rest by flex (train.attention)
split        flex with each group's query heads in batches of their own, so that no program walks
             over all of them in the backward pass
trl          TRL's attention over its own tree of the samples, on torch's FlashAttention 2
causal       the chain by torch's SDPA without a mask, by the kernel that it chooses or by another

On a CPU there is no backward pass, `rectangles` and `trl` have other kernels, and whatever names a
kernel needs a GPU. TFLOP/s counts the pairs of tokens that see each other, 4 FLOPs per channel
forward and 10 backward. `max_diff` is against flex where that ran before, relative to the largest
entry of the output and of the three gradients, on the tokens of the row: TRL's order and its copies
of tokens are taken back first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import tree_attention
from bench.agentflow_shape import agentflow_samples
from bench.measure import seconds_of
from bench.tree_attention import SplitTree
from flowtrain.records import Sample
from flowtrain.trainer.attention import flex
from flowtrain.trainer.packing import PackedRow, pack_row

HEADS = {"0.5b": (14, 2, 64), "7b": (28, 4, 128)}
"""Heads, key heads and their size."""
LAYOUTS = ("3 turns", "10 turns", "chain")
_BACKENDS = {
    "causal cudnn": SDPBackend.CUDNN_ATTENTION,
    "causal flash": SDPBackend.FLASH_ATTENTION,
    "causal efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_TREE_WAYS = ("flex", "rectangles", "split", "trl")
_CHAIN_WAYS = ("flex", "causal", *_BACKENDS)
GPU_WAYS = tuple(_BACKENDS)
"""Ways that do not run on a CPU."""
Results = tuple[Tensor, ...]
"""The output [1, N, H, D], and the gradients by queries, keys and values [1, H, N, D]."""


@dataclass(slots=True)
class Case:
    """What every way gets."""

    layout: str
    samples: Sequence[Sample]
    row: PackedRow
    subtree_end_N: Tensor
    """Of the padded row, as are the inputs."""
    num_pairs: int
    inputs: Sequence[Tensor]
    """Queries, keys and values [1, H, N, D]."""
    upstream_1NHD: Tensor
    truth: Results | None = None
    """What `flex` made of it, once it ran."""


@dataclass(frozen=True, slots=True)
class Way:
    """Attention over the tokens of a case. M: those tokens in the way's own order."""

    kernel: str
    attend: Callable[..., Tensor]
    place_M: Tensor | None = None
    """The token of the case's row that each of its own is; None: the order is the same."""
    first_N: Tensor | None = None
    """Its first copy of each token of the case's row."""

    def given(self, case: Case) -> tuple[Sequence[Tensor], Tensor]:
        """The inputs and the upstream gradient, which one copy of a token gets."""
        place_M, first_N, upstream = self.place_M, self.first_N, case.upstream_1NHD
        if place_M is None or first_N is None:
            return case.inputs, upstream
        inputs = [x.detach()[:, :, place_M].requires_grad_(x.requires_grad) for x in case.inputs]
        own = upstream.new_zeros(1, len(place_M), *upstream.shape[2:])
        own[:, first_N] = upstream[:, : len(first_N)]
        return inputs, own

    def taken_back(self, case: Case, found: Results) -> Results:
        """Results in the case's order; gradients of a token's copies are summed up."""
        place_M, first_N, (out, *grads) = self.place_M, self.first_N, found
        if place_M is None or first_N is None:
            return found
        own = zip(case.inputs, grads, strict=False)  # there may be none
        return out[:, first_N], *(torch.zeros_like(x).index_add_(2, place_M, g) for x, g in own)


def ways_of(layout: str) -> tuple[str, ...]:
    """What is measured on a layout, `flex` first."""
    return _CHAIN_WAYS if layout == "chain" else _TREE_WAYS


def cases(
    scale: float,
    heads: tuple[int, int, int],
    device: torch.device,
    has_backward: bool = True,
    layouts: Sequence[str] = LAYOUTS,
) -> Iterator[Case]:
    """Each layout with random inputs, bf16 on a GPU, or else fp32; one at a time, as those of the
    largest take a GB.
    """
    num_heads, num_kv_heads, size = heads
    rng = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device).to(dtype)

    for layout in layouts:
        samples = _samples(layout, scale)
        row = pack_row(samples)
        padded = flex.padded(row)
        num = len(padded.input_ids_N)
        yield Case(
            layout,
            samples,
            row,
            padded.subtree_end_N.to(device),
            int(padded.position_ids_N.sum()) + num,
            [
                normal(1, number, num, size).requires_grad_(has_backward)
                for number in (num_heads, num_kv_heads, num_kv_heads)
            ],
            normal(1, num, num_heads, size),
        )


def _samples(layout: str, scale: float) -> list[Sample]:
    if layout != "chain":
        return agentflow_samples(int(layout.split()[0]), scale)
    num_tokens = flex.BLOCK * max(1, round(16384 * scale / flex.BLOCK))
    return [Sample((0,) * num_tokens, (0,), (0.0,), (0.0,), (1.0,))]


def measure_way(case: Case, kind: str, heads: str, repeats: int) -> dict[str, Any]:
    """One way on one case; no backward pass where the inputs need none.

    Raises whatever keeps it from running: ModuleNotFoundError without TRL, RuntimeError where a GPU
    is needed.
    """
    way = way_of(kind, case)
    inputs, upstream = way.given(case)
    attend = partial(way.attend, *inputs, scaling=inputs[0].shape[-1] ** -0.5)
    found = way.taken_back(case, _both(attend, inputs, upstream))
    if kind == "flex":
        case.truth = found
    gflops = 4e-9 * inputs[0].shape[1] * inputs[0].shape[-1] * case.num_pairs
    forward_s = statistics.median([seconds_of(attend) for _ in range(repeats)])
    row = {
        "heads": heads,
        "layout": case.layout,
        "way": kind,
        "kernel": way.kernel,
        "device": case.subtree_end_N.device.type,
        "tokens": inputs[0].shape[2],
        "forward_ms": 1e3 * forward_s,
        "forward_tflops": gflops / forward_s / 1e3,
    }
    if inputs[0].requires_grad:
        both = partial(_both, attend, inputs, upstream)
        backward_s = statistics.median([seconds_of(both) for _ in range(repeats)]) - forward_s
        row |= {"backward_ms": 1e3 * backward_s, "backward_tflops": 2.5 * gflops / backward_s / 1e3}
    return row | ({"max_diff": max_diff(case, found)} if case.truth else {})


def max_diff(case: Case, found: Results) -> float:
    """The largest difference to flex on the tokens of the row, relative to the largest entry."""
    assert case.truth is not None
    num = len(case.row.input_ids_N)
    own = [(slice(None), slice(num)), *[(slice(None), slice(None), slice(num))] * 3]
    return max(
        float((x[part] - truth[part]).float().abs().max() / truth[part].float().abs().max())
        for x, truth, part in zip(found, case.truth, own, strict=False)
    )


def way_of(kind: str, case: Case) -> Way:
    """The structure of the case's row as a way wants it, made once for all its layers."""
    ends_N, device = case.subtree_end_N, case.subtree_end_N.device
    if device.type == "cpu" and kind in GPU_WAYS:
        raise RuntimeError("a GPU is needed")
    if kind == "flex":
        return Way("FlexAttention", flex.FlexTree.of(ends_N).attend)
    if kind == "split":
        return Way("FlexAttention", SplitTree.of(ends_N).attend)
    if kind == "rectangles":
        library = "cuDNN" if device.type == "cuda" else "torch's flash for CPUs"
        attend = flex.FlexTree.of(ends_N, rectangles=True).attend
        return Way(f"{library} and FlexAttention", attend)
    if kind == "trl":
        packed = tree_attention.trl_row(case.samples)
        places = [x.to(device) for x in tree_attention.trl_places(packed, case.row)]
        kernel = "FlashAttention 2" if device.type == "cuda" else "SDPA, a segment at a time"
        attend = tree_attention.trl_attention(packed, device)
        return Way(f"torch's {kernel}", attend, *places)
    return _causal(kind, case)


def _causal(kind: str, case: Case) -> Way:
    backend = None if kind == "causal" else _BACKENDS[kind]
    query, key, value = case.inputs
    choice = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=True)
    kernel = SDPBackend(choice) if backend is None else backend

    def attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        group = query.shape[1] // key.shape[1]
        if backend is SDPBackend.EFFICIENT_ATTENTION:  # it has no groups
            key, value, group = *(x.repeat_interleave(group, 1) for x in (key, value)), 1
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out_1HND = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=group > 1
            )
        return out_1HND.transpose(1, 2)

    return Way(f"torch's {kernel.name}", attend)


def _both(attend: Callable[[], Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> Results:
    out = attend()
    grads = torch.autograd.grad(out, inputs, upstream) if inputs[0].requires_grad else ()
    return out.detach(), *grads
