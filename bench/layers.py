"""RMSNorm, rotary embedding and SwiGLU, forward and backward, beside what transformers computes
itself, what torch.compile makes of that, and Liger:  python -m bench.layers [--tokens N] [--json F]

`of transformers`: the time over its. `of copy`: the time in which a copy moves the bytes that the
layer must move, over the layer's.
`saved`: bytes per token that the forward pass keeps, beyond weights, cosines and sines. bf16 on a
GPU, fp32 on a CPU.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from flowkernels import rms_norm, rotary, swiglu
from torch import Tensor

from bench.measure import median_ratio, new_parser, report, runs_here, seconds_in_turn

EPS = 1e-6
LAYERS = ("norm", "rotary", "swiglu")
PATHS = ("flowkernels", "transformers", "compile", "liger")
_NUMBERS_MOVED = {"norm": 5, "rotary": 4, "swiglu": 8}
"""For each of x, of queries and keys, of the MLP's width; forward and backward."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a decoder."""

    hidden: int
    mlp: int
    heads: tuple[int, int, int]
    """Of queries, of keys, and the size of one."""


SHAPES = {"0.5b": Shape(896, 4864, (14, 2, 64)), "7b": Shape(3584, 18944, (28, 4, 128))}
SMALL = {"small": Shape(64, 160, (4, 2, 16))}


def measure(
    layer: str,
    shape: Shape,
    num_tokens: int,
    dtype: torch.dtype,
    device: str,
    repeats: int = 15,
    paths: Sequence[str] = PATHS,
) -> list[dict[str, Any]]:
    """A row for each path that runs here, all timed in turn."""
    tensors, tables = _tensors(layer, shape, num_tokens, dtype, device)
    runs: dict[str, Callable[[], Any]] = {
        path: partial(lambda path: _function(layer, path)(*tensors, *tables), path)
        for path in paths
    }
    runs = {path: run for path, run in runs.items() if runs_here(f"{layer}: {path}", run)}
    outs = _outs(runs["flowkernels"])
    douts = [torch.randn_like(x) for x in outs]
    num_bytes = _NUMBERS_MOVED[layer] * sum(x.nbytes for x in outs)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps: dict[str, Callable[[], Any]] = {
        path: partial(lambda run: torch.autograd.backward(_outs(run), douts), run)
        for path, run in runs.items()
    }
    steps["copy"] = lambda: target.copy_(source)
    seconds = seconds_in_turn(steps, repeats)
    known = (*tables, *tensors[1:] * (layer == "norm"))
    return [
        {
            "layer": layer,
            "path": path,
            "T": num_tokens,
            "D": shape.hidden,
            "ms": 1e3 * statistics.median(seconds[path]),
            **_beside_transformers(seconds, path),
            "of copy": median_ratio(seconds["copy"], seconds[path]),
            "saved": saved_bytes(run, known) / num_tokens,
        }
        for path, run in runs.items()
    ]


def _beside_transformers(seconds: dict[str, list[float]], path: str) -> dict[str, float]:
    if (theirs := seconds.get("transformers")) is None:  # it is not installed
        return {}
    return {"of transformers": median_ratio(seconds[path], theirs)}


def _outs(run: Callable[[], Any]) -> tuple[Tensor, ...]:
    found = run()
    return found if isinstance(found, tuple) else (found,)


def saved_bytes(run: Callable[[], Any], known: Sequence[Tensor]) -> int:
    """Bytes that the backward pass keeps, without those of known tensors."""
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outs = run()
    others = saved.keys() - {x.untyped_storage().data_ptr() for x in known}
    del outs  # until here, or storages would follow each other in one place
    return sum(saved[at] for at in others)


def _tensors(
    layer: str, shape: Shape, num_tokens: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """(what has gradients, cosines and sines)"""
    num_queries, num_keys, size = shape.heads
    shapes: dict[str, list[tuple[int, ...]]] = {
        "norm": [(1, num_tokens, shape.hidden), (shape.hidden,)],
        "rotary": [(1, num_tokens, n, size) for n in (num_queries, num_keys)],
        "swiglu": [(1, num_tokens, shape.mlp)] * 2,
    }
    make: dict[str, Any] = {"dtype": dtype, "device": device}
    tensors = [torch.randn(each, **make) for each in shapes[layer]]
    if layer != "rotary":
        return [x.requires_grad_() for x in tensors], []
    heads = [x.transpose(1, 2).requires_grad_() for x in tensors]
    return heads, [torch.randn(1, num_tokens, size, **make) for _ in range(2)]


@functools.cache
def _function(layer: str, path: str) -> Callable[..., Any]:
    """A layer by its tensors."""
    if path == "flowkernels":
        ours: dict[str, Any] = {"norm": partial(rms_norm, eps=EPS), "rotary": rotary}
        return ours.get(layer, swiglu)
    if path == "liger":
        if not torch.cuda.is_available():
            raise RuntimeError("its kernels need a GPU")
        from liger_kernel.transformers import functional

        kept = partial(functional.liger_rms_norm, eps=EPS, in_place=False)
        return {"norm": kept, "rotary": functional.liger_rope}.get(layer, functional.liger_swiglu)
    if path == "compile":
        compiled: Callable[..., Any] = torch.compile(_function(layer, "transformers"))
        return compiled
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    def norm(x: Tensor, weight: Tensor) -> Any:
        module = LlamaRMSNorm(1, EPS)
        del module.weight
        module.weight = weight
        return module.forward(x)

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    theirs: dict[str, Any] = {"norm": norm, "rotary": apply_rotary_pos_emb, "swiglu": gated}
    return theirs[layer]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of a batch")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    how = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    cases = product(SHAPES.values(), LAYERS)
    rows = (measure(layer, shape, args.tokens, *how) for shape, layer in cases)
    report(args.json, chain.from_iterable(rows))


if __name__ == "__main__":
    main()
