"""The model, arguments and environment that vLLM's processes start with, and cures for their
errors. Imports nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from flowtrain.config import Vllm
from flowtrain.records import Sampling, UserError
from flowtrain.weights.format.manifest import AdapterSpec

ERROR_FILE = "FLOWTRAIN_VLLM_ERRORS"
"""Environment variable that names the file where vLLM's processes write their errors."""
OLDEST = (0, 25)
INSTALL = (
    "pip install -e '.[vllm]' on a machine with a GPU, `make setup ENGINE=vllm` on one without"
)
_LAUNCHER = re.compile(
    "((LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ROLE_.*)"
)
"""Variables of torchrun."""
_ALLOCATOR = re.compile("PYTORCH_(CUDA_)?ALLOC_CONF")
"""Options of torch's memory."""
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Set unless the caller has set them. A forked process would inherit locks of the trainer's threads
that nobody frees, hence "spawn"."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's LoRA slots; smaller adapters are padded with zeros."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class VllmModel:
    """The model that vLLM runs, and where it runs."""

    source: str | PretrainedConfig | PreTrainedModel
    """Folder or hub name of a model, or the model; or only its shape, if the weights come from
    `store`."""
    dtype: str
    """"float32" or "bfloat16"."""
    max_tokens: int
    """Longest prompt and response together."""
    stop_ids: frozenset[int]
    """Tokens that end a response."""
    store: str = ""
    """Folder or URL of the weight store; empty: the weights are those of `source` and never change.
    """
    verify_every: int = 0
    """See `WeightReader`."""
    adapters: AdapterSpec | None = None
    """The layers of the policies of `adapter_stores`, over those of `source`; None: this is the
    model of one policy alone."""
    adapter_stores: Mapping[str, str] = field(default_factory=dict)
    """Folder or URL of the store of each policy's adapter; empty: `source` without an adapter."""
    records_entropies: bool = False
    """Completions hold the sampler's entropies."""
    records_routes: bool = False
    """It is a mixture of experts, and completions hold the routes of their tokens."""
    is_cpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of vLLM's processes, from `cpu_environment` or `gpu_environment`."""


def check_installed(key: str = "rollout.engine") -> None:
    """Raises UserError when vLLM is missing. `key`: the option that asks for it. `check_version`
    checks the version, once vLLM is imported.
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
    """Set the environment of processes that start inside the block. torchrun's variables are left
    out, because an engine would look for the trainer's ranks; and segments of memory that grow,
    which trainers like, because a vLLM that is to sleep refuses to start with them.
    """
    with _lock:
        before = dict(os.environ)
        os.environ.update({name: value for name, value in _DEFAULTS.items() if name not in before})
        os.environ.update(changes)
        for name in before:
            if _LAUNCHER.fullmatch(name):
                del os.environ[name]
            if _ALLOCATOR.fullmatch(name):
                os.environ[name] = _without_growth(before[name])
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def _without_growth(options: str) -> str:
    """Leave expandable_segments out of torch's "name:value,name:value"."""
    kept = (x for x in options.split(",") if x.partition(":")[0].strip() != "expandable_segments")
    return ",".join(kept)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep processes that are spawned inside the block from importing the trainer's main module.

    They need nothing of it, it costs seconds, and it may import llvmlite, on which vLLM's walk over
    all modules breaks on a CPU.
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
    """Sample in one process, or one for each part of the model, on the threads of the rank but one,
    which feeds it.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, num_threads - 1)),
    }


def gpu_environment(index: int, number: int = 1) -> dict[str, str]:
    """Show vLLM only the device that this rank computes on and, for a `number` above 1, those after
    it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",")[index:] if visible else map(str, itertools.count(index))
    return {"CUDA_VISIBLE_DEVICES": ",".join(itertools.islice(devices, number))}


