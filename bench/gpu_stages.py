"""Stages of `bench.gpu` that no other benchmark answers:  python -m bench.gpu_stages STAGE FILE"""

from __future__ import annotations

import csv
import io
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from flowkernels import LossSpec, logprobs, policy_loss
from flowkernels.sparse_delta import diff_words, digest_words, scatter_words_

from bench.loss_rivals import Batch
from bench.measure import installed_version, print_table, seconds_of, write_json

Rows = list[dict[str, Any]]
_COUNTERS = {
    "lts__t_sectors_op_read_lookup_hit.sum": "read_hits",
    "lts__t_sectors_op_read.sum": "reads",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
}
_L2_SHAPE = (1056, 151936)
"""Eight rows for each multiprocessor of an H200."""


def environment() -> Rows:
    """The machine and the packages that decide which stages run."""
    rows: Rows = [{"fact": "python", "value": platform.python_version()}]
    names = ("torch", "triton", "transformers", "trl", "liger_kernel", "flash_attn_4", "vllm")
    rows += [{"fact": name, "value": installed_version(name) or "missing"} for name in names]
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        rows += [
            {"fact": "device", "value": found.name},
            {"fact": "capability", "value": f"{found.major}.{found.minor}"},
            {"fact": "multiprocessors", "value": found.multi_processor_count},
            {"fact": "memory_gb", "value": found.total_memory / 1e9},
            {"fact": "l2_mb", "value": found.L2_cache_size / 1e6},
            {"fact": "cuda", "value": torch.version.cuda},
        ]
    return rows


def delta() -> Rows:
    """The three sparse-delta kernels on the device, beside a copy of the same words; 1 % change."""
    on_gpu = torch.cuda.is_available()
    device, num_words = ("cuda", 2**30) if on_gpu else ("cpu", 2**22)
    rng = torch.Generator(device).manual_seed(0)
    old = torch.randint(-(2**15), 2**15, (num_words,), generator=rng, device=device).short()
    is_changed = torch.rand(num_words, generator=rng, device=device) < 0.01
    new = torch.where(is_changed, old ^ 1, old)
    found = diff_words(old, new)
    target, work = torch.empty_like(old), old.clone()
    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: target.copy_(old), 4),
        "diff": (lambda: diff_words(old, new), 4),
        "digest": (lambda: digest_words(new), 2),
        # every run adds the changes once more, which is the same work
        "scatter": (
            lambda: scatter_words_(work, found.counts, found.positions, found.diffs),
            0,
        ),
    }
    rows: Rows = []
    for name, (run, word_bytes) in runs.items():
        run()
        seconds = statistics.median([seconds_of(run) for _ in range(7)])
        row: dict[str, Any] = {"kernel": name, "words": num_words, "ms": 1e3 * seconds}
        if word_bytes:
            row["gb_s"] = word_bytes * num_words / seconds / 1e9
            row["of copy"] = row["gb_s"] / rows[0]["gb_s"] if rows else 1.0
        rows.append(row)
    return rows


def l2() -> Rows:
    """How much of the loss's second read of a row the L2 cache serves, by the hardware counters
    that ncu reads.
    """
    command = [
        "ncu", "--csv", "--clock-control", "none", "--metrics", ",".join(_COUNTERS),
        "--kernel-name", "regex:score_kernel|loss_kernel",
        sys.executable, "-m", "bench.gpu_stages", "one_loss", "-",
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = text[text.index('"ID"') :]
    kernels: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(io.StringIO(table)):
        row = kernels.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        unit = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.get(line["Metric Unit"], 1.0)
        value = float(line["Metric Value"].replace(",", "")) * unit
        row[_COUNTERS[line["Metric Name"]]] = value
    num = _L2_SHAPE[0] * _L2_SHAPE[1]
    for row in kernels.values():
        row["hit_rate"] = row["read_hits"] / row["reads"]
        row["dram_bytes_per_element"] = (row["dram_read"] + row["dram_written"]) / num
    return list(kernels.values())


def one_loss() -> Rows:
    """One launch of each row kernel, for ncu."""
    batch = Batch.make(*_L2_SHAPE, torch.bfloat16, "cuda")
    logprobs(batch.logits_TV, batch.target_ids_T)
    tokens: dict[str, Any] = {
        "advantage_T": batch.advantage_T,
        "weight_T": batch.weight_T,
        "old_logprob_T": batch.old_logprob_T,
    }
    logits_TV = batch.logits_TV.requires_grad_()
    policy_loss(logits_TV, batch.target_ids_T, spec=LossSpec(), **tokens)
    torch.cuda.synchronize()
    return []


def quickstart() -> Rows:
    """The quickstart on one device, warm-up and Flow-GRPO, as its two commands; a few steps of it
    without a GPU.
    """
    options = ["--config", "configs/quickstart.toml"]
    short_rft: Sequence[str] = ()
    short_train: Sequence[str] = ()
    if not torch.cuda.is_available():
        short_rft = ("--rft.num_rollouts", "200", "--rft.num_steps", "10")
        short_train = ("--train.num_steps", "2", "--eval.num_tasks", "10")
    with tempfile.TemporaryDirectory() as folder:
        warm, train = f"{folder}/warm", f"{folder}/train"
        _python("-m", "flowtrain.rft", *options, "--run.dir", warm, *short_rft)
        _python(
            "-m", "flowtrain.train", *options, "--run.dir", train,
            "--model.path", f"{warm}/model", *short_train,
        )  # fmt: skip
        text = Path(train, "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [
        {key: x for key, x in line.items() if key == "step" or key.startswith("eval")}
        for line in lines
        if "eval_reward" in line
    ]


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True)


STAGES: dict[str, Callable[[], Rows]] = {
    stage.__name__: stage for stage in (environment, delta, l2, one_loss, quickstart)
}


def main() -> None:
    name, path = sys.argv[1:]
    rows = STAGES[name]()
    if rows:
        print_table(rows)
        write_json(path, rows)


if __name__ == "__main__":
    main()
