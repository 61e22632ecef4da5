"""Attention over token trees, each way to compute it:  python -m bench.attention [--json F]

Rows of AgentFlow's shape with 3 and with 10 turns (`bench/step_batches.py`), one chain and four,
each of about `--tokens` tokens; heads of Qwen2.5 0.5B and 1.5B. `sdpa` is the way on a CPU; the
others need a GPU, and one that does not run is left out with its reason. `causal` is torch's SDPA
on the chains without a mask: the best that a library makes of a sequence. TFLOP/s counts the
pairs of tokens that see each other, 4 FLOPs per channel forward and 10 backward. `max_diff` is
against the first way, relative to the largest entry of the output and of the three gradients.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import print_table, runs_here, seconds_of, write_json
from bench.step_batches import agentflow
from flowtrain.training.attention import NAMES, structure_of
from flowtrain.training.flex import padded
from flowtrain.training.tree import PackedRow, pack_rows

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
        default="flex,flash,varlen" if on_gpu else "sdpa",
        help="comma-separated, of train.attention (default: %(default)s)",
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
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def cases(num_tokens: int, heads: tuple[int, int, int], device: torch.device) -> Iterator[Case]:
    num_heads, num_kv_heads, size = heads
    for layout, row in layouts(num_tokens).items():
        row = padded(row)
        num = len(row.input_ids_N)
        rng = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        normal = partial(torch.randn, generator=rng, device=device)
        inputs = [normal(1, n, num, size) for n in (num_heads, num_kv_heads, num_kv_heads)]
        query, key, value = (x.to(dtype).requires_grad_() for x in inputs)
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
        samples = agentflow(turns, "small", num_tokens / 16384).samples
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
    size = case.inputs[0].shape[-1]
    ways: dict[str, Callable[[], Tensor]] = {
        kind: partial(
            structure_of(NAMES[kind], case.subtree_end_N).attend, *case.inputs, scaling=size**-0.5
        )
        for kind in kinds
    }
    if case.chain is not None:
        ways["causal"] = partial(_causal, case)
    gflops = 4e-9 * case.inputs[0].shape[1] * size * case.num_pairs
    rows: list[dict[str, Any]] = []
    first: Results | None = None
    for name, attend in ways.items():
        both = partial(_both, attend, case)
        if not runs_here(f"{heads} {case.layout}: {name}", both):
            continue
        results = both()
        first = first or results
        forward_s, both_s = (
            statistics.median([seconds_of(run) for _ in range(repeats)]) for run in (attend, both)
        )
        rows.append(
            {
                "heads": heads,
                "layout": case.layout,
                "way": name,
                "device": case.subtree_end_N.device.type,
                "tokens": len(case.subtree_end_N),
                "forward_ms": 1e3 * forward_s,
                "backward_ms": 1e3 * (both_s - forward_s),
                "forward_tflops": gflops / forward_s / 1e3,
                "backward_tflops": 2.5 * gflops / (both_s - forward_s) / 1e3,
                "max_diff": max(map(_difference, results, first)),
            }
        )
    return rows


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
