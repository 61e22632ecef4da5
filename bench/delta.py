"""Sparse deltas of bf16 weights:  python -m bench.delta [--json F] [--full] [--sizes …]
[--densities …] [--threads …]

Three tables follow each other for each size and density. The first has bytes per changed word: ours
at level 1 and at level 2 (which uses the old exponents as context), the entropy bounds of the same
data (plain, and given the old exponent), and the wire formats of others, each checked to restore
the new weights. The second has speed: GB/s of model bytes (2 per word) to pack and to apply in
place, million changed words per second, and `of touch`, the time of a numpy maximum over old and
new divided by the time to pack, the best of several turns. The third has peak memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.delta_rivals import FORMATS, U16
from bench.delta_weights import Step, bounds, synthetic
from bench.measure import extra_bytes, new_parser, report, time_in_turn
from flowtrain import _delta

_MIB = 2**20
_ISAS = ("scalar", "avx2", "avx512")
Row = dict[str, Any]


def main() -> None:
    full = {"sizes": "512,2048", "densities": "0.5,1,3,10", "repeats": 5}
    parser = new_parser(__doc__, **full)
    add = parser.add_argument
    add("--sizes", default="64", help="MiB of synthetic weights")
    add("--densities", default="1,10", help="percent of words that change")
    add("--threads", default="1,2", help="that pack and apply")
    add("--repeats", type=int, default=3, help="turns, of which the best counts")
    args = parser.parse_args()
    report(args.json, rows(args))


def rows(args: argparse.Namespace) -> Iterator[Row]:
    sizes, threads = ([int(x) for x in text.split(",") if x] for text in (args.sizes, args.threads))
    for mib in sizes:
        for density in args.densities.split(","):
            step = synthetic(mib * _MIB, float(density) / 100)
            yield size_row(step)
            yield from speed_rows(step, threads, args.repeats)
            yield from memory_rows(step)


def size_row(step: Step) -> Row:
    """Measure bytes per changed word."""
    bound = bounds(step)
    per_changed = {
        f"level {level}": _our_bytes(step, level) / bound.num_changed for level in (1, 2)
    }
    theirs = {name: _their_bytes(name, step) / bound.num_changed for name in FORMATS}
    one, two = per_changed.values()
    return {
        "table": "size",
        "weights": step.name,
        "mib": step.old.nbytes / _MIB,
        "density %": 100 * bound.density,
        "bound": bound.plain,
        "level 1": one,
        "of bound": one / bound.plain,
        "bound, exponent": bound.conditioned,
        "level 2": two,
        "of that bound": two / bound.conditioned,
        "of level 1": two / one,
        **theirs,
        "best other": min(theirs.values()) / one,
        "astraflow/ours": theirs["astraflow"] / one,
    }


def _our_bytes(step: Step, level: int) -> int:
    """Return the bytes of our delta, checked by applying it in place and back again."""
    delta = _delta.encode(step.old, step.new, level=level)
    back = _delta.encode(step.new, step.old)
    _delta.apply([delta], [step.old])
    assert np.array_equal(step.old, step.new), "the delta did not lead to the new weights"
    _delta.apply([back], [step.old])
    return int(delta.size)


def _their_bytes(name: str, step: Step) -> int:
    """Return the bytes of a rival's format, checked by unpacking."""
    wire = FORMATS[name].pack(step.old, step.new)
    found = FORMATS[name].unpack(wire, step.old)
    assert np.array_equal(found, step.new), f"{name} did not lead to the new weights"
    return len(wire)


