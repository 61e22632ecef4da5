"""Stages that need torch and Triton alone, and say what more a case needs. A stage is a function
that measures its cases.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.gpu.cases import Cases, Needs, Row
from bench.measure import extra_bytes, installed_version, seconds_of

# They collect with torch, Triton and pytest alone.
_KERNEL_TESTS = (
    "host_reads", "operators", "row_losses", "logprobs", "fused_lm_head",
    "alignment", "arguments", "callers", "future_ratio",
    "layers", "rows_exact", "sparse_delta", "statistics",
)  # fmt: skip
_FIRST_TESTS = ("layers", "logprobs", "sparse_delta")
_RIVALS = ("torch", "compile", "trl", "liger")
_HEADS = ((896, 151936), (3584, 152064))
_PACKAGES = (
    "torch", "triton", "numpy", "transformers", "pydantic", "trl", "liger_kernel",
    "nvidia-cutlass-dsl", "vllm", "flash-linear-attention",
)  # fmt: skip


def environment(cases: Cases) -> None:
    """The machine, its clocks, and the packages that decide which cases run."""
    cases.run("packages", lambda: {name: installed_version(name) or "" for name in _PACKAGES})
    cases.run("python", lambda: {"python": platform.python_version(), "cpus": os.cpu_count()})
    cases.run("ceilings", partial(_ceilings, cases))
    if cases.device == "cuda":
        cases.run("device", _device)
        cases.run("clocks", _clocks)


def _ceilings(cases: Cases) -> Row:
    """What a copy and a product reach on this device, on random data."""
    size, dtype = (256, torch.float32) if cases.is_small else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=cases.device, dtype=dtype) for _ in range(2))
    source = torch.randn(8 * size * size, device=cases.device, dtype=dtype)
    target = torch.empty_like(source)
    copy_s = _median_ms(lambda: target.copy_(source)) / 1e3
    product_s = _median_ms(lambda: a @ b) / 1e3
    return {"copy_tb_s": 2 * source.nbytes / copy_s / 1e12} | {
        "product_tflops": 2 * size**3 / product_s / 1e12
    }


def _device() -> Row:
    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gb": found.total_memory / 1e9,
        "l2_mb": found.L2_cache_size / 1e6,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _clocks() -> Row:
    command = ["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE"]
    return {"nvidia-smi": subprocess.run(command, capture_output=True, text=True).stdout}


def gpu_tests(cases: Cases) -> None:
    """Tests that a CPU cannot run, which are collected and skipped there; then those of the kernels
    that a run begins with, on the device.
    """
    files = [
        f"tests/kernels/test_{name}.py" for name in _KERNEL_TESTS[: 99 if cases.is_small else 2]
    ]
    cases.run("kernels", partial(_pytest, cases, "-m", "gpu", *files))
    cases.run("attention", partial(_attention_tests, cases))
    for name in () if cases.is_small else _FIRST_TESTS:
        cases.run(name, partial(_device_tests, cases, name))


def _attention_tests(cases: Cases) -> Row:
    for package in ("transformers", "pydantic"):
        if importlib.util.find_spec(package) is None:
            raise Needs(package)
    files = (f"tests/trainer/test_{name}.py" for name in ("flex", "recurrent"))
    return _pytest(cases, "-m", "gpu", *files)


def kernel_tests(cases: Cases) -> None:
    """The other tests of kernels on the device, a process for each file."""
    others = [name for name in _KERNEL_TESTS if name not in _FIRST_TESTS]
    for name in ("statistics",) if cases.is_small else others:
        cases.run(name, partial(_device_tests, cases, name))


def _device_tests(cases: Cases, name: str) -> Row:
    return _pytest(cases, "-m", "not gpu", f"tests/kernels/test_{name}.py")


def _pytest(cases: Cases, *arguments: str) -> Row:
    cases.folder.mkdir(exist_ok=True)
    report = cases.folder / "tests.xml"
    report.unlink(missing_ok=True)
    options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    code = subprocess.run([sys.executable, "-m", "pytest", *options, *arguments]).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with status {code} before it ran a test")
    row: Row = {"status": code, "tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ET.parse(report).getroot().iter("testsuite"):  # of our own test run
        for name in list(row)[1:]:
            row[name] += int(suite.get(name, 0))
    if code:
        row["error"] = f"pytest ended with status {code}: {row['failures'] + row['errors']} failed"
    return row


def attention(cases: Cases) -> None:
    """Attention over whole trees by each way, and over a chain by each of torch's kernels."""
    _attention(cases, lambda way: way != "trl")


def _attention(cases: Cases, is_wanted: Callable[[str], bool]) -> None:
    from bench import attention as bench

    on_gpu = cases.device == "cuda"
    scale, repeats = (0.02, 1) if cases.is_small else (1.0, 5)
    for heads, shape in bench.HEADS.items():
        torch._dynamo.reset()  # compiled once for all lengths, but not for all heads
        for case in bench.cases(scale, shape, torch.device(cases.device), on_gpu):
            for way in bench.ways_of(case.layout):
                if is_wanted(way) and (on_gpu or way not in bench.GPU_WAYS):
                    run = partial(bench.measure_way, case, way, heads, repeats)
                    cases.run(f"{heads}, {case.layout}: {way}", run)


