"""Registers, shared memory and spills of every kernel, compiled ahead of time without a GPU:
python -m bench.aot [--full] [--targets T,T] [--kernels K,K] [--without V,V] [--jobs N] [--json F]

Each kernel is compiled at its production block size in the variants that matter (dtype, vocabulary
and stride, and every optional term on or off) for the targets that are asked for, by the compiler
that Triton carries; a spill in any of them is an error (exit code 1).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import triton
import triton.knobs
from flowkernels import (
    DIVERGENCES,
    branching_triton,
    distillation_triton,
    layers_triton,
    logprobs_triton,
    policy_loss_triton,
    rows_triton,
    sparse_delta_triton,
)
from flowkernels.statistics import NAMES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.measure import new_parser, report

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
_SIZES = (
    "num_vocab", "num_words", "num_elements", "num_columns", "size", "row_stride", "out_stride",
    "gate_stride", "up_stride", "teacher_stride",
)  # fmt: skip
_OF_LAYERS = (
    "hidden", "scale", "query", "key", "query_out", "key_out", "cos", "sin", "gate", "up", "dout",
    "dhidden", "dgate", "dup",
)  # fmt: skip
"""Tensors in the dtype of the model."""
_LONG = (
    "num_elements", "num_words", "first", "origin", "row_stride", "out_stride", "teacher_stride",
)  # fmt: skip
"""Numbers of 64 bits."""
_POINTERS = {
    "targets_ptr": "*i64",
    "mask_ids_ptr": "*i32",
    "mask_offsets_ptr": "*i64",
    "cu_seqlens_ptr": "*i64",
    "old_words_ptr": "*i16",
    "new_words_ptr": "*i16",
    "words_ptr": "*i16",
    "positions_ptr": "*i16",
    "diffs_ptr": "*i16",
    "tile_counts_ptr": "*i32",
    "tile_bounds_ptr": "*i64",
    "bounds_ptr": "*i64",
    "digest_ptr": "*i64",
    "dims_ptr": "*i64",
    "mask_ptr": "*i1",
    "is_candidate_ptr": "*i1",
}


_Kind = tuple[str, str, Any, rows_triton.Launch, Mapping[str, Any]]
"""(kernel, extra, function, launch, absent arguments)"""


@dataclass(frozen=True)
class Variant:
    """A kernel with the arguments that its machine code depends on."""

    kernel: str
    name: str
    """Begins with the dtype of the logits (->gradient), words or layers."""
    function: Any
    arguments: Mapping[str, Any]
    """Constexprs, absent arguments, and options of the compiler."""
    is_aligned: bool = True
    """Sizes and strides are multiples of 16 elements, which Triton tells the compiler."""

    @property
    def dtype(self) -> str:
        return self.name.partition(" ")[0]


def main() -> None:
    parser = new_parser(__doc__, targets=",".join(TARGETS))
    add = parser.add_argument
    add("--targets", default="sm_90", help=f"of {', '.join(TARGETS)}")
    add("--kernels", metavar="K,K", default="", help="these alone; empty: all")
    add("--without", metavar="V,V", default="", help="leave these variants out")
    add("--jobs", metavar="N", type=int, help="processes; none: one per core")
    args = parser.parse_args()
    kernels = args.kernels.split(",") if args.kernels else None
    targets, without = args.targets.split(","), args.without.split(",")
    rows: list[dict[str, Any]] = []

    def kept() -> Iterator[dict[str, Any]]:
        for row in table(targets, kernels, without=without, num_jobs=args.jobs):
            rows.append(row)
            yield row

    report(args.json, kept())
    spilled = [
        f"{row['kernel']} {row['variant']} on {row['target']}: spills {row['spills']} bytes"
        for row in rows
        if row["spills"]
    ]
    if spilled:
        sys.exit("; ".join(spilled))


def table(
    targets: Sequence[str],
    kernels: Sequence[str] | None = None,
    *,
    without: Sequence[str] = (),
    num_jobs: int | None = None,
) -> Iterator[dict[str, Any]]:
    """A row per variant and target, compiled by `num_jobs` processes (default: one per core)."""
    tasks = [
        (index, target)
        for index, variant in enumerate(variants())
        if (kernels is None or variant.kernel in kernels) and variant.name not in without
        for target in targets
    ]
    with ProcessPoolExecutor(num_jobs) as pool:
        yield from pool.map(_row, tasks)


def _row(task: tuple[int, str]) -> dict[str, Any]:
    index, target = task  # a kernel itself does not travel between processes
    variant = next(islice(variants(), index, None))
    named = {"kernel": variant.kernel, "variant": variant.name, "target": target}
    return {**named, **compile_one(variant, target)}


def variants() -> Iterator[Variant]:
    yield from _row_variants()
    yield from _layer_variants()
    merge = {"NUM": len(NAMES), **policy_loss_triton.MERGE}
    of_loss, of_tree, of_delta = policy_loss_triton, branching_triton, sparse_delta_triton
    strided = {"WRITES": True, **of_delta.SCATTER}
    scatter: dict[str, Any] = {**strided, "dims_ptr": None}
    no_write = {**scatter, "WRITES": False}
    yield Variant("scale", "bf16", of_loss.scale_kernel, of_loss.SCALE)
    yield Variant("scale", "fp32", of_loss.scale_kernel, of_loss.SCALE)
    yield Variant("statistics", "fp32", of_loss.statistics_kernel, of_loss.STATISTICS)
    yield Variant("merge", "fp32", of_loss.merge_kernel, merge)
    for dtype in ("bf16", "fp32"):
        for kind in DIVERGENCES:
            distilled = {"KIND": kind, **distillation_triton.LAUNCH}
            kernel = distillation_triton.divergence_kernel
            yield Variant("divergence", f"{dtype} {kind}", kernel, distilled)
    yield Variant("scan", "fp32", of_tree.scan_kernel, of_tree.LAUNCH)
    yield Variant("branching", "fp32", of_tree.score_kernel, of_tree.LAUNCH)
    yield Variant("delta count", "int16", of_delta.count_kernel, of_delta.TILE)
    yield Variant("delta compact", "int16", of_delta.compact_kernel, of_delta.TILE)
    yield Variant("delta scatter", "int16", of_delta.scatter_kernel, scatter)
    yield Variant("delta scatter", "int16 no write", of_delta.scatter_kernel, no_write)
    yield Variant("delta scatter", "int16 strided", of_delta.scatter_kernel, strided)
    yield Variant("delta digest", "int16", of_delta.digest_kernel, of_delta.DIGEST)


def _row_variants() -> Iterator[Variant]:
    """The kernels of rows, in every dtype, for vocabularies and strides that are multiples of 16
    bytes and that are not, with no optional term and with all of them.
    """
    few = {"mask_ids_ptr": None, "mask_offsets_ptr": None, "mask_copy_ptr": None, "softcap": None}
    clip = {"LOSS_TYPE": 0, "KL": 2}
    clip_only = {**few, **clip, "ref_ptr": None, "dual_clip": None, "entropy_coef": None}
    with_entropy = {**few, **clip, "ref_ptr": None, "dual_clip": None}
    one, two = rows_triton.ONE_PASS, rows_triton.Launch(num_warps=32)
    one_capped, two_capped = rows_triton.CAPPED_ONE_PASS, rows_triton.CAPPED_TWO_PASSES
    score, gradient = logprobs_triton.score_kernel, logprobs_triton.gradient_kernel
    loss = policy_loss_triton.loss_kernel
    kinds: list[_Kind] = [
        ("score", "", score, one, few),
        ("score", "all", score, one_capped, {}),
        ("gradient", "", gradient, one, {**few, "dentropy_ptr": None, "dlse_ptr": None}),
        ("gradient", "all", gradient, one_capped, {}),
        ("loss", "", loss, two, clip_only),
        ("loss", "all", loss, two_capped, clip),
    ]
    more: list[_Kind] = [
        ("score", "mask", score, one, {"softcap": None}),
        ("loss", "entropy", loss, two, with_entropy),
        ("loss", "all but softcap", loss, two, {**clip, "softcap": None}),
        ("loss", "8 warps", loss, rows_triton.Launch(8), clip_only),
        ("loss", "16 warps", loss, rows_triton.Launch(16), clip_only),
        ("loss", "no gradient", loss, one, {**clip_only, "out_ptr": None}),
    ]
    dtypes = {"bf16": 2, "fp16": 2, "fp32": 4}
    shapes = [(dtype, is_aligned) for dtype in dtypes for is_aligned in (True, False)]
    for kinds_of, shapes_of in ((kinds, shapes), (more, shapes[:1])):
        for kernel, extra, function, launch, absent in kinds_of:
            for dtype, is_aligned in shapes_of:
                name = " ".join(filter(None, [dtype, "" if is_aligned else "odd", extra]))
                alignment = {"ALIGNMENT": "whole" if is_aligned else "alike"}
                arguments = {**absent, **alignment, **launch.options(dtypes[dtype])}
                yield Variant(kernel, name, function, arguments, is_aligned)
    mixed = {**clip_only, "ALIGNMENT": "whole", **two.options(4)}
    yield Variant("loss", "fp32->bf16", loss, mixed)


def _layer_variants() -> Iterator[Variant]:
    """The layers of models of 0.5 and 7 billion parameters."""
    of, both = layers_triton, layers_triton.GATED
    forward = {**both, "dout_ptr": None, "dgate_ptr": None, "dup_ptr": None}
    for dtype in ("bf16", "fp32"):
        yield Variant("gated", dtype, of.gated_kernel, forward)
        yield Variant("gated", f"{dtype} gradient", of.gated_kernel, both)
        for size, heads in ((896, (14, 2, 64)), (3584, (28, 4, 128))):
            name = f"{dtype} {size}"
            norm = {"FORM": "llama", **of.norm_launch(size)}
            gradient = {"FORM": "llama", **of.norm_launch(size, of.GRADIENT_PER_WARP)}
            yield Variant("norm", name, of.norm_kernel, norm)
            yield Variant("norm gradient", name, of.norm_gradient_kernel, gradient)
            for extra, inverse in (("", False), (" inverse", True)):
                rotary = {"INVERSE": inverse, **of.rotary_launch(*heads)}
                yield Variant("rotary", name + extra, of.rotary_kernel, rotary)


def compile_one(variant: Variant, target_name: str) -> dict[str, Any]:
    """Registers per thread, shared bytes per program and bytes spilled to memory per thread."""
    kernel, target = variant.function, TARGETS[target_name]
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in variant.arguments:
            signature[name], constexprs[(index,)] = "constexpr", variant.arguments[name]
        else:
            signature[name] = _type(name, variant.dtype)
            if signature[name].startswith("*") or (variant.is_aligned and name in _SIZES):
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in variant.arguments.items() if name in _OPTIONS}
    if target.backend == "hip":  # a warp is twice as wide there, and no register limit is set
        options = {"num_warps": max(1, options["num_warps"] * 32 // target.warp_size)}
    source = ASTSource(kernel, signature, constexprs, attributes)
    with (
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        triton.knobs.compilation.always_compile = True  # a kernel that is kept says nothing
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        # Scalar registers that are saved into vector registers do not touch memory and do not
        # count.
        spills = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    else:
        log = said.getvalue()
        registers = _number(r"Used (\d+) registers", log)
        spills = sum(_number(rf"(\d+) bytes spill {what}", log) for what in ("stores", "loads"))
    return {"registers": registers, "spills": spills, "shared": compiled.metadata.shared}


def _type(name: str, dtype: str) -> str:
    logits, _, gradient = dtype.partition("->")
    if name.removesuffix("_ptr") in _OF_LAYERS:
        return f"*{dtype}"
    if name in ("logits_ptr", "teacher_ptr", "out_ptr", "gradient_ptr"):
        is_read = name in ("logits_ptr", "teacher_ptr")
        return f"*{logits if is_read or not gradient else gradient}"
    if name.endswith("_ptr"):
        return _POINTERS.get(name, "*fp32")
    if name in _LONG:
        return "i64"
    is_number = name.startswith("num_") or name.endswith("_stride") or name == "size"
    return "i32" if is_number else "fp32"


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in the compiler's report"
    return int(match[1])


if __name__ == "__main__":
    main()
