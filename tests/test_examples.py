"""The bare loop learns, and the trainer on top of TRL has TRL's loss, gradients and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_release import loaded
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    return loaded(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize("seed", ["0", "1"])
def test_bare_loop_learns(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    history = load("bare_loop").main(["--steps", "20", "--seed", seed])
    assert len(capsys.readouterr().out.splitlines()) == 20
    assert history[0]["reward"] < 0.3 and history[-1]["reward"] > 0.9
    assert history[-1]["entropy"] < 0.2 < 2 < history[0]["entropy"]
    assert (
        sum(x["clipped_low"] for x in history) > 0 and sum(x["clipped_high"] for x in history) > 0
    )  # ratios did move


def test_bare_loop_is_its_seed() -> None:
    main = load("bare_loop").main
    assert (
        main(["--steps", "3", "--seed", "5"])
        == main(["--steps", "3", "--seed", "5"])
        != main(["--steps", "3", "--seed", "6"])
    )


@pytest.mark.parametrize("name", ["bare_loop", "trl_grpo"])
def test_help_names_the_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "trl_grpo":
        pytest.importorskip("trl")
    with pytest.raises(SystemExit) as end:
        load(name).main(["--help"])
    assert end.value.code == 0
    assert {"--steps", "--seed"} <= set(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def trl_grpo() -> ModuleType:
    pytest.importorskip("trl")
    return load("trl_grpo")


def test_trl_example_learns(trl_grpo: ModuleType) -> None:
    history = trl_grpo.main(["--steps", "40"])
    rewards = [log["reward"] for log in history if "reward" in log]
    assert len(history) == 40 and rewards[0] < 0.2 and rewards[-1] > 0.7
    assert sum(log["clip_ratio/low_mean"] for log in history) > 0
    assert history[-1]["entropy"] < 1 < 2 < history[0]["entropy"]


def test_trl_example_runs_as_trl_does(trl_grpo: ModuleType, tmp_path: Path) -> None:
    """Samples, losses and gradient norms are those of TRL's own loss, step by step."""
    runs = []
    for trainer_class in (trl_grpo.FlowGRPOTrainer, trl_grpo.GRPOTrainer):
        trainer = trl_grpo.new_trainer(trainer_class, str(tmp_path), max_steps=12)
        trainer.train()
        runs.append([log for log in trainer.state.log_history if "loss" in log])
    for ours, theirs in zip(*runs, strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        assert ours.get("reward") == theirs.get("reward")
    assert runs[0][-1]["clip_ratio/low_mean"] > 0


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


@pytest.fixture(scope="module")
def trainer_after_a_step(
    request: pytest.FixtureRequest, trl_grpo: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Its buffer holds the batch that the step was taken on, which the weights have left since."""
    trainer = trl_grpo.new_trainer(
        trl_grpo.FlowGRPOTrainer,
        str(tmp_path_factory.mktemp("trainer")),
        max_steps=1,
        delta=1.5,
        temperature=0.9,
        **request.param,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("trainer_after_a_step", LOSSES.values(), ids=LOSSES, indirect=True)
@pytest.mark.parametrize("mode", ["train", "eval", "on-policy", "everything"])
def test_loss_gradients_and_metrics_are_those_of_trl(
    trainer_after_a_step: Any, trl_grpo: ModuleType, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a batch that TRL made. "everything" adds a reference policy, tokens of a tool, the
    correction for vLLM, and samples for two steps generated at once.
    """
    trainer = trainer_after_a_step
    inputs = dict(trainer._buffered_inputs[1])
    trainer.model.train(mode != "eval")
    for each in trainer._metrics.values():
        each.clear()
    if mode == "on-policy":
        del inputs["old_per_token_logps"]
    if mode == "everything":
        rng, old = torch.Generator().manual_seed(0), inputs["old_per_token_logps"]
        args = trainer.args
        monkeypatch.setattr(trainer, "beta", 0.1)
        monkeypatch.setattr(trainer, "use_vllm", True)
        monkeypatch.setattr(args, "use_bias_correction_kl", False)
        monkeypatch.setattr(args, "steps_per_generation", 2 * args.steps_per_generation)
        monkeypatch.setattr(args, "vllm_importance_sampling_mode", "sequence_truncate")
        inputs["ref_per_token_logps"] = old + 0.3 * torch.randn(old.shape, generator=rng)
        inputs["tool_mask"] = (torch.rand(old.shape, generator=rng) < 0.8).long()
        inputs["importance_sampling_ratio"] = 0.5 + torch.rand(len(old), 1, generator=rng)

    def run(compute: Callable[[Any, dict[str, Any]], Tensor]) -> tuple[Tensor, list[Tensor]]:
        trainer.model.zero_grad()
        loss = compute(trainer.model, inputs)
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in trainer.model.parameters()]

    our_loss, our_gradients = run(trainer._compute_loss)
    their_loss, their_gradients = run(
        lambda *arguments: trl_grpo.GRPOTrainer._compute_loss(trainer, *arguments)
    )
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-4, atol=1e-7)
    largest = max(gradient.abs().max().item() for gradient in their_gradients)
    assert largest > 1e-4
    for ours, theirs in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * largest)

    metrics = trainer._metrics["eval" if mode == "eval" else "train"]
    assert metrics["entropy"][0] == pytest.approx(metrics["entropy"][1], rel=1e-5)
    if mode == "everything":
        assert metrics["kl"][0] == pytest.approx(metrics["kl"][1], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("loss_type", {"loss_type": "sapo"}),
        ("cispo by sequence", {"loss_type": "cispo", "importance_sampling_level": "sequence"}),
        ("delta", {"delta": 1.1}),
        ("top_entropy_quantile", {"top_entropy_quantile": 0.2}),
        ("off_policy_mask_threshold", {"off_policy_mask_threshold": 0.5}),
        ("entropy_coef", {"entropy_coef": 0.01}),
    ],
)
def test_settings_that_would_be_left_out_are_refused(
    name: str, settings: dict[str, Any], trl_grpo: ModuleType, tmp_path: Path
) -> None:
    trainer = trl_grpo.new_trainer(trl_grpo.FlowGRPOTrainer, str(tmp_path), max_steps=1, **settings)
    with pytest.raises(ValueError, match=name):
        trainer.train()
