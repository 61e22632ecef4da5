"""The memory that training needs is known before it starts; the figures are those in the comments of configs/*.toml."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from flowtrain.config import Config, Train
from flowtrain.memory import check_memory, engine_bytes, lasting_bytes
from flowtrain.types import UserError

BILLION = 10**9
GB_80, GB_24 = 80 * BILLION, 24 * BILLION


def config(kl_coef: float = 0.001, engine: str = "vllm", num_engine_ranks: int = 0, dtype: str = "bfloat16", **vllm: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"dtype": dtype},
            "rollout": {"engine": engine, "num_engine_ranks": num_engine_ranks},
            "vllm": vllm,
            "algorithm": {"kl_coef": kl_coef},
        }
    )


def test_what_stays_of_a_step_on_eight_ranks() -> None:
    """7.6 G parameters: 3 fp32 tensors, the reference and a bf16 copy, an eighth of each."""
    found = lasting_bytes(config(), 7_600_000_000, 8)
    assert [round(number / BILLION, 2) for number in found.values()] == [11.4, 3.8, 1.9]
    assert sum(lasting_bytes(config(kl_coef=0.0), 7_600_000_000, 8).values()) == pytest.approx(13.3 * BILLION)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gpu_memory_utilization": 0.25}, 20.0),
        ({"kv_cache_gb": 10.0}, 2.0 + 10.73741824),
        ({"engine": "torch"}, 2.0),
        ({"engine": "torch", "dtype": "float32"}, 4.0),
        ({"num_engine_ranks": 2}, 0.0),
    ],
)
def test_what_the_engine_takes(settings: dict[str, Any], expected: float) -> None:
    assert engine_bytes(config(**settings), BILLION, GB_80) == pytest.approx(expected * BILLION)


@pytest.mark.parametrize(
    ("billions", "num_ranks", "gpu_bytes", "settings", "fits"),
    [
        (7.6, 8, GB_80, {"gpu_memory_utilization": 0.4}, True),
        (7.6, 4, GB_80, {"num_engine_ranks": 4}, True),
        (0.49, 1, GB_24, {"gpu_memory_utilization": 0.25}, True),
        (7.6, 1, GB_80, {"gpu_memory_utilization": 0.4}, False),
        (1.0, 1, GB_24, {"gpu_memory_utilization": 0.08}, True),  # 18 + 4 + 1.92 = 23.92 GB
        (1.0, 1, GB_24, {"gpu_memory_utilization": 0.09}, False),  # 24.16 GB
        (1.0, 1, GB_24, {"gpu_memory_utilization": 0.24, "sleep": True}, True),  # 18 + max(4, 5.76) = 23.76 GB
        (1.0, 1, GB_24, {"gpu_memory_utilization": 0.26, "sleep": True}, False),  # 24.24 GB
        (1.0, 1, GB_24, {"gpu_memory_utilization": 0.25, "kl_coef": 0.0}, True),  # 14 + 4 + 6 = 24 GB
    ],
)
def test_it_fits_or_is_refused(billions: float, num_ranks: int, gpu_bytes: int, settings: dict[str, Any], fits: bool) -> None:
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match="before any activation"):
        check_memory(config(**settings), int(billions * BILLION), num_ranks, gpu_bytes)


def test_what_is_offloaded_takes_no_memory_of_the_gpu() -> None:
    """Left are the copy of what was published, 4 GB, and the engine."""
    offloaded = config(gpu_memory_utilization=0.5).model_copy(update={"train": Train(offload=True)})
    assert sum(lasting_bytes(offloaded, 2 * BILLION, 1).values()) == 4 * BILLION
    check_memory(offloaded, 2 * BILLION, 1, GB_24)


def test_a_refusal_names_the_numbers_the_keys_and_the_cures() -> None:
    with pytest.raises(UserError) as refusal:
        check_memory(config(gpu_memory_utilization=0.5), 2 * BILLION, 1, GB_24)
    text = str(refusal.value)
    assert "\n" not in text
    for part in (
        "has 24.0 GB and training needs 56.0 GB",
        "weights and AdamW 24.0, reference (algorithm.kl_coef) 8.0, copy of what was published (model.dtype) 4.0, gradient 8.0",
        "engine (vllm.gpu_memory_utilization=0.5) 12.0",
        "start more ranks, or algorithm.kl_coef = 0, or train.offload = true, or lower what vLLM may use, or vllm.sleep = true",
    ):
        assert part in text, text
