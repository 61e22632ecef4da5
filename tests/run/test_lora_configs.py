"""The configs of large models begin: they parse, and their memory fits the GPUs that they name."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config

from bench import plans
from flowtrain.run import memory_plan
from flowtrain.types import UserError


@pytest.fixture
def no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what takes long to count."""
    monkeypatch.setattr(memory_plan, "activations", lambda *_, **__: (0, 0))


@pytest.mark.parametrize("case", plans.CASES, ids=lambda case: case.config)
@pytest.mark.usefixtures("no_activations")
def test_a_config_fits(case: plans.Case) -> None:
    row = plans.row(case)
    assert float(row["peak"]) < case.gpu_gb
    plan, sleeps = plans.plan_of(case)
    assert plan.vllm > 0
    if "lora" in case.config:
        assert sleeps
        whole = plans.on_meta(case.family(**case.shape), torch.bfloat16)
        frozen = whole.num_parameters()
        adapter = plan.parts["gradients"] * case.num_ranks / 4
        share = adapter / frozen  # of mixtures the attention alone
        assert plan.parts["reference"] == 0 and 3e-4 < share < 0.012
        assert (share > 0.005) == (case.family is Qwen2Config)
        held = plan.parts["weights"] * case.num_ranks
        assert held == pytest.approx(2 * frozen + 4 * adapter, rel=1e-6)


@pytest.mark.usefixtures("no_activations")
def test_all_weights_of_7b_do_not_fit_where_an_adapter_does() -> None:
    case = plans.CASES[0]
    with pytest.raises(UserError, match="training needs"):
        plans.plan_of(case._replace(config="agentflow-7b"))
