"""Attention over token trees, each way to compute it:  python -m bench.attention [--json F]

Rows of AgentFlow's shape with 3 and with 10 turns (`bench/agentflow_shape.py`), one chain and four,
each of about `--tokens` tokens; heads of Qwen2.5 0.5B and 1.5B. `sdpa` is the way on a CPU and
needs transformers; the others need a GPU, and one that does not run is left out with its reason.
`split` is `flex` with each group's query heads in batches of their own, so that no program walks
over all of them in the backward pass. `causal` is torch's SDPA on the chains without a mask: the
best that a library makes of a sequence. TFLOP/s counts the pairs of tokens that see each other, 4
FLOPs per channel forward and 10 backward. `max_diff` is against the first way, relative to the
largest entry of the output and of the three gradients. SWEEP has options of Flex's kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench.agentflow_shape import agentflow_samples
from bench.measure import report, runs_here, seconds_of
from flowtrain.training import flex
from flowtrain.training.tree import PackedRow, pack_rows


def _backward(small: int, large: int, warps: int, stages: int) -> dict[str, int]:
    """The backward kernels' blocks: dK and dV by key block, dQ by query block."""
    blocks = {"BLOCK_M1": small, "BLOCK_N1": large, "BLOCK_M2": large, "BLOCK_N2": small}
    options = {**blocks, "num_warps": warps, "num_stages": stages}
    return {f"bwd_{name}": value for name, value in options.items()}


SWEEP: dict[str, dict[str, int]] = {
    "fwd 128x64, 4 warps": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4},
    "fwd 128x64, 8 warps": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8},
    "fwd 128x128, 8 warps": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8},
    "fwd 64x128, 4 warps": {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 128, "fwd_num_warps": 4},
    "bwd 64, 4 warps": _backward(64, 64, 4, 2),
    "bwd 64x128, 4 warps": _backward(64, 128, 4, 2),
    "bwd 64x128, 8 warps": _backward(64, 128, 8, 2),
    "bwd 64x128, 8 warps, 3 stages": _backward(64, 128, 8, 3),
    "bwd 128, 8 warps": _backward(128, 128, 8, 2),
}
"""Options of Flex's kernels, each beside those that torch chooses."""
HEADS = {"0.5b": (14, 2, 64), "1.5b": (12, 2, 128)}
"""Heads, key heads and their size."""
Results = tuple[Tensor, ...]
"""The output and the gradients by queries, keys and values."""


