"""Memory that a rank needs for configs of large models, predicted and not measured:
python -m bench.plans [--json F]

Each model is built on tensors that have shapes and no memory, from its published dimensions, so
that nothing is downloaded. The parts are those of `flowtrain.run.memory_plan`, in GB. vLLM sleeps
while a rank trains (vllm.sleep), so that "peak" is the larger of two sums: of all but vLLM, and of
vLLM and what the trainer keeps.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from bench.measure import report
from flowtrain.algorithms import load_algorithm
from flowtrain.config.options import parse
from flowtrain.run.memory_plan import MemoryPlan, plan_memory
from flowtrain.training.lora import add_adapter


class Case(NamedTuple):
    """A config, the GPUs that it is for, and the dimensions of its model."""

    config: str
    num_ranks: int
    gpu_gb: int
    shape: dict[str, Any]
    family: type[PreTrainedConfig] = Qwen2Config


_QWEN = {"vocab_size": 152064, "max_position_embeddings": 32768}
_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
_14B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48}
_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
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
    Case(
        "qwen2.5-7b-lora-1gpu",
        1,
        80,
        {**_QWEN, **_7B, "num_attention_heads": 28, "num_key_value_heads": 4},
    ),
    Case(
        "agentflow-7b",
        8,
        80,
        {**_QWEN, **_7B, "num_attention_heads": 28, "num_key_value_heads": 4},
    ),
    Case(
        "qwen2.5-14b-lora-2gpu",
        2,
        80,
        {**_QWEN, **_14B, "num_attention_heads": 40, "num_key_value_heads": 8},
    ),
    Case(
        "qwen2.5-32b-8gpu",
        8,
        141,
        {**_QWEN, **_32B, "num_attention_heads": 40, "num_key_value_heads": 8},
    ),
    Case("qwen3-30b-a3b-8gpu", 8, 141, _30B_A3B, Qwen3MoeConfig),
    Case("qwen3-30b-a3b-lora-1gpu", 1, 141, _30B_A3B, Qwen3MoeConfig),
    Case("gpt-oss-20b-lora-1gpu", 1, 141, _OSS_20B, GptOssConfig),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    rows = [row(case) for case in CASES]
    report(args.json, rows)


def row(case: Case) -> dict[str, Any]:
    """Plan a case; raises UserError where a rank lacks memory."""
    plan, sleeps = plan_of(case)
    vllm = plan.vllm
    parts = {name: f"{number / 1e9:.1f}" for name, number in plan.parts.items() if number}
    awake = vllm + sum(plan.parts[name] for name in STAY)
    peak = max(awake, plan.num_bytes + (0 if sleeps else vllm))
    return {
        "config": case.config,
        "GPUs": f"{case.num_ranks} x {case.gpu_gb} GB",
        **dict.fromkeys(("weights", "gradients", "moments", "reference"), ""),
        **parts,
        "vLLM": f"{vllm / 1e9:.1f}",
        "peak": f"{peak / 1e9:.1f}",
    }


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


if __name__ == "__main__":
    main()
