"""Sizes of the programs of the row kernels, measured:  python -m bench.launches [--json F]

`logprobs` and `policy_loss` with its gradient, for vocabularies of several sizes, by programs of 4
to 32 warps at the registers that they have in `rows_triton.py`. `of copy`: the bytes that must move
over those of a plain copy in the same time. `chosen` marks the size that the kernels take by
themselves. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from flowkernels import logprobs, rows_triton
from torch import Tensor
from tqdm import tqdm

from bench.loss_rivals import Batch, flowkernels_gradient
from bench.measure import print_table, seconds_of, write_json

_WARPS = (4, 8, 16, 32)
_ELEMENTS = 2**30
"""Of the logits, about: several times what L2 holds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--vocab",
        default="151936,128256,50304,50257,32768",
        help="comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--dtypes", default="bfloat16,float32", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed runs (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.launches needs a GPU")
    cases = [(int(v), dtype) for dtype in args.dtypes.split(",") for v in args.vocab.split(",")]
    rows = [
        row
        for num_vocab, dtype in tqdm(cases, disable=None, unit="case")
        for row in measure(num_vocab, getattr(torch, dtype), args.repeats)
    ]
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(num_vocab: int, dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """A row of the table for each kernel and size of program."""
    batch = Batch.make(_ELEMENTS // num_vocab, num_vocab, dtype, "cuda")
    target_TV = torch.empty_like(batch.logits_TV)

    def median(run: Callable[[], Any]) -> float:
        run()
        return statistics.median([seconds_of(run) for _ in range(repeats)])

    copy_s = median(lambda: target_TV.copy_(batch.logits_TV))
    paths: dict[str, tuple[Callable[[], Any], float]] = {
        "logprobs": (lambda: logprobs(batch.logits_TV, batch.target_ids_T), copy_s / 2),
        "policy_loss": (lambda: flowkernels_gradient(batch), copy_s),
    }
    rows = []
    for path, (run, least_s) in paths.items():
        for num_warps in _WARPS:
            with launched(num_warps):
                seconds = median(run)
            rows.append(
                {
                    "path": path,
                    "dtype": str(dtype).removeprefix("torch."),
                    "T": len(batch.target_ids_T),
                    "V": num_vocab,
                    "warps": num_warps,
                    "ms": 1e3 * seconds,
                    "of copy": least_s / seconds,
                    "chosen": _chosen(path, batch.logits_TV) == num_warps,
                }
            )
    return rows


def _chosen(path: str, logits_TV: Tensor) -> int:
    if path == "logprobs":
        return rows_triton.one_pass(None).num_warps
    return rows_triton.two_passes(logits_TV, None).num_warps


@contextmanager
def launched(num_warps: int) -> Iterator[None]:
    """Give the programs of both kernels this size."""
    launch = replace(rows_triton.ONE_PASS, num_warps=num_warps)
    with (
        patch("flowkernels.logprobs_triton.one_pass", lambda _: launch),
        patch("flowkernels.policy_loss_triton.two_passes", lambda *_: launch),
    ):
        yield


if __name__ == "__main__":
    main()
