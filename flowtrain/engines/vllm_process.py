"""Around vLLM's processes: what they run, their environment, and what their errors mean to a
person. Imports nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from flowtrain.config import Vllm
from flowtrain.types import UserError

ERROR_FILE = "FLOWTRAIN_VLLM_ERRORS"
"""Environment variable: where vLLM's processes write their errors."""
OLDEST = (0, 25)
INSTALL = (
    "pip install 'flowtrain[vllm]' on a machine with a GPU, `make setup ENGINE=vllm` on one without"
)
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Unless the caller has set them. A process that is forked would inherit the trainer's threads as
locks that nobody frees."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What vLLM is to run, and where."""

    source: str | PretrainedConfig
    """Folder or hub name of a model; or only its shape, where the weights come from `store`."""
    dtype: str
    """"float32" or "bfloat16"."""
    max_tokens: int
    """Prompt and response together may not be longer."""
    stop_ids: frozenset[int]
    """Tokens that end a response."""
    store: str = ""
    """Folder or URL of the weight store; empty: the weights of `source` are sampled and never
    change."""
    verify_every: int = 0
    """As for `WeightReader`."""
    is_cpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of vLLM's processes, see `vllm_process`."""


def check_installed(key: str = "rollout.engine") -> None:
    """Raises UserError where vLLM is missing; its version is checked by `check_version` once it is
    imported. `key`: who asks for it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"{key}='vllm' needs vLLM, which is not installed: {INSTALL}")


def check_version(version: str) -> None:
    """Raises UserError for a vLLM older than what the engine was written for."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise UserError(
            f"vLLM {version} is too old, {'.'.join(map(str, OLDEST))} is the least: {INSTALL}"
        )


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """What processes that start meanwhile inherit; without torchrun's variables, or each engine
    would look for the trainer's ranks.
    """
    with _lock:
        before = dict(os.environ)
        os.environ.update({name: value for name, value in _DEFAULTS.items() if name not in before})
        os.environ.update(changes)
        for name in before:
            if name in _LAUNCHER or name.startswith(("TORCHELASTIC_", "ROLE_")):
                del os.environ[name]
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Processes that are spawned meanwhile do not import the trainer's main module.

    They need nothing of it, it costs seconds, and it may bring llvmlite along, on which vLLM's tour
    of all modules breaks on a CPU.
    """
    main = sys.modules["__main__"]
    before = {name: value for name, value in vars(main).items() if name in ("__spec__", "__file__")}
    main.__spec__ = None
    vars(main).pop("__file__", None)
    try:
        yield
    finally:
        vars(main).update(before)


def cpu_environment(num_threads: int) -> dict[str, str]:
    """On the CPU: sampling in one process, on the rank's threads but one, which feeds it, instead
    of on cores of its own.
    """
    own = max(1, num_threads - 1)
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(own),
    }


def gpu_environment(index: int) -> dict[str, str]:
    """Only the device that this rank computes on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[index] if visible else str(index)}


def engine_args(model: VllmModel, options: Vllm) -> dict[str, Any]:
    """What vLLM is started with."""
    device: dict[str, Any] = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": options.enforce_eager,
    }
    if model.is_cpu:
        # There vLLM fails over a seeded prompt that is computed in parts (its generators have no
        # offset); so it must take any as a whole.
        device = {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(model.max_tokens, 2048),
            "enforce_eager": True,
        }
        device["block_size"] = 32  # not 128: shorter prefixes would not be shared
    if options.kv_cache_gb or model.is_cpu:
        device["kv_cache_memory_bytes"] = int((options.kv_cache_gb or 1) * 2**30)
    if options.sleep:
        device["enable_sleep_mode"] = True
    if model.store:
        device |= {"load_format": "dummy", "weight_transfer_config": {"backend": "sparse_delta"}}
    return {
        "model": model.source,
        "dtype": model.dtype,
        "max_model_len": model.max_tokens,
        "max_num_seqs": options.max_num_seqs,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # as many as a request asks for
        "enable_prefix_caching": True,
        "distributed_executor_backend": "uni",
        "worker_extension_cls": "flowtrain.engines.vllm_worker.Worker",
        "disable_log_stats": True,
        **device,
    }


def children() -> set[multiprocessing.process.BaseProcess]:
    """vLLM's engine processes that live now."""
    return {
        child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")
    }


_CURES = {
    r"No available memory for the cache|KV cache is needed|larger than the available KV cache": (
        "vLLM's KV cache does not hold one request of vllm.max_model_len tokens (0: the model's "
        "positions): "
        "raise vllm.kv_cache_gb or vllm.gpu_memory_utilization, or lower vllm.max_model_len"
    ),
    r"out of memory|OutOfMemory|memory utilization|requested memory|bad_alloc|[Cc]an(no|')t "
    r"allocate": (
        "vLLM does not fit into memory: lower vllm.kv_cache_gb or vllm.max_num_seqs, or change "
        "vllm.gpu_memory_utilization"
    ),
    r"CPU attention": "vLLM's attention on a CPU does not take heads of this size (a multiple of "
    "32): see tiny.num_heads",
    r"local folder|valid model|Repo id|hugging|snapshot folder|not supported|no vLLM "
    r"implementation|ModelConfig": ("vLLM cannot run the model that model.path names"),
}


def explain(error: Exception, error_file: Path) -> Exception:
    """What kept vLLM from starting, as one line with a cure where it is one of the usual things."""
    reason = f"{type(error).__name__}: {error}"
    if error_file.exists():  # what a process wrote says more than that it ended
        lines = [line.strip() for line in error_file.read_text().splitlines()]
        own = [
            line
            for line in lines
            if re.match(r"[\w.]*(Error|Exception): ", line) and "Engine core init" not in line
        ]
        reason = own[-1] if own else reason
    reason = " ".join(reason.split())
    cure = next((cure for pattern, cure in _CURES.items() if re.search(pattern, reason)), None)
    return (
        RuntimeError(f"vLLM did not start: {reason}")
        if cure is None
        else UserError(f"{cure} ({reason})")
    )
