"""Whether a trained verifier pays: what the study computes, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import learning_policies as bench
from flowtrain.config.options import parse
from flowtrain.types import Call, FinishReason, Task, ToolResult, Trajectory, Turn, Verdict

TASK = Task("t", "?", ("1",))


def points(*rewards: float, step_tokens: float) -> list[bench.Point]:
    return [
        {"step": 10.0 * n, "sampled": n * step_tokens, "reward": reward, "turns": 2.0 + n}
        for n, reward in enumerate(rewards)
    ]


def rollout(*verdicts: Verdict, reward: float, truncated: str = "") -> Trajectory:
    call = Call((1,), (2,), (-0.5,), (), FinishReason.STOP, "")
    turns = tuple(
        Turn(
            calls={"planner": call},
            action=None,
            command="",
            result=ToolResult(),
            verdict=verdict,
            seconds=0.0,
            plan_s=0.0,
        )
        for verdict in verdicts
    )
    return Trajectory(TASK, turns, "", 0.0, 0, reward=reward, truncated=truncated)


def test_arms_are_compared_at_equal_tokens_with_the_last_pair_beside_them() -> None:
    """The second arm takes half of the tokens per step, so only its first evaluation counts."""
    found = {
        "solver": [points(0.0, 0.4, step_tokens=1000), points(0.2, 0.4, step_tokens=1000)],
        "both": [points(0.0, 0.6, 0.8, step_tokens=500), points(0.2, 0.6, 1.0, step_tokens=1000)],
    }
    rows, curves = bench.compare(found)
    solver, both = rows
    assert [row["tokens"] for row in rows] == [1000, 1000]
    assert solver["final"] == pytest.approx(0.4) and solver["final gain"] == 0
    assert both["final"] == pytest.approx((0.8 + 0.6) / 2)
    assert both["final gain"] == pytest.approx((0.4 + 0.2) / 2)
    assert both["final gain +-"] == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert (solver["turns"], both["turns"]) == (3.0, 4.0)
    assert curves["both"][0] == ([0.0, 500.0, 1000.0], [0.0, 0.6, 0.8])


def test_the_tokens_of_a_step_are_those_of_both_policies(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "num_sampled_tokens": 9, "verifier/num_sampled_tokens": 2.0},
        {"step": 2, "num_sampled_tokens": 7, "verifier/num_sampled_tokens": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench.tokens_of_steps(tmp_path) == [11, 8]


def test_what_was_not_right_was_stopped_too_early_or_not_at_all() -> None:
    stop, go_on = Verdict.STOP, Verdict.CONTINUE
    found = bench.describe(
        [
            rollout(go_on, stop, reward=1.0),
            rollout(stop, reward=0.0),
            rollout(go_on, go_on, reward=0.0, truncated="turns"),
            rollout(go_on, go_on, go_on, reward=1.0, truncated="turns"),
        ]
    )
    assert found == {"reward": 0.5, "turns": 2.0, "wrong stop": 0.25, "out of turns": 0.5}


@pytest.mark.parametrize("trained", ["planner", "verifier"])
def test_a_run_trains_one_policy_and_finds_the_other(trained: str) -> None:
    models = {"planner": "runs/p", "verifier": "runs/v"}
    config = parse([*bench.SETTING, *bench.models_of(trained, models)])
    assert config is not None and config.train.policy == trained
    assert {name: config.path_of(name)[1] for name in config.policy_names} == models


def test_a_sharp_verifier_leaves_the_planner_as_it_is() -> None:
    config = parse([*bench.SETTING, *bench.SHARP])
    assert config is not None
    assert config.sampling_of("verifier")[1] == 0.1 and config.sampling_of("planner")[1] == 1.0
