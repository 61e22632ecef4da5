"""The configs of large models begin: they parse, and their memory fits the GPUs that they name.

Each model is built on tensors that have shapes and no memory, from its published dimensions, so
that nothing is downloaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from flowtrain.algorithms import load_algorithm
from flowtrain.config.options import parse
from flowtrain.records import UserError
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.setup import memory_plan
from flowtrain.trainer.setup.memory_plan import MemoryPlan, plan_memory


class Case(NamedTuple):
    """A config, the GPUs that it is for, and the dimensions of its model."""

    config: str
    num_ranks: int
    gpu_gb: int
    shape: dict[str, Any]
    family: type[PreTrainedConfig] = Qwen2Config


def qwen2(width: int, mlp: int, layers: int, heads: int, key_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
    }


_7B = qwen2(3584, 18944, 28, 28, 4)
_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262144,
}
_OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32}  # else as GptOssConfig has it
STAY = ("weights", "moments", "reference", "published", "engine")
"""Parts of the trainer that stay where they are while vLLM samples."""
CASES = (
    Case("qwen2.5-7b-lora-1gpu", 1, 80, _7B),
    Case("agentflow-7b", 8, 80, _7B),
    Case("qwen2.5-14b-lora-2gpu", 2, 80, qwen2(5120, 13824, 48, 40, 8)),
    Case("qwen2.5-32b-8gpu", 8, 141, qwen2(5120, 27648, 64, 40, 8)),
    Case("qwen3-30b-a3b-8gpu", 8, 141, _30B_A3B, Qwen3MoeConfig),
    Case("qwen3-30b-a3b-lora-1gpu", 1, 141, _30B_A3B, Qwen3MoeConfig),
    Case("gpt-oss-20b-lora-1gpu", 1, 141, _OSS_20B, GptOssConfig),
)


def plan_of(case: Case) -> tuple[MemoryPlan, bool]:
    """Return the plan, and whether vLLM sleeps while a rank trains."""
    config = parse(["--config", f"configs/{case.config}.toml"])
    assert config is not None
    algorithm = load_algorithm(config)
    config = algorithm.config
    model = on_meta(case.family(**case.shape), getattr(torch, config.model.dtype))
    num_parameters = model.num_parameters()
    if config.lora.rank:
        add_adapter(model, config.lora, config.model.path)
    plan = plan_memory(
        config,
        model,
        [num_parameters],
        num_ranks=case.num_ranks,
        has_reference=algorithm.needs_reference,
        gpu_bytes=case.gpu_gb * 10**9,
    )
    plan.check(config)
    return plan, config.vllm.sleep


def on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a decoder without memory, whose head is not tied."""
    config.tie_word_embeddings = False
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


@pytest.fixture
def no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what takes long to count."""
    monkeypatch.setattr(memory_plan, "activations", lambda *_, **__: (0, 0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config)
@pytest.mark.usefixtures("no_activations")
def test_a_config_fits(case: Case) -> None:
    plan, sleeps = plan_of(case)
    awake = plan.vllm + sum(plan.parts[name] for name in STAY)
    trains = plan.num_bytes + (0 if sleeps else plan.vllm)
    assert 0 < plan.vllm <= max(awake, trains) < case.gpu_gb * 1e9
    if "lora" in case.config:
        assert sleeps
        whole = on_meta(case.family(**case.shape), torch.bfloat16)
        frozen = whole.num_parameters()
        adapter = plan.parts["gradients"] * case.num_ranks / 4
        share = adapter / frozen  # of mixtures the attention alone
        assert plan.parts["reference"] == 0 and 3e-4 < share < 0.012
        assert (share > 0.005) == (case.family is Qwen2Config)
        held = plan.parts["weights"] * case.num_ranks
        assert held == pytest.approx(2 * frozen + 4 * adapter, rel=1e-6)


@pytest.mark.usefixtures("no_activations")
def test_all_weights_of_7b_do_not_fit_where_an_adapter_does() -> None:
    with pytest.raises(UserError, match="training needs"):
        plan_of(CASES[0]._replace(config="agentflow-7b"))
