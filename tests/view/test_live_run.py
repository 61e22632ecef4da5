"""What a browser is sent of a run that goes on: each thing once, as in the page of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowtrain.report import MetricsLog, TrajectoryLog
from flowtrain.utils.lock import Lock
from flowtrain.view import live as module
from flowtrain.view.data import Run
from flowtrain.view.live import Cursor, LiveRun, to_json
from flowtrain.view.state import run_state


class Visitor:
    """A browser's half of the protocol."""

    def __init__(self, run: LiveRun) -> None:
        self.run, self.cursor = run, Cursor()
        self.panels: dict[str, dict[str, dict[int, float]]] = {}
        self.rollouts: dict[int, dict[str, Any]] = {}
        self.head: dict[str, Any] = {}
        self.num_sent = 0
        self.last: dict[str, Any] = {}

    def ask(self) -> None:
        has_more = True
        while has_more:
            self.last = answer = json.loads(to_json(self.run.answer(self.cursor)))
            if answer["is_new"]:
                self.panels, self.rollouts, self.cursor = {}, {}, Cursor()
            for panel in answer["panels"]:
                lines = self.panels.setdefault(panel["title"], {})
                for each in panel["lines"]:
                    lines.setdefault(each["label"], {}).update(dict(each["points"]))
            numbers = answer["numbers"]
            self.rollouts |= dict(zip(numbers, answer["rollouts"], strict=True))
            self.rollouts = {n: r for n, r in self.rollouts.items() if n >= answer["oldest"]}
            self.num_sent += len(numbers)
            self.head = answer["head"] or self.head
            low = min([*numbers, self.cursor.low or 1 << 60])
            high = max([*numbers, self.cursor.high])
            self.cursor = Cursor(
                answer["epoch"], answer["record"], low if high else 0, high, answer["head_id"]
            )
            has_more = answer["has_more"]


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.0)


def as_file(run: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """A page that is a file: its panels, its head and its rollouts."""
    data = Run(run).data(10_000)
    panels = {
        panel["title"]: {each["label"]: dict(each["points"]) for each in panel["lines"]}
        for panel in data["panels"]
    }
    return panels, data, data["rollouts"]


def check_same(visitor: Visitor, run: Path) -> None:
    panels, data, rollouts = as_file(run)
    assert visitor.panels == panels
    ours = sorted(visitor.rollouts.values(), key=lambda each: each["id"])
    assert ours == sorted(rollouts, key=lambda each: each["id"])
    for key in ("name", "facts", "config", "step", "reward", "versions", "seconds", "results"):
        assert visitor.head[key] == json.loads(json.dumps(data[key])), key


def test_a_run_that_grows_looks_as_its_file_would(run: Path, runs: Any) -> None:
    early = Visitor(LiveRun(run, 1000))
    early.ask()
    check_same(early, run)
    metrics, log = MetricsLog(run, 4, tensorboard=False), TrajectoryLog(run, 0, 4)
    for step in (5, 6, 7):
        log.log(step, step - 1, [runs.group(0, step, "more")])
        metrics.log({"step": step, "version": step, "reward_mean": 0.5, "collect_s": 1.0})
        early.ask()
    metrics.log({"step": 5, "version": 5, "eval_reward": 0.25, "collect_s": 2.5})
    early.ask()
    check_same(early, run)
    late = Visitor(early.run)
    late.ask()
    check_same(late, run)
    sent = early.num_sent
    early.ask()
    assert early.num_sent == sent and not early.last["panels"] and early.last["head"] is None
    assert sent == 38 + 3 * 4, "each rollout once"


def test_a_resumed_run_is_read_anew(run: Path, runs: Any) -> None:
    visitor = Visitor(LiveRun(run, 1000))
    visitor.ask()
    epoch = visitor.cursor.epoch
    MetricsLog(run, 2, tensorboard=False).log({"step": 3, "version": 3, "reward_mean": 0.9})
    TrajectoryLog(run, 0, 2).log(3, 2, [runs.group(0, 3, "again")])
    visitor.ask()
    assert visitor.cursor.epoch != epoch
    assert visitor.panels["Reward"]["training"] == {1: 0.1, 2: 0.2, 3: 0.9}
    check_same(visitor, run)


def test_the_newest_whole_groups_are_kept(run: Path, runs: Any) -> None:
    live = LiveRun(run, 10)
    visitor = Visitor(live)
    visitor.ask()
    log = TrajectoryLog(run, 0, 4)
    for step in range(5, 40):
        log.log(step, step - 1, [runs.group(0, step, "more"), runs.group(1, step, "more")])
        visitor.ask()
    assert len(live._newest) <= 10 and len(visitor.rollouts) == 8
    assert {each["step"] for each in visitor.rollouts.values()} == {39}
    assert visitor.head["shown"].startswith("The newest 8 of 318 logged rollouts")
    small = LiveRun(run, 1000, max_bytes=40_000)
    Visitor(small).ask()
    assert 0 < small._num_bytes <= 40_000


def test_rollouts_come_in_pieces_newest_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_BYTES", 1)
    live = LiveRun(run, 1000)
    first = live.answer(Cursor())
    assert first["has_more"] and first["numbers"] == [38]
    visitor = Visitor(live)
    visitor.ask()
    check_same(visitor, run)


def test_a_line_that_is_no_rollout_is_passed_over(run: Path) -> None:
    log = run / "trajectories.jsonl"
    log.write_text('{"step": 1}\nnot json\n' + log.read_text())
    visitor = Visitor(LiveRun(run, 1000))
    visitor.ask()
    assert sum(each is None for each in visitor.rollouts.values()) == 1
    assert any("1 lines are no JSON objects" in note for note in visitor.head["notes"])


def test_the_states_of_a_run(tmp_path: Path, run: Path) -> None:
    assert run_state(tmp_path / "absent").name == "waiting"
    assert run_state(run).name == "ended"
    (run / "summary.json").unlink()
    assert run_state(run).name == "stopped"
    (run / "manifest.json").write_text('{"time": "2999-01-01T00:00:00+00:00"}')
    with Lock.of_folder(run, ""):
        state = run_state(run)
        assert state.name == "running" and state.text.startswith("On host ")
        (run / "manifest.json").write_text('{"time": "2000-01-01T00:00:00+00:00"}')
        assert run_state(run).text.startswith("Resumed at ")
    assert run_state(run).name == "stopped"


def test_a_killed_run_is_not_taken_for_one_that_runs(run: Path) -> None:
    import subprocess
    import sys

    (run / "summary.json").unlink()
    code = (
        "import sys, os, signal; from pathlib import Path; from flowtrain.utils.lock import Lock\n"
        f"lock = Lock.of_folder(Path({str(run)!r}), '')\n"
        "print('taken', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"taken\n"
        assert run_state(run).name == "running"
        process.kill()
    assert (run / "lock").exists() and run_state(run).name == "stopped"