def head_chunks(cases: Cases) -> None:
    """The linear loss with its gradients by the rows of a chunk, beside its bare products; 0 rows
    are the default, and the last takes all at once.
    """
    from bench.loss_rivals import HeadBatch, head_gradient, head_loss_runs

    num_tokens, chunks = (64, (0, 16)) if cases.is_small else (8192, (0, 2048, 3584, 4096))
    dtype = torch.float32 if cases.is_small else torch.bfloat16
    for size, num_vocab in ((16, 257),) if cases.is_small else (*_HEADS, (1536, 151936)):

        def measure(num_rows: int, size: int = size, num_vocab: int = num_vocab) -> Row:
            batch = HeadBatch.make(num_tokens, size, num_vocab, dtype, cases.device)
            budget = num_rows * num_vocab * batch.hidden_TD.element_size() or None
            run = partial(head_gradient, batch, memory_budget=budget)
            row: Row = {"T": num_tokens, "D": size, "V": num_vocab, "chunk_rows": num_rows}
            row["extra_mb"] = extra_bytes(run, batch.hidden_TD.device) / 1e6
            ms, gemm_ms = _median_ms(run), _median_ms(head_loss_runs(batch, ["gemm"])["gemm"])
            return row | {"ms": ms, "of gemm": ms / gemm_ms}

        for num_rows in (*chunks, num_tokens):
            cases.run(f"D={size}, {num_rows} rows", partial(measure, num_rows))


def layers(cases: Cases) -> None:
    """Each layer beside its rivals, and beside a copy of the bytes that it must move."""
    from bench import layers as bench

    dtype = torch.float32 if cases.is_small else torch.bfloat16
    shapes, num_tokens = (bench.SMALL, 16) if cases.is_small else (bench.SHAPES, 16384)
    # Compiling C++ takes longer than all the rest.
    paths = [path for path in bench.PATHS if not (cases.is_small and path == "compile")]
    for (name, shape), layer in product(shapes.items(), bench.LAYERS):
        what = (layer, shape, num_tokens, dtype, cases.device)
        run = partial(bench.measure, *what, paths=paths)
        cases.run(f"{name}, {layer}", run)


def delta(cases: Cases) -> None:
    """The sparse-delta kernels beside a copy of the same words; 1 % of them change."""
    from flowkernels import diff_words, digest_words, scatter_words_

    num_words = 2**12 if cases.is_small else 2**30

    def measure(kernel: str) -> Row:
        rng = torch.Generator(cases.device).manual_seed(0)
        make: dict[str, Any] = {"generator": rng, "device": cases.device}
        old = torch.randint(-(2**15), 2**15, (num_words,), **make).short()
        new = torch.where(torch.rand(num_words, **make) < 0.01, old ^ 1, old)
        found, target = diff_words(old, new), torch.empty_like(old)
        changes = found.counts, found.positions, found.diffs
        run, word_bytes = {
            "diff": (lambda: diff_words(old, new), 4),
            "digest": (lambda: digest_words(new), 2),
            # every run adds the changes once more, which is the same work
            "scatter": (lambda: scatter_words_(old, *changes), 0),
        }[kernel]
        ms, copy_ms = _median_ms(run), _median_ms(lambda: target.copy_(old))
        return {"kernel": kernel, "words": num_words, "ms": ms, "copy_ms": copy_ms} | (
            {"of copy": word_bytes / 4 * copy_ms / ms} if word_bytes else {}
        )

    for kernel in ("diff", "digest", "scatter"):
        cases.run(kernel, partial(measure, kernel))


def rivals(cases: Cases) -> None:
    """Each rival beside ours, timed in turn: the linear loss from hidden states, then logits, then
    attention over trees.
    """
    from bench import losses as bench
    from bench.loss_rivals import Batch, HeadBatch

    num_tokens, heads = (512, ((16, 257),)) if cases.is_small else (8192, _HEADS)
    how: Any = (torch.float32 if cases.is_small else torch.bfloat16, cases.device)
    repeats = 1 if cases.is_small else 9

    def head(peer: str, size: int, num_vocab: int) -> Sequence[Row]:
        batch = HeadBatch.make(num_tokens, size, num_vocab, *how)
        return bench.measure_head(batch, ["gemm", peer], repeats)

    def logits(peer: str) -> Sequence[Row]:
        return bench.measure_logits(Batch.make(num_tokens, heads[0][1], *how), [peer], repeats)

    for peer in [peer for peer in _RIVALS if not (cases.is_small and peer == "compile")]:
        for size, num_vocab in heads:
            run = partial(_beside, cases, peer, partial(head, peer, size, num_vocab))
            cases.run(f"D={size}: {peer}", run)
        cases.run(f"logits: {peer}", partial(_beside, cases, peer, partial(logits, peer)))
    _attention(cases, lambda way: way in ("flex", "trl"))


def _beside(cases: Cases, peer: str, measure: Callable[[], Sequence[Row]]) -> Sequence[Row]:
    """The rows of ours and of a rival, if it runs here."""
    from bench.loss_rivals import missing

    if (reason := missing(peer, cases.device)) is not None:
        raise Needs("a GPU" if "a GPU" in reason else peer)
    rows = measure()
    if not any(row["impl"].split()[0] == peer for row in rows if row["path"] != "copy"):
        raise RuntimeError(f"{peer} did not run, and the log says why")
    return rows


def _median_ms(run: Callable[[], Any]) -> float:
    """Median of nine runs after two that warm up."""
    return 1e3 * statistics.median([seconds_of(run) for _ in range(11)][2:])
