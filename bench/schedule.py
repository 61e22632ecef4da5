"""The programs of attention's kernels on the processors of a GPU, simulated:

    python -m bench.schedule [--json F]

The grids of FlexAttention's kernels (torch's `_inductor/kernel/flex`) in the order in which a GPU
takes them, each program on the first processor that is free; one key head takes its whole grid
before the next. A program costs its matrix products of blocks of 128 x 128 tokens, and `_START` of
them to begin: forward, 2 for each block of keys that a block of queries sees; backward, 3 for those
again and, in programs of their own that come first, 4 for each block of queries that sees a block
of keys, in all heads of its group: so the keys that everybody sees are one program's work. `split`
has a batch for each head of a group. One product takes what makes the chain of 16,384 tokens as
fast as it was measured on an H200; everything else is predicted. Rows that were measured are made
as they were then: the first samples that fit into 16,384 tokens.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from bench.agentflow_shape import agentflow_samples
from bench.attention import HEADS, layouts
from bench.measure import report
from flowtrain.training.flex import FlexTree, padded
from flowtrain.training.tree import PackedRow, pack_row, pack_rows

MEASURED = Path(__file__).parent / "results" / "h200" / "attention.json"
_PROCESSORS = 132
_START = 8
"""Products that a program takes to begin: with them the forward pass of 4 chains is as measured."""
_NAMES = {"chain 16k": "1 chain", "chains 4x4k": "4 chains"}
"""Layouts of the measured file that have another name now."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a row that see each other."""

    seen: list[int]
    """Blocks of keys that each block of queries sees."""
    seeing: list[int]
    """Blocks of queries that see each block of keys."""

    @classmethod
    def of(cls, row: PackedRow) -> Blocks:
        mask = FlexTree.of(padded(row).subtree_end_N).mask()
        lists = [mask.kv_num_blocks, mask.full_kv_num_blocks]
        lists += [mask.q_num_blocks, mask.full_q_num_blocks]
        partial, whole, by_key, whole_by_key = (x[0, 0] for x in lists if x is not None)
        return cls((partial + whole).tolist(), (by_key + whole_by_key).tolist())

    def forward(self, num_heads: int) -> Iterator[int]:
        """Products of each program, in order."""
        return (2 * number for _ in range(num_heads) for number in self.seen)

    def backward(self, num_heads: int, num_keys: int, is_split: bool) -> Iterator[int]:
        """Products of each program, in order."""
        group = num_heads // num_keys
        batches, heads = (group, 1) if is_split else (1, group)
        grid = [4 * number * heads for number in self.seeing]
        grid += [3 * number for number in self.seen] * heads
        return chain.from_iterable(repeat(grid, num_keys * batches))


def makespan(costs: Iterable[int]) -> int:
    """When the last program ends, each begun by the processor that is free first."""
    free_at = [0] * _PROCESSORS
    for cost in costs:
        heapq.heapreplace(free_at, free_at[0] + cost + _START)
    return max(free_at)


def measured_rows() -> dict[str, PackedRow]:
    """The rows that were measured on an H200."""
    found = layouts(16384)
    for turns in (3, 10):
        ordered = sorted(agentflow_samples(turns, 1), key=lambda s: s.prompt_ids + s.response_ids)
        rows = [pack_row(ordered[: number + 1]) for number in range(len(ordered))]
        found[f"{turns} turns"] = [row for row in rows if len(row.input_ids_N) <= 16384][-1]
    return found


def predicted(row: PackedRow, heads: str, base: Blocks) -> dict[str, Any]:
    """Milliseconds of a row, from those of the chain `base` with the same heads."""
    num_heads, num_keys, _ = HEADS[heads]
    own, ms = Blocks.of(row), _measured("1 chain", heads)
    forward = ms["forward_ms"] / makespan(base.forward(num_heads))
    backward = ms["backward_ms"] / makespan(base.backward(num_heads, num_keys, False))
    whole, split = (makespan(own.backward(num_heads, num_keys, x)) for x in (False, True))
    even = sum(cost + _START for cost in own.backward(num_heads, num_keys, False)) / _PROCESSORS
    return {
        "heads": heads,
        "tokens": len(row.input_ids_N),
        "forward_ms": forward * makespan(own.forward(num_heads)),
        "backward_ms": backward * whole,
        "split_ms": backward * split,
        "even_ms": backward * even,
    }


def _measured(layout: str, heads: str) -> dict[str, Any]:
    way = {"0.5b": "flex", "1.5b": "flex before"}[heads]  # the only one that ran with those heads
    rows = json.loads(MEASURED.read_text())["rows"]
    return next(
        (
            row
            for row in rows
            if (row["heads"], _NAMES.get(row["layout"], row["layout"]), row["way"])
            == (heads, layout, way)
        ),
        {},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    then = measured_rows()
    base, table = Blocks.of(then["1 chain"]), []
    whole = {f"{n} turns, whole": pack_rows(agentflow_samples(n, 1), 2**17)[0] for n in (3, 10)}
    for heads in HEADS:
        for layout, row in (then | whole).items():
            ms = _measured(layout, heads)
            was = {f"measured_{name}": ms.get(name) for name in ("forward_ms", "backward_ms")}
            table.append({"layout": layout, **predicted(row, heads, base), **was})
    report(args.json, table)


if __name__ == "__main__":
    main()