@dataclass(frozen=True, slots=True)
class Case:
    """What every way gets."""

    layout: str
    subtree_end_N: Tensor
    num_pairs: int
    inputs: tuple[Tensor, Tensor, Tensor]
    """Queries, keys and values [1, H, N, D]."""
    upstream_1NHD: Tensor

    @property
    def chain(self) -> int | None:
        """Tokens of each chain, if the row is made of chains."""
        num = len(self.subtree_end_N)
        return {"1 chain": num, "4 chains": num // 4}.get(self.layout)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--tokens",
        type=int,
        default=16384 if on_gpu else 1024,
        help="of a row (default: %(default)s)",
    )
    parser.add_argument(
        "--kinds",
        default="flex,split,flash" if on_gpu else "sdpa",
        help="comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--heads", default=",".join(HEADS), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="timed runs of each (default: %(default)s)"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    rows = [
        row
        for heads in args.heads.split(",")
        for case in cases(args.tokens, HEADS[heads], device)
        for row in measure(case, args.kinds.split(","), heads, args.repeats)
    ]
    report(args.json, rows)


def cases(
    num_tokens: int,
    heads: tuple[int, int, int],
    device: torch.device,
    has_backward: bool = True,
) -> Iterator[Case]:
    num_heads, num_kv_heads, size = heads
    for layout, row in layouts(num_tokens).items():
        row = flex.padded(row)
        num = len(row.input_ids_N)
        rng = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        normal = partial(torch.randn, generator=rng, device=device)
        inputs = [normal(1, n, num, size) for n in (num_heads, num_kv_heads, num_kv_heads)]
        query, key, value = (x.to(dtype).requires_grad_(has_backward) for x in inputs)
        yield Case(
            layout,
            row.subtree_end_N.to(device),
            int(row.position_ids_N.sum()) + num,
            (query, key, value),
            normal(1, num, num_heads, size).to(dtype),
        )


def layouts(num_tokens: int) -> dict[str, PackedRow]:
    """Rows of about this number of tokens; a multiple of 512 for chains."""
    found = {}
    for turns in (3, 10):
        samples = agentflow_samples(turns, num_tokens / 16384)
        rows = pack_rows(samples, num_tokens)
        found[f"{turns} turns"] = max(rows, key=lambda row: len(row.input_ids_N))
    for count in (1, 4):
        size = num_tokens // count
        found["1 chain" if count == 1 else f"{count} chains"] = replace(
            found["3 turns"],
            input_ids_N=torch.zeros(size * count, dtype=torch.int64),
            position_ids_N=torch.arange(size).repeat(count),
            subtree_end_N=torch.arange(1, count + 1).repeat_interleave(size) * size,
        )
    return found


def measure(case: Case, kinds: list[str], heads: str, repeats: int) -> list[dict[str, Any]]:
    """A row of the table for each way that runs."""
    torch._dynamo.reset()  # each size of head is a model of its own
    truth: Results | None = None
    rows: list[dict[str, Any]] = []
    for kind in [*kinds, *(["causal"] if case.chain is not None else [])]:
        if runs_here(f"{heads} {case.layout}: {kind}", partial(results, case, kind)):
            truth = truth or results(case, kind)
            rows.append(measure_way(case, kind, heads, repeats, truth))
    return rows


def measure_way(
    case: Case, kind: str, heads: str, repeats: int, truth: Results | None = None
) -> dict[str, Any]:
    """One way on one case; no backward pass where the inputs need none."""
    attend, found = way(kind, case), results(case, kind)
    gflops = 4e-9 * case.inputs[0].shape[1] * case.inputs[0].shape[-1] * case.num_pairs
    forward_s = statistics.median([seconds_of(attend) for _ in range(repeats)])
    row = {
        "heads": heads,
        "layout": case.layout,
        "way": kind,
        "device": case.subtree_end_N.device.type,
        "tokens": len(case.subtree_end_N),
        "forward_ms": 1e3 * forward_s,
        "forward_tflops": gflops / forward_s / 1e3,
    }
    if case.inputs[0].requires_grad:
        both = partial(_both, attend, case)
        backward_s = statistics.median([seconds_of(both) for _ in range(repeats)]) - forward_s
        row |= {"backward_ms": 1e3 * backward_s, "backward_tflops": 2.5 * gflops / backward_s / 1e3}
    return row | ({"max_diff": max(map(_difference, found, truth))} if truth else {})


def results(case: Case, kind: str) -> Results:
    """The output, and the gradients where the inputs need them."""
    attend = way(kind, case)
    return _both(attend, case) if case.inputs[0].requires_grad else (attend(),)


def way(kind: str, case: Case) -> Callable[[], Tensor]:
    """Attention on the inputs of the case; the structure of the row is made here."""
    if kind == "causal":
        return partial(_causal, case)
    return partial(_way(kind, case), scaling=case.inputs[0].shape[-1] ** -0.5)


def _way(kind: str, case: Case) -> Callable[..., Tensor]:
    if kind in ("flex", "flash"):
        tree = flex.FlexTree.of(case.subtree_end_N, flash=kind == "flash")
        return partial(tree.attend, *case.inputs)
    if kind == "split":
        return partial(SplitTree.of(case.subtree_end_N).attend, *case.inputs)
    if kind in SWEEP:
        options = {**flex._TRITON, **SWEEP[kind]}
        mask = flex.FlexTree.of(case.subtree_end_N).mask()
        return partial(_flex, mask, *case.inputs, kernel_options=options, enable_gqa=True)
    from flowtrain.training.attention import NAMES, structure_of

    return partial(structure_of(NAMES[kind], case.subtree_end_N).attend, *case.inputs)


def _flex(mask: BlockMask, *inputs: Tensor, scaling: float, **options: Any) -> Tensor:
    attend: Any = flex._compiled() if inputs[0].is_cuda else flex_attention
    out: Tensor = attend(*inputs, block_mask=mask, scale=scaling, **options)
    return out.transpose(1, 2).contiguous()


@dataclass(slots=True)
class SplitTree:
    """The structure of a row as `FlexTree` has it, with head g of every group in batch g: key heads
    are as many as query heads in each batch.
    """

    mask: BlockMask
    batched: BlockMask | None = None
    """Made once, by the first layer: its lists are many small launches."""

    @classmethod
    def of(cls, subtree_end_N: Tensor, flash: bool = False) -> SplitTree:
        return cls(flex.FlexTree.of(subtree_end_N, flash).mask())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, **_: object
    ) -> Tensor:
        num_keys, group = key.shape[1], query.shape[1] // key.shape[1]
        query_GKND = query.view(num_keys, group, *query.shape[2:]).transpose(0, 1)
        mask = self.batched = self.batched or _batched(self.mask, group)
        keys = (x.expand(group, *x.shape[1:]) for x in (key, value))
        options = {"kernel_options": dict(flex._TRITON)} if query.is_cuda else {}
        out_GNKD = _flex(mask, query_GKND, *keys, scaling=scaling, **options)
        return out_GNKD.permute(1, 2, 0, 3).flatten(1, 2)[None]


def _batched(mask: BlockMask, num: int) -> BlockMask:
    parts = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    lists = [x.expand(num, *x.shape[1:]).contiguous() for x in parts if x is not None]
    make: Any = BlockMask.from_kv_blocks
    options = {"BLOCK_SIZE": mask.BLOCK_SIZE, "mask_mod": mask.mask_mod}
    return cast(BlockMask, make(*lists, **options, seq_lengths=mask.seq_lengths))


def _both(attend: Callable[[], Tensor], case: Case) -> Results:
    out = attend()
    return out.detach(), *torch.autograd.grad(out, case.inputs, case.upstream_1NHD)


def _causal(case: Case) -> Tensor:
    """The chains side by side, as a library takes a batch."""
    assert case.chain is not None
    query, key, value = (x[0].unflatten(1, (-1, case.chain)).transpose(0, 1) for x in case.inputs)
    out_SHQD = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out_SHQD.transpose(1, 2).flatten(0, 1)[None]


def _difference(result: Tensor, other: Tensor) -> float:
    return float((result - other).float().abs().max() / other.float().abs().max())


if __name__ == "__main__":
    main()
