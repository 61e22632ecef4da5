"""Sparse deltas of bf16 weights:  python -m bench.delta [--json F] [--sizes …] [--densities …]
[--threads …] [--model-steps N] [--model FOLDER]

The bench prints three tables. The first has bytes per changed word: ours at level 1 and at level 2
(which uses the old exponents as context), the entropy bounds of the same data (plain, and given the
old exponent), and the wire formats of others, each checked to restore the new weights; on synthetic
weights, and on a small model trained by AdamW. The second has speed: GB/s of model bytes (2 per
word) to pack and to apply in place, million changed words per second, and `of touch`, the time of a
numpy maximum over old and new divided by the time to pack. The third has peak memory beyond the
weights. Times are the best of several turns, in which rivals alternate.

--model takes the changes of real training in place of synthetic ones: at each of --lrs, --steps
optimizer steps from the folder's weights (`bench/delta_updates.py`), with the density of every step
and the seconds to train, publish and load; sizes and speeds are those of the first, the middle and
the last step. A step takes about 200 packed tokens; 300 steps of SmolLM2-135M take half an hour of
one core and 6 GB.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from bench import model_folder
from bench.delta_rivals import FORMATS
from bench.delta_updates import measure_updates
from bench.delta_weights import U16, Step, bounds, synthetic, trained
from bench.measure import extra_bytes, print_table, time_in_turn, write_json
from flowtrain import _delta

_MIB = 2**20
_ISAS = ("scalar", "avx2", "avx512")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--sizes", default="512,2048", help="MiB of synthetic weights (default: %(default)s)"
    )
    parser.add_argument(
        "--densities",
        default="0.5,1,3,10",
        help="percent of words that change (default: %(default)s)",
    )
    parser.add_argument("--threads", default="1,2", help="default: %(default)s")
    parser.add_argument(
        "--model-steps",
        type=int,
        default=300,
        help="of training before real changes are taken; 0: none (default: 300)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns, of which the best counts (default: 5)"
    )
    model_folder.add_option(parser)
    parser.add_argument(
        "--steps", type=int, default=100, help="of --model, at each --lrs (default: 100)"
    )
    parser.add_argument("--lrs", default="1e-6,3e-6,1e-5", help="of --model (default: %(default)s)")
    parser.add_argument(
        "--questions", type=int, default=16, help="whose 8 rollouts --model reuses (default: 16)"
    )
    args = parser.parse_args()
    tables = _updates(args) if args.model else _synthetic(args)
    for rows in tables.values():
        print_table([{key: row[key] for key in row if key != "densities"} for row in rows])
        print()
    if args.json:
        write_json(
            args.json, [{"table": name, **row} for name, rows in tables.items() for row in rows]
        )


def _synthetic(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The tables of synthetic weights and of a small model."""
    sizes, threads = ([int(x) for x in text.split(",") if x] for text in (args.sizes, args.threads))
    densities = [float(x) / 100 for x in args.densities.split(",") if x]
    tables: dict[str, list[dict[str, Any]]] = {"size": [], "speed": [], "memory": []}
    for mib in sizes:
        for density in densities:
            step = synthetic(mib * _MIB, density)
            tables["size"].append(size_row(step))
            tables["speed"] += speed_rows(step, threads, args.repeats)
            tables["memory"] += memory_rows(step)
    for step in trained(args.model_steps) if args.model_steps else ():
        tables["size"].append(size_row(step))
    return tables


def _updates(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The tables of a model in a folder; the thread of the trainer packs and applies, too."""
    torch.set_num_threads(1)
    tables: dict[str, list[dict[str, Any]]] = {"updates": [], "size": [], "speed": []}

    def use(step: Step) -> None:
        tables["size"].append(size_row(step))
        whole = Step(step.name, [np.concatenate(step.old)], [np.concatenate(step.new)])
        rows = list(speed_rows(whole, [1], args.repeats))
        tables["speed"] += [row for row in rows if row["isa"] == _delta.isa()]

    lrs = [float(x) for x in args.lrs.split(",")]
    tables["updates"] = measure_updates(
        args.model, lrs, num_steps=args.steps, num_questions=args.questions, use=use
    )
    return tables


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- size


def size_row(step: Step) -> dict[str, Any]:
    """Measure bytes per changed word."""
    _progress(f"sizes: {step.name}")
    bound = bounds(step)
    per_changed = {
        f"level {level}": _our_bytes(step, level) / bound.num_changed for level in (1, 2)
    }
    theirs = {name: _their_bytes(name, step) / bound.num_changed for name in FORMATS}
    one, two = per_changed.values()
    return {
        "weights": step.name,
        "mib": sum(old.nbytes for old in step.old) / _MIB,
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
    """Return the bytes of our deltas, checked by applying them in place and back again."""
    num_bytes = 0
    for old, new in zip(step.old, step.new, strict=True):
        delta = _delta.encode(old, new, level=level)
        back = _delta.encode(new, old)
        _delta.apply([delta], [old])
        assert np.array_equal(old, new), "a delta did not lead to the new weights"
        _delta.apply([back], [old])
        num_bytes += delta.size
    return num_bytes


def _their_bytes(name: str, step: Step) -> int:
    """Return the bytes of a rival's format, checked by unpacking."""
    num_bytes = 0
    for old, new in zip(step.old, step.new, strict=True):
        wire = FORMATS[name].pack(old, new)
        assert np.array_equal(FORMATS[name].unpack(wire, old), new), (
            f"{name} did not lead to the new weights"
        )
        num_bytes += len(wire)
    return num_bytes


# ---- speed


def speed_rows(step: Step, threads: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Time the best instruction set with every number of threads, the others with the first."""
    (old,), (new,) = step.old, step.new
    best = _delta.isa()
    others = [isa for isa in _ISAS if isa != best and _delta.use_isa(isa)]
    cases = [(best, count) for count in threads] + [(isa, threads[0]) for isa in others]
    for level in (1, 2):
        _progress(f"speed: {step.name}, level {level}")
        seconds, num_changed = _speed(old, new, level, cases=cases, repeats=repeats)
        for isa, count in cases:
            touch_s = seconds[f"touch {count}"]
            pack_s = seconds[f"pack {isa} {count}"]
            apply_s = min(seconds[f"apply {isa} {count}"], seconds[f"back {isa} {count}"])
            yield {
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


# ---- memory


def memory_rows(step: Step) -> Iterator[dict[str, Any]]:
    """Measure peak memory beyond old and new, including the delta that `encode` returns."""
    (old,), (new,) = step.old, step.new
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