def speed_rows(step: Step, threads: Sequence[int], repeats: int) -> Iterator[Row]:
    """Time the best instruction set with every number of threads, the others with the first."""
    old, new = step.old, step.new
    best = _delta.isa()
    others = [isa for isa in _ISAS if isa != best and _delta.use_isa(isa)]
    cases = [(best, count) for count in threads] + [(isa, threads[0]) for isa in others]
    for level in (1, 2):
        seconds, num_changed = _speed(old, new, level, cases=cases, repeats=repeats)
        for isa, count in cases:
            touch_s = seconds[f"touch {count}"]
            pack_s = seconds[f"pack {isa} {count}"]
            apply_s = min(seconds[f"apply {isa} {count}"], seconds[f"back {isa} {count}"])
            yield {
                "table": "speed",
                "weights": step.name,
                "mib": old.nbytes / _MIB,
                "density %": 100 * num_changed / old.size,
                "level": level,
                "isa": isa,
                "threads": count,
                "touch GB/s": old.nbytes / touch_s / 1e9,
                "pack GB/s": old.nbytes / pack_s / 1e9,
                "of touch": touch_s / pack_s,
                "of best isa": seconds[f"pack {best} {count}"] / pack_s,
                "pack M/s": num_changed / pack_s / 1e6,
                "apply GB/s": old.nbytes / apply_s / 1e9,
                "apply M/s": num_changed / apply_s / 1e6,
            }
    assert _delta.use_isa("best")


def _speed(
    old: U16, new: U16, level: int, cases: Sequence[tuple[str, int]], repeats: int
) -> tuple[dict[str, float], int]:
    """Return the best seconds of each run, all in turn, and how many words change. Applying goes
    there and back again.
    """
    base = _delta.digest(old)
    delta = _delta.encode(old, new, level=level, base_digest=base)
    back = _delta.encode(new, old, level=level, base_digest=_delta.digest(new))

    def pack(isa: str, num_threads: int) -> None:
        assert _delta.use_isa(isa)
        _delta.encode(old, new, level=level, base_digest=base, num_threads=num_threads)

    def apply(which: Any, isa: str, num_threads: int) -> None:
        assert _delta.use_isa(isa)
        _delta.apply([which], [old], num_threads=num_threads)

    with ThreadPoolExecutor(max(count for _, count in cases)) as pool:
        runs: dict[str, Callable[[], Any]] = {
            f"touch {count}": _touch(old, new, count, pool=pool) for _, count in cases
        }
        for isa, count in cases:
            runs[f"pack {isa} {count}"] = partial(pack, isa, count)
            runs[f"apply {isa} {count}"] = partial(apply, delta, isa, count)
            runs[f"back {isa} {count}"] = partial(apply, back, isa, count)
        seconds = time_in_turn(runs, repeats, warmup=1)
    return {name: min(times) for name, times in seconds.items()}, _delta.info(delta)["num_changed"]


def _touch(old: U16, new: U16, num_threads: int, pool: ThreadPoolExecutor) -> Callable[[], Any]:
    """Read every byte of both and do little else; numpy lets other threads run meanwhile."""
    shares = [
        share.view(np.uint64)
        for words in (old, new)
        for share in np.array_split(words.reshape(-1, 4), num_threads)
    ]
    if num_threads == 1:
        return lambda: [share.max() for share in shares]
    return lambda: [*pool.map(lambda share: share.max(), shares)]


def memory_rows(step: Step) -> Iterator[Row]:
    """Measure peak memory beyond old and new, including the delta that `encode` returns."""
    old, new = step.old, step.new
    cpu = torch.device("cpu")
    for level in (1, 2):
        delta = _delta.encode(old, new, level=level)
        back = _delta.encode(new, old, level=level)
        extra = {
            "encode": extra_bytes(partial(_delta.encode, old, new, level=level), cpu),
            "apply": extra_bytes(partial(_delta.apply, [delta], [old]), cpu),
        }
        _delta.apply([back], [old])
        num_changed = _delta.info(delta)["num_changed"]
        yield {
            "table": "memory",
            "weights": step.name,
            "mib": old.nbytes / _MIB,
            "density %": 100 * num_changed / old.size,
            "level": level,
            "delta_mb": delta.nbytes / 1e6,
            "encode_extra_mb": extra["encode"] / 1e6,
            "encode/delta": extra["encode"] / delta.nbytes,
            "apply_extra_mb": extra["apply"] / 1e6,
            "apply bytes/changed": extra["apply"] / num_changed,
            "encode % of weights": 100 * extra["encode"] / old.nbytes,
        }


if __name__ == "__main__":
    main()
