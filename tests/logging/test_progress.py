from __future__ import annotations

from collections.abc import Mapping

import pytest

from flowtrain.logging import Progress, ProgressLine, progress

METRICS = {
    "reward_mean": 0.5,
    "loss": 3.0,
    "response_len_mean": 143.4,
    "collect_s": 12.2,
    "train_s": 8.14,
    "publish_s": 0.41,
    "eval_s": 0.0,
}


class Clock:
    """A clock that each step moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(
    line: Progress,
    steps: range,
    clock: Clock,
    step_s: float,
    metrics: Mapping[str, float] = METRICS,
) -> None:
    for step in steps:
        clock.now_s += step_s
        line.update({"step": step, **metrics})


def test_a_slow_run_logs_a_plain_line_per_step(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    run(Progress(100, 0, True), range(1, 4), clock, 20.0)
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "step 1/100 · reward 0.500 · 143 tokens · collect 12 s, train 8.1 s, publish 0.4 s · "
        "ETA 33 min",
        "step 2/100 · reward 0.500 · 143 tokens · collect 12 s, train 8.1 s, publish 0.4 s · "
        "ETA 33 min",
        "step 3/100 · reward 0.500 · 143 tokens · collect 12 s, train 8.1 s, publish 0.4 s · "
        "ETA 32 min",
    ]
    assert output.out == ""


def test_a_fast_run_logs_a_line_every_five_seconds_and_the_last(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    run(Progress(13, 0, True), range(1, 14), clock, 1.0)
    steps = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert steps == ["1/13", "6/13", "11/13", "13/13"]


def test_a_resumed_run_goes_on_from_its_step(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    line = Progress(4, 2, True)
    line.update({"step": 2, "eval_reward": 0.25})
    clock.now_s += 7200
    line.update({"step": 3, "reward_mean": float("nan")})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step 2/4 · held-out 0.250 · ETA unknown"
    assert second == "step 3/4 · held-out 0.250 (step 2) · ETA 2 h 00 min"


def test_parts_of_the_reward_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A reward that rises for the wrong reason shows."""
    line = Progress(2, 0, True)
    line.update({"step": 1, "reward_mean": 0.8, "reward/right": 0.0, "reward/{\x1b[2J}": 0.8})
    line.update({"step": 2, "reward_mean": 0.5, "reward/right": 0.5})
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1/2 · reward 0.800 (right 0.00, {\\x1b[2J} 0.80) · ")
    assert second.startswith("step 2/2 · reward 0.500 · "), "one part is all of it"


def test_a_warm_up_shows_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(4, 0, True).update({"step": 4, "loss": 0.123456})
    assert "step 4/4 · loss 0.123 · ETA 0.0 s" in capsys.readouterr().err


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    line = Progress(10, 0, False)
    line.note("hello")
    run(line, range(1, 11), clock, 60.0)
    assert capsys.readouterr() == ("", "")


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(10, 0, True).note("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_other_work_has_a_unit_and_a_text(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    line = ProgressLine(4, 2, True, unit="rollout")
    for done in (3, 4):
        clock.now_s += 1.0
        line.show(done, "text")
    expected = ["rollout 3/4 · text · ETA 1.0 s", "rollout 4/4 · text · ETA 0.0 s"]
    assert capsys.readouterr().err.splitlines() == expected
