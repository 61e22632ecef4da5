"""What a rank that trains needs of its GPU, as far as that is known before the first step: all but activations."""

from __future__ import annotations

from flowtrain.config import Config
from flowtrain.types import UserError

_GB = 1e9


def check_memory(config: Config, num_parameters: int, num_ranks: int, gpu_bytes: int) -> None:
    """Raises UserError, with the keys and the numbers, when `num_ranks` that train a model cannot do so on GPUs of this size."""
    lasting = lasting_bytes(config, num_parameters, num_ranks)
    gradient = 0 if config.train.offload else 4 * num_parameters / num_ranks
    engine = engine_bytes(config, num_parameters, gpu_bytes)
    # An engine that sleeps and the gradient are never there at the same time.
    needed = sum(lasting.values()) + (max(gradient, engine) if config.vllm.sleep else gradient + engine)
    if needed > gpu_bytes:
        parts = {**lasting, "gradient": gradient, f"engine ({_engine_keys(config)})": engine}
        listed = ", ".join(f"{name} {number / _GB:.1f}" for name, number in parts.items() if number)
        cures = ["start more ranks"] + ["algorithm.kl_coef = 0"] * bool(config.algorithm.kl_coef)
        cures += ["train.offload = true"] * (not config.train.offload)
        if engine and config.rollout.engine == "vllm":
            cures += ["lower what vLLM may use"] + ["vllm.sleep = true"] * (not config.vllm.sleep)
        raise UserError(
            f"the GPU of a rank has {gpu_bytes / _GB:.1f} GB and training needs {needed / _GB:.1f} GB before any activation ({listed}): "
            + ", or ".join(cures)
        )


def lasting_bytes(config: Config, num_parameters: int, num_ranks: int) -> dict[str, float]:
    """What stays from step to step, by what it is."""
    own = num_parameters / num_ranks
    on_gpu = 0 if config.train.offload else own
    return {
        "weights and AdamW": 12 * on_gpu,
        "reference (algorithm.kl_coef)": 4 * on_gpu if config.algorithm.kl_coef else 0,
        "copy of what was published (model.dtype)": own * _itemsize(config),
    }


def engine_bytes(config: Config, num_parameters: int, gpu_bytes: int) -> float:
    """Of the engine on the same GPU; 0 where ranks that train have none."""
    if config.rollout.num_engine_ranks:
        return 0
    weights = num_parameters * _itemsize(config)
    if config.rollout.engine == "torch":
        return weights
    return weights + config.vllm.kv_cache_gb * 2**30 if config.vllm.kv_cache_gb else config.vllm.gpu_memory_utilization * gpu_bytes


def _engine_keys(config: Config) -> str:
    if config.rollout.engine == "torch":
        return "model.dtype"
    return "vllm.kv_cache_gb" if config.vllm.kv_cache_gb else f"vllm.gpu_memory_utilization={config.vllm.gpu_memory_utilization}"


def _itemsize(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4
