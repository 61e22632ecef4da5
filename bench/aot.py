"""Registers, shared memory and spills of every kernel, compiled ahead of time without a GPU:
python -m bench.aot [--roofline] [--targets T,T] [--kernels K,K] [--without V,V] [--jobs N]
[--json F]

Each kernel is compiled at its production block size in the variants that matter (dtype, vocabulary
and stride, and every optional term on or off) for the targets below, by the compiler that Triton
carries; a spill in any of them is an error (exit code 1). With --roofline the machine code for
NVIDIA's is disassembled, and a kernel that could not reach its goal is an error too: `roofline.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import triton
import triton.knobs
from flowkernels import (
    branching_triton,
    layers_triton,
    logprobs_triton,
    policy_loss_triton,
    rows_triton,
    sparse_delta_triton,
)
from flowkernels.statistics import NAMES
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from bench import roofline, sass
from bench.measure import report

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
_SIZES = (
    "num_vocab", "num_words", "num_elements", "num_columns", "size", "row_stride", "out_stride",
    "gate_stride", "up_stride",
)  # fmt: skip
_OF_LAYERS = (
    "hidden", "scale", "query", "key", "query_out", "key_out", "cos", "sin", "gate", "up", "dout",
    "dhidden", "dgate", "dup",
)  # fmt: skip
"""Tensors in the dtype of the model."""
_POINTERS = {
    "targets_ptr": "*i64",
    "mask_ids_ptr": "*i64",
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
    "mask_ptr": "*i1",
    "is_candidate_ptr": "*i1",
}


@dataclass(frozen=True)
class Variant:
    """A kernel with the arguments that its machine code depends on."""

    kernel: str
    name: str
    function: Any
    constants: Mapping[str, Any]
    """Constexprs and absent arguments."""
    options: Mapping[str, int]
    """Options of the compiler."""
    dtype: str
    """That of the logits (->gradient)."""
    goal: roofline.Goal | roofline.SmallGoal
    is_aligned: bool = True
    """Sizes and strides are multiples of 16 elements, which Triton tells the compiler."""


_Kind = tuple[str, str, Any, rows_triton.Launch, dict[str, Any], roofline.Goal]
"""(kernel, extra, function, launch, absent arguments, goal)"""
_Other = tuple[str, str, Any, Mapping[str, Any], roofline.Goal | roofline.SmallGoal]
"""(kernel, variant, function, arguments, goal)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--targets",
        default=",".join(TARGETS),
        help=f"comma-separated (default: {','.join(TARGETS)})",
    )
    parser.add_argument("--kernels", metavar="K,K", help="only these kernels (default: all)")
    parser.add_argument("--without", metavar="V,V", help="leave these variants out")
    parser.add_argument(
        "--roofline", action="store_true", help="add what the machine code allows (NVIDIA)"
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="processes (default: one per core)")
    args = parser.parse_args()
    kernels = args.kernels.split(",") if args.kernels else None
    rows = table(
        args.targets.split(","),
        kernels,
        without=(args.without or "").split(","),
        has_roofline=args.roofline,
        num_jobs=args.jobs,
    )
    report(args.json, rows)
    faults = [
        f"{row['kernel']} {row['variant']} on {row['target']}: {fault}"
        for row in rows
        for fault in faults_of(row)
    ]
    if faults:
        sys.exit("; ".join(faults))


def faults_of(row: Mapping[str, Any]) -> list[str]:
    """Name what is wrong with a row of the table."""
    spilled = [f"spills {row['spills']} bytes"] if row["spills"] else []
    return [*spilled, *filter(None, [row.get("fault")])]


def table(
    targets: Sequence[str],
    kernels: Sequence[str] | None = None,
    *,
    without: Sequence[str] = (),
    has_roofline: bool = False,
    num_jobs: int | None = None,
) -> list[dict[str, Any]]:
    """A row per variant and target, compiled by `num_jobs` processes (default: one per core)."""
    tasks = [
        (index, target, has_roofline)
        for index, variant in enumerate(variants())
        if (kernels is None or variant.kernel in kernels) and variant.name not in without
        for target in targets
    ]
    with ProcessPoolExecutor(num_jobs) as pool:
        return list(tqdm(pool.map(_row, tasks), total=len(tasks), disable=None, unit="kernel"))


def _row(task: tuple[int, str, bool]) -> dict[str, Any]:
    index, target, has_roofline = task  # a kernel itself does not travel between processes
    variant = next(islice(variants(), index, None))
    named = {"kernel": variant.kernel, "variant": variant.name, "target": target}
    return {**named, **compile_one(variant, target, has_roofline=has_roofline)}


