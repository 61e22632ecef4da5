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
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

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
    shape: dict[str, int]


_QWEN = {"vocab_size": 152064, "max_position_embeddings": 32768}
_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
_14B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48}
_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
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
    model = on_meta(case.shape, getattr(torch, config.model.dtype))
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


def on_meta(shape: dict[str, int], dtype: torch.dtype) -> PreTrainedModel:
    """Build a Qwen2 decoder without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            Qwen2Config(**shape, tie_word_embeddings=False), dtype=dtype
        )
    return model


if __name__ == "__main__":
    main()
