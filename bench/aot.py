"""Registers, shared memory and spills of every kernel, compiled ahead of time without a GPU:
python -m bench.aot [--json F]

Each kernel is compiled at its production block size in the variants that matter (dtype, and every
optional term on or off) for the targets below, by the compiler that Triton carries; a spill in any
of them is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from flowkernels import (
    branching_triton,
    logprobs_triton,
    policy_loss_triton,
    rows_triton,
    sparse_delta_triton,
)
from flowkernels.statistics import BIN_WIDTH, NUM_BINS
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from bench.measure import print_table, write_json

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
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
    "tile_ends_ptr": "*i64",
    "bounds_ptr": "*i64",
    "digest_ptr": "*i64",
    "mask_ptr": "*i1",
    "is_candidate_ptr": "*i1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--targets",
        default=",".join(TARGETS),
        help=f"comma-separated (default: {','.join(TARGETS)})",
    )
    args = parser.parse_args()
    rows = table(args.targets.split(","))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    spilled = [
        f"{row['kernel']} {row['variant']} on {row['target']}" for row in rows if row["spills"]
    ]
    if spilled:
        sys.exit(f"spills: {'; '.join(spilled)}")


def table(targets: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "kernel": name,
            "variant": variant,
            "target": target,
            **compile_one(kernel, constants, dtype, TARGETS[target], options),
        }
        for name, variant, kernel, constants, dtype, options in variants()
        for target in targets
    ]


def variants() -> Iterator[tuple[str, str, Any, dict[str, Any], str, dict[str, int]]]:
    """(kernel, variant, function, constexprs and absent arguments, dtype of the logits
    (->gradient), compiler options).
    """
    no_mask = {"mask_ids_ptr": None, "mask_offsets_ptr": None, "mask_copy_ptr": None}
    few = {**no_mask, "softcap": None}
    clip = {"LOSS_TYPE": 0, "KL": 2}
    clip_only = {**clip, **few, "ref_ptr": None, "dual_clip": None, "entropy_coef": None}
    score_kernel, gradient_kernel = logprobs_triton.score_kernel, logprobs_triton.gradient_kernel
    loss_kernel, scale_kernel = policy_loss_triton.loss_kernel, policy_loss_triton.scale_kernel
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        logits = torch.empty(1, 1, dtype=dtype)
        score = rows_triton.score_config(logits).arguments()
        loss = rows_triton.loss_config(logits).arguments()
        yield "score", name, score_kernel, *_split({**few, **score}, name)
        yield "score", f"{name} all", score_kernel, *_split({**score}, name)
        no_entropy = {**few, "dentropy_ptr": None, **score}
        yield "gradient", name, gradient_kernel, *_split(no_entropy, name)
        yield "gradient", f"{name} all", gradient_kernel, *_split({**score}, name)
        yield "loss", name, loss_kernel, *_split({**clip_only, **loss}, name)
        yield "loss", f"{name} all", loss_kernel, *_split({**clip, **loss}, name)
        scored_only = {**clip_only, "out_ptr": None, **loss}
        yield "loss", f"{name} no gradient", loss_kernel, *_split(scored_only, name)
        yield "scale", name, scale_kernel, *_split({"BLOCK": 4096, "num_warps": 8}, name)
    mixed = rows_triton.loss_config(torch.empty(1, 1)).arguments()
    yield "loss", "fp32->bf16", loss_kernel, *_split({**clip_only, **mixed}, "fp32->bf16")
    statistics = {"BIN_WIDTH": BIN_WIDTH, "NUM_BINS": NUM_BINS, **policy_loss_triton.STATISTICS}
    yield "statistics", "", policy_loss_triton.statistics_kernel, *_split(statistics, "fp32")
    scan = {**branching_triton.LAUNCH}
    yield "scan", "", branching_triton.scan_kernel, *_split({**scan}, "fp32")
    yield "branching", "", branching_triton.score_kernel, *_split({**scan}, "fp32")
    tile, scatter = sparse_delta_triton.TILE, sparse_delta_triton.SCATTER
    yield "delta count", "", sparse_delta_triton.count_kernel, *_split({**tile}, "int16")
    yield "delta compact", "", sparse_delta_triton.compact_kernel, *_split({**tile}, "int16")
    for name, writes in (("", True), ("no write", False)):
        constants = {"WRITES": writes, **scatter}
        yield "delta scatter", name, sparse_delta_triton.scatter_kernel, *_split(constants, "int16")
    digest = {**sparse_delta_triton.DIGEST}
    yield "delta digest", "", sparse_delta_triton.digest_kernel, *_split(digest, "int16")


def _split(arguments: dict[str, Any], dtype: str) -> tuple[dict[str, Any], str, dict[str, int]]:
    """Launch arguments into the kernel's own and the compiler's."""
    options: dict[str, int] = {
        name: arguments.pop(name) for name in ("num_warps", "maxnreg") if name in arguments
    }
    return arguments, dtype, options


def compile_one(
    kernel: Any, constants: dict[str, Any], dtype: str, target: GPUTarget, options: dict[str, int]
) -> dict[str, Any]:
    """Registers per thread, shared bytes per program and bytes spilled to memory per thread."""
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
        else:
            signature[name] = _type(name, dtype)
            if signature[name].startswith("*") or name in (
                "num_vocab",
                "num_words",
                "row_stride",
                "out_stride",
            ):
                attributes[(index,)] = [["tt.divisibility", 16]]
    if target.backend == "hip":  # a warp is twice as wide there, and no register limit is set
        options = {"num_warps": max(1, options["num_warps"] * 32 // target.warp_size)}
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, attributes), target=target, options=options
    )
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
    return {**_ptxas(compiled.asm["ptx"], target.arch), "shared": shared}


def _type(name: str, dtype: str) -> str:
    logits, _, gradient = dtype.partition("->")
    if name in ("logits_ptr", "out_ptr", "gradient_ptr"):
        return f"*{logits if name == 'logits_ptr' or not gradient else gradient}"
    if name.endswith("_ptr"):
        return _POINTERS.get(name, "*fp32")
    if name in ("num_elements", "num_words", "first", "row_stride", "out_stride"):
        return "i64"
    return "i32" if name.startswith("num_") or name.endswith("_stride") else "fp32"


def _ptxas(ptx: str, arch: int) -> dict[str, Any]:
    program = nvidia.get_ptxas(arch).path  # as Triton itself would choose
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = _find(r"\.target\s+(sm_\w+)", ptx)
        command = [program, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = (
        int(_find(r"(\d+) bytes spill stores", report)),
        int(_find(r"(\d+) bytes spill loads", report)),
    )
    return {"registers": int(_find(r"Used (\d+) registers", report)), "spills": stores + loads}


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in the compiler's report"
    return match[1]


if __name__ == "__main__":
    main()