def variants() -> Iterator[Variant]:
    yield from _row_variants()
    yield from _layer_variants()
    merge = {"NUM": len(NAMES), **policy_loss_triton.MERGE}
    of_loss, of_tree, of_delta = policy_loss_triton, branching_triton, sparse_delta_triton
    scatter = {"WRITES": True, **of_delta.SCATTER}
    others: list[_Other] = [
        ("scale", "bf16", of_loss.scale_kernel, of_loss.SCALE, roofline.SCALE),
        ("scale", "fp32", of_loss.scale_kernel, of_loss.SCALE, roofline.SCALE),
        ("statistics", "fp32", of_loss.statistics_kernel, of_loss.STATISTICS, roofline.STATISTICS),
        ("merge", "fp32", of_loss.merge_kernel, merge, roofline.MERGE),
        ("scan", "fp32", of_tree.scan_kernel, of_tree.LAUNCH, roofline.SCAN),
        ("branching", "fp32", of_tree.score_kernel, of_tree.LAUNCH, roofline.BRANCHING),
        ("delta count", "int16", of_delta.count_kernel, of_delta.TILE, roofline.COUNT),
        ("delta compact", "int16", of_delta.compact_kernel, of_delta.TILE, roofline.COMPACT),
        ("delta scatter", "int16", of_delta.scatter_kernel, scatter, roofline.SCATTER),
        (
            "delta scatter",
            "int16 no write",
            of_delta.scatter_kernel,
            {**scatter, "WRITES": False},
            roofline.NO_WRITE,
        ),
        ("delta digest", "int16", of_delta.digest_kernel, of_delta.DIGEST, roofline.DIGEST),
    ]
    for kernel, name, function, arguments, goal in others:
        dtype = name.partition(" ")[0]
        yield Variant(kernel, name, function, *_split(arguments), dtype, goal=goal)


def _row_variants() -> Iterator[Variant]:
    """The kernels of rows, in every dtype, for vocabularies and strides that are multiples of 16
    bytes and that are not, with no optional term and with all of them.
    """
    no_mask = {"mask_ids_ptr": None, "mask_offsets_ptr": None, "mask_copy_ptr": None}
    few = {**no_mask, "softcap": None}
    clip = {"LOSS_TYPE": 0, "KL": 2}
    clip_only = {**clip, "ref_ptr": None, "dual_clip": None, "entropy_coef": None}
    with_entropy = {**few, **clip, "ref_ptr": None, "dual_clip": None}
    one, two = rows_triton.ONE_PASS, rows_triton.Launch(num_warps=32)
    one_capped, two_capped = rows_triton.CAPPED_ONE_PASS, rows_triton.CAPPED_TWO_PASSES
    capped_score = replace(roofline.SCORE, share=roofline.CAPPED)
    capped_gradient = replace(roofline.GRADIENT, share=roofline.CAPPED)
    score, gradient = logprobs_triton.score_kernel, logprobs_triton.gradient_kernel
    loss = policy_loss_triton.loss_kernel
    kinds: list[_Kind] = [
        ("score", "", score, one, few, roofline.SCORE),
        ("score", "all", score, one_capped, {}, capped_score),
        (
            "gradient",
            "",
            gradient,
            one,
            {**few, "dentropy_ptr": None, "dlse_ptr": None},
            roofline.GRADIENT,
        ),
        ("gradient", "all", gradient, one_capped, {}, capped_gradient),
        ("loss", "", loss, two, {**few, **clip_only}, roofline.LOSS),
        ("loss", "all", loss, two_capped, clip, replace(roofline.LOSS, share=roofline.CAPPED)),
    ]
    more: list[_Kind] = [
        ("score", "mask", score, one, {"softcap": None}, roofline.SCORE),
        ("loss", "entropy", loss, two, with_entropy, roofline.LOSS),
        ("loss", "all but softcap", loss, two, {**clip, "softcap": None}, roofline.LOSS),
        *(
            ("loss", f"{n} warps", loss, rows_triton.Launch(n), {**few, **clip_only}, roofline.LOSS)
            for n in (8, 16)
        ),
        ("loss", "no gradient", loss, one, {**few, **clip_only, "out_ptr": None}, roofline.SCORE),
    ]
    dtypes = {"bf16": 2, "fp16": 2, "fp32": 4}
    shapes = [(dtype, is_aligned) for dtype in dtypes for is_aligned in (True, False)]
    for kinds_of, shapes_of in ((kinds, shapes), (more, shapes[:1])):
        for kernel, extra, function, launch, absent, goal in kinds_of:
            for dtype, is_aligned in shapes_of:
                arguments = {
                    **absent,
                    "ALIGNMENT": "whole" if is_aligned else "alike",
                    **launch.options(dtypes[dtype]),
                }
                yield Variant(
                    kernel,
                    " ".join(filter(None, [dtype, "" if is_aligned else "odd", extra])),
                    function,
                    *_split(arguments),
                    dtype,
                    is_aligned=is_aligned,
                    goal=goal,
                )
    mixed = {**few, **clip_only, "ALIGNMENT": "whole", **two.options(4)}
    to_half = replace(roofline.LOSS, num_bytes=1.5, store_bytes=8)
    yield Variant("loss", "fp32->bf16", loss, *_split(mixed), "fp32->bf16", goal=to_half)