def engine_args(model: VllmModel, options: Vllm) -> dict[str, Any]:
    """Return the arguments that vLLM is started with."""
    device: dict[str, Any] = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": options.enforce_eager,
    }
    if model.is_cpu:
        device = {
            # On a CPU vLLM fails over a seeded prompt that is computed in parts (its generators
            # have no offset), so it must take every prompt as a whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(model.max_tokens, 2048),
            "enforce_eager": True,
            "block_size": 32,  # not 128: shorter prefixes would not be shared
        }
    if options.kv_cache_gb or model.is_cpu:
        device["kv_cache_memory_bytes"] = int((options.kv_cache_gb or 1) * 2**30)
    if options.sleep:
        device["enable_sleep_mode"] = True
    if model.store:
        device |= {"load_format": "dummy", "weight_transfer_config": {"backend": "sparse_delta"}}
    if model.records_routes and not model.is_cpu:
        device["enable_return_routed_experts"] = True
        # Other kernels rearrange the weights of experts.
        device |= {"moe_backend": "triton"} if model.store else {}
    if model.adapters is not None:
        if model.records_routes and model.is_cpu:
            raise UserError(
                "on a CPU vLLM has no adapters of a mixture of experts: set lora.sync = 'merged'"
            )
        num_adapters = len([location for location in model.adapter_stores.values() if location])
        device |= _slots(model.adapters, max(1, num_adapters) + model.is_cpu)
    return {
        "model": model.source,
        "dtype": model.dtype,
        "max_model_len": model.max_tokens,
        "max_num_seqs": options.max_num_seqs,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # as many as a request asks for
        "enable_prefix_caching": True,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "uni"
        if options.tensor_parallel_size == 1
        else "flowtrain.inference.vllm.executor.Executor",
        "worker_extension_cls": "flowtrain.inference.vllm.worker.Worker",
        "disable_log_stats": True,
        **device,
    }


def _slots(adapters: AdapterSpec, num_slots: int) -> dict[str, Any]:
    """Return the arguments for LoRA slots. On a CPU vLLM computes a request without an adapter with
    the last slot, so `num_slots` has one there that stays empty (zeros).
    """
    rank = next((rank for rank in _RANKS if rank >= adapters.rank), None)
    if rank is None:
        raise UserError(
            f"lora.rank={adapters.rank} is above {_RANKS[-1]}, the most that vLLM takes"
        )
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_lora_rank": rank,
        "lora_target_modules": adapters.targets,
    }


def sampling_args(sampling: Sampling, stop_ids: frozenset[int], num_vocab: int) -> dict[str, Any]:
    """Return the arguments that vLLM samples a request with, but for its seed."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "frequency_penalty": sampling.frequency_penalty,
        # Those of the sampled token alone, or of all tokens that could be sampled: more than top_k,
        # because vLLM keeps tokens that tie with the last.
        "logprobs": min(2 * sampling.top_k + 8, num_vocab) if sampling.is_truncated else 0,
        "flat_logprobs": True,
        "ignore_eos": True,  # our stop ids count, not those of the model's folder
        "stop_token_ids": [] if sampling.ignore_end else sorted(stop_ids),
        "detokenize": False,
    }


def children() -> set[multiprocessing.process.BaseProcess]:
    """Return vLLM's engine processes that run now."""
    processes = multiprocessing.active_children()
    return {process for process in processes if process.name.startswith("EngineCore")}


_CURES = {
    "No available memory for the cache|KV cache is needed|larger than the available KV cache": (
        "vLLM's KV cache does not hold one request of vllm.max_model_len tokens (0: the model's "
        "positions): raise vllm.kv_cache_gb or vllm.gpu_memory_utilization, or lower "
        "vllm.max_model_len"
    ),
    "out of memory|OutOfMemory|memory utilization|requested memory|bad_alloc|[Cc]an(no|')t "
    "allocate": (
        "vLLM does not fit into memory: lower vllm.kv_cache_gb or vllm.max_num_seqs, or change "
        "vllm.gpu_memory_utilization"
    ),
    "CPU attention": (
        "vLLM's attention on a CPU does not take heads of this size (a multiple of 32): see "
        "tiny.num_heads"
    ),
    "local folder|valid model|Repo id|hugging|snapshot folder|not supported|no vLLM "
    "implementation|ModelConfig": "vLLM cannot run the model that model.path names",
}


def explain(error: Exception, error_file: Path) -> Exception:
    """Name what kept vLLM from starting in one line, with a cure for the usual reasons."""
    reason = f"{type(error).__name__}: {error}"
    if error_file.exists():  # what a process wrote says more than that it ended
        lines = [line.strip() for line in error_file.read_text().splitlines()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
        wrappers = ("Engine core init", "WorkerProc init")  # lines that name no cause
        causes = [line for line in errors if not any(wrapper in line for wrapper in wrappers)]
        reason = causes[-1] if causes else reason
    reason = " ".join(reason.split())
    for pattern, cure in _CURES.items():
        if re.search(pattern, reason):
            return UserError(f"{cure} ({reason})")
    return RuntimeError(f"vLLM did not start: {reason}")
