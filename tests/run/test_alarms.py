"""Alarms by what the metrics of a run say."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config import Alarms as Options
from flowtrain.run.alarms import Alarms, parted

OPTIONS = Options()
W = OPTIONS.window


def steps(num: int, **metrics: Any) -> list[dict[str, Any]]:
    """Lines of `num` steps; a metric is a function of the share of the run that is done."""
    rng = random.Random(0)
    usual = {
        "response_len_mean": lambda _: 20.0 + rng.random(),
        "entropy": lambda _: 1.0 + 0.1 * rng.random(),
        "tool_share/Search": lambda _: 0.5 + 0.05 * rng.random(),
        "tool_share/Python": lambda _: 0.3 + 0.05 * rng.random(),
    }
    given = usual | metrics
    return [
        {"step": n, "num_tokens": 100, **{name: each(n / num) for name, each in given.items()}}
        for n in range(1, num + 1)
    ]


def evaluation(step: int, reward: float, true: float | None = None, error: float = 0.02) -> Any:
    found = {"step": step, "eval_reward": reward, "eval_reward_error": error}
    if true is not None:
        found |= {"eval_true_score": true, "eval_true_score_error": error}
    return found


def raised(folder: Path, lines: list[dict[str, Any]], is_true: bool = False, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    path = folder / "alarms.jsonl"
    path.unlink(missing_ok=True)
    alarms = Alarms.open(Options(**options), path, folder / "metrics.jsonl", -1, is_true)
    for line in lines:
        alarms.add(line)
    return {name: alarm.step for name, alarm in alarms.raised.items()}


def test_a_steady_run_raises_nothing(tmp_path: Path) -> None:
    lines = [evaluation(0, 0.2, 0.2), *steps(60), evaluation(60, 0.6, 0.55)]
    assert raised(tmp_path, lines) == {}


@pytest.mark.parametrize(
    ("rewards", "trues", "expected"),
    [
        ([0.2, 0.3, 0.6], [0.5, 0.5, 0.5], {"reward hacking": 20}),
        ([0.2, 0.3, 0.6], [0.5, 0.45, 0.3], {"reward hacking": 10}),
        ([0.2, 0.25, 0.3], [0.5, 0.45, 0.3], {"reward hacking": 20}),
        ([0.2, 0.3, 0.6], [0.2, 0.25, 0.5], {}),  # both rise
        ([0.2, 0.3, 0.6], [0.2, 0.22, 0.27], {}),  # the true score rises less, but it does
        ([0.5, 0.4, 0.2], [0.5, 0.4, 0.2], {}),  # both fall
        ([0.5, 0.5, 0.5], [0.5, 0.4, 0.2], {}),  # the reward learns nothing
        ([0.2, 0.4, 0.6], [0.2, 0.4, 0.2], {"reward hacking": 20}),  # it turns later
    ],
)
def test_the_two_scores_part(
    tmp_path: Path, rewards: list[float], trues: list[float], expected: dict[str, int]
) -> None:
    pairs = enumerate(zip(rewards, trues, strict=True))
    lines = [evaluation(10 * n, reward, true) for n, (reward, true) in pairs]
    assert raised(tmp_path, lines) == expected


def test_without_a_true_score_nothing_can_part(tmp_path: Path) -> None:
    assert raised(tmp_path, [evaluation(0, 0.2), evaluation(10, 0.9)]) == {}


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.floats(0.01, 10))
def test_a_reward_that_is_the_true_score_never_parts_from_it(
    scores: list[float], scale: float
) -> None:
    """In any unit: rises are counted in standard errors."""
    reward = [(n, score, 0.02) for n, score in enumerate(scores)]
    true = [(n, scale * score + 3, 0.02 * scale) for n, score in enumerate(scores)]
    assert parted(reward, true, OPTIONS.num_errors) is None


def test_longer_responses(tmp_path: Path) -> None:
    grown = steps(60, response_len_mean=lambda done: 20.0 if done < 0.5 else 50.0)
    found = raised(tmp_path, grown)
    assert set(found) == {"response length"} and 30 < found["response length"] <= 30 + W
    assert raised(tmp_path, grown, length_factor=3.0) == {}
    assert raised(tmp_path, grown, length_factor=0) == {}
    shorter = steps(60, response_len_mean=lambda done: 50.0 if done < 0.5 else 20.0)
    assert raised(tmp_path, shorter) == {}


def test_a_factor_within_the_scatter_of_steps_is_noise(tmp_path: Path) -> None:
    """Ten steps of which one has a single endless response."""
    lines = steps(20, response_len_mean=lambda done: 300.0 if done == 1 else 20.0)
    assert raised(tmp_path, lines) == {}


def test_entropy_that_collapses(tmp_path: Path) -> None:
    fallen = steps(60, entropy=lambda done: 1.0 if done < 0.5 else 0.02)
    assert set(raised(tmp_path, fallen)) == {"entropy"}
    halved = steps(60, entropy=lambda done: 1.0 if done < 0.5 else 0.5)
    assert raised(tmp_path, halved) == {}
    idle = steps(60, entropy=lambda done: 1.0 if done < 0.5 else 0.0)
    for line in idle[30:]:
        line["num_tokens"] = 0
    assert raised(tmp_path, idle) == {}, "a step that trained nothing has no entropy"


def test_a_tool_takes_over_or_vanishes(tmp_path: Path) -> None:
    def one(low: float, high: float) -> Any:
        return lambda done: low if done < 0.5 else high

    taken = steps(60, **{"tool_share/Search": one(0.5, 0.95), "tool_share/Python": one(0.4, 0.04)})
    assert set(raised(tmp_path, taken)) == {"tools"}
    gone = steps(60, **{"tool_share/Search": one(0.8, 0.8), "tool_share/Python": one(0.2, 0.0)})
    assert set(raised(tmp_path, gone)) == {"tools"}
    assert raised(tmp_path, gone, tool_share=0) == {}
    always = steps(60, **{"tool_share/Search": one(0.95, 0.99), "tool_share/Python": one(0.05, 0)})
    assert raised(tmp_path, always) == {}
    alone = steps(60)
    for line in alone:
        del line["tool_share/Python"]
    assert raised(tmp_path, alone) == {}


def test_a_true_score_that_rises_excuses_entropy_and_tools_but_no_length(tmp_path: Path) -> None:
    lines = steps(
        60,
        entropy=lambda done: 1.0 if done < 0.5 else 0.02,
        response_len_mean=lambda done: 20.0 if done < 0.5 else 50.0,
    )
    risen = [evaluation(0, 0.2, 0.2), evaluation(30, 0.8, 0.8)]
    assert set(raised(tmp_path, [*risen, *lines])) == {"response length"}
    flat = [evaluation(0, 0.2, 0.2), evaluation(30, 0.22, 0.2)]
    assert set(raised(tmp_path, [*flat, *lines])) == {"response length", "entropy"}
    noise = [evaluation(0, 0.2, 0.2), evaluation(30, 0.22, 0.21)]
    assert "entropy" in raised(tmp_path, [*noise, *lines])
    little = [evaluation(0, 0.2, 0.2), evaluation(30, 0.25, 0.25)]
    assert "entropy" not in raised(tmp_path, [*little, *lines])
    own = [evaluation(0, 0.2), evaluation(30, 0.8)]
    assert "entropy" in raised(tmp_path, [*own, *lines]), "a function's reward may be hacked"
    assert "entropy" not in raised(tmp_path, [*own, *lines], is_true=True)


def test_an_alarm_is_told_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics, path = tmp_path / "metrics.jsonl", tmp_path / "alarms.jsonl"
    lines = [evaluation(10 * n, 0.2 + 0.2 * n, 0.5) for n in range(4)]
    alarms = Alarms.open(OPTIONS, path, metrics, -1, False)
    with caplog.at_level(logging.WARNING):
        for line in lines:
            alarms.add(line)
    (record,) = caplog.records
    assert record.getMessage().startswith("alarm in step 10: reward hacking: since step 0 ")
    (told,) = alarms.summary()["alarms"]
    assert (told["cause"], told["step"]) == ("reward hacking", 10)
    assert [json.loads(line) for line in path.open()] == [told]

    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    resumed = Alarms.open(OPTIONS, path, metrics, 10, False)
    assert resumed.summary() == alarms.summary() and len(resumed.rows) == 2
    earlier = Alarms.open(OPTIONS, path, metrics, 5, False)
    assert earlier.summary() == {} and not path.read_text()