def _layer_variants() -> Iterator[Variant]:
    """The layers of models of 0.5 and 7 billion parameters."""
    of, both = layers_triton, layers_triton.GATED
    forward = {**both, "dout_ptr": None, "dgate_ptr": None, "dup_ptr": None}
    kinds: list[_Other] = [
        ("gated", "", of.gated_kernel, forward, roofline.GATED),
        ("gated", "gradient", of.gated_kernel, both, roofline.GATED_GRADIENT),
    ]
    for size, heads in ((896, (14, 2, 64)), (3584, (28, 4, 128))):
        norm, gradient = of.norm_launch(size), of.norm_launch(size, of.GRADIENT_PER_WARP)
        norms = (
            ("norm", of.norm_kernel, norm, roofline.NORM),
            ("norm gradient", of.norm_gradient_kernel, gradient, roofline.NORM_GRADIENT),
        )
        kinds += [(n, f"{size}", f, {"FORM": "llama", **launch}, g) for n, f, launch, g in norms]
        for name, inverse in ((f"{size}", False), (f"{size} inverse", True)):
            launch = {"INVERSE": inverse, **of.rotary_launch(*heads)}
            kinds.append(("rotary", name, of.rotary_kernel, launch, roofline.ROTARY))
    for dtype in ("bf16", "fp32"):
        for kernel, extra, function, arguments, goal in kinds:
            name = f"{dtype} {extra}".strip()
            yield Variant(kernel, name, function, *_split(arguments), dtype, goal=goal)


def _split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Launch arguments into the kernel's own and the compiler's."""
    options = {name: x for name, x in arguments.items() if name in _OPTIONS}
    return {name: x for name, x in arguments.items() if name not in options}, options


def compile_one(variant: Variant, target_name: str, *, has_roofline: bool) -> dict[str, Any]:
    """Registers per thread, shared bytes per program and bytes spilled to memory per thread."""
    kernel, target = variant.function, TARGETS[target_name]
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in variant.constants:
            signature[name], constexprs[(index,)] = "constexpr", variant.constants[name]
        else:
            signature[name] = _type(name, variant.dtype)
            if signature[name].startswith("*") or (variant.is_aligned and name in _SIZES):
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = dict(variant.options)
    if target.backend == "hip":  # a warp is twice as wide there, and no register limit is set
        options = {"num_warps": max(1, options["num_warps"] * 32 // target.warp_size)}
    source = ASTSource(kernel, signature, constexprs, attributes)
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as said:
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    shared = compiled.metadata.shared
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        # Scalar registers that are saved into vector registers do not touch memory and do not
        # count.
        spills = int(_find(r"\.private_segment_fixed_size:\s+(\d+)", text))
        return {
            "registers": int(_find(r"\.vgpr_count:\s+(\d+)", text)),
            "spills": spills,
            "shared": shared,
        }
    fuses = options.get("enable_fp_fusion", True)
    log = said.getvalue() or _ptxas(compiled.asm["ptx"], target.arch, bool(fuses))
    found = {**_resources(log), "shared": shared}
    if has_roofline:
        resources = roofline.Resources(found["registers"], shared, options["num_warps"])
        size = 4 if variant.dtype.startswith("fp32") else 2
        program = sass.disassemble(compiled.asm["cubin"])
        device = roofline.DEVICES[target_name]
        found |= roofline.row(program, device, resources, goal=variant.goal, element_size=size)
    return found


def _type(name: str, dtype: str) -> str:
    logits, _, gradient = dtype.partition("->")
    if name.removesuffix("_ptr") in _OF_LAYERS:
        return f"*{dtype}"
    if name in ("logits_ptr", "out_ptr", "gradient_ptr"):
        return f"*{logits if name == 'logits_ptr' or not gradient else gradient}"
    if name.endswith("_ptr"):
        return _POINTERS.get(name, "*fp32")
    if name in ("num_elements", "num_words", "first", "row_stride", "out_stride"):
        return "i64"
    is_number = name.startswith("num_") or name.endswith("_stride") or name == "size"
    return "i32" if is_number else "fp32"


def _ptxas(ptx: str, arch: int, fuses: bool) -> str:
    """What the assembler says of a kernel that Triton has kept compiled."""
    program = nvidia.get_ptxas(arch).path  # as Triton itself would choose
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = _find(r"\.target\s+(sm_\w+)", ptx)
        options = [f"--gpu-name={name}", f"--fmad={str(fuses).lower()}"]
        command = [program, "-v", *options, file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _resources(log: str) -> dict[str, int]:
    stores, loads = (
        int(_find(r"(\d+) bytes spill stores", log)),
        int(_find(r"(\d+) bytes spill loads", log)),
    )
    return {"registers": int(_find(r"Used (\d+) registers", log)), "spills": stores + loads}


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in the compiler's report"
    return match[1]


if __name__ == "__main__":
    main()
