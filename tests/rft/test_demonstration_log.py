"""The log of a teacher's rollouts: what is there, what is missing, what it cost, what is broken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import make
import pytest
from make import call

from flowtrain.config import Config
from flowtrain.evaluation.rollout_log import Question
from flowtrain.inference.chat import Usage
from flowtrain.records import Action, Task, ToolCall, ToolResult, Trajectory, UserError, Verdict
from flowtrain.rft.demonstrations import PINS, DemonstrationLog, open_log, pins

TASKS = [Task(f"t-{n}", f"What is {n} plus 1?", (str(n + 1),)) for n in range(5)]


def rollout(number: int = 0, reward: float | None = 1.0, error: str = "") -> Trajectory:
    calls = {
        "planner": call((7, 0), (5, 6), 0.0, text="said"),
        "verifier": call((9, 0), (5, 8), 0.0, text="STOP"),
    }
    used = (ToolCall("Search", "{}", ToolResult("1", seconds=0.1234567), "id"),)
    more = {"verdict": Verdict.STOP, "evidence": "r", "tool_calls": used}
    turn = make.turn(act=Action("j", "c", "1 + 1", "Python_Coder"), calls=calls, **more)
    return make.rollout(turn, task=TASKS[number], answer="2", seed=42, reward=reward, error=error)


def log_of(folder: Path, resumes: bool = True) -> DemonstrationLog:
    return DemonstrationLog(folder, {}, resumes=resumes)


def put(log: DemonstrationLog, number: int, done: Trajectory) -> None:
    question = Question(number, number, None, done.task, done.seed)  # type: ignore[arg-type]
    log.append(question, done, Usage())


def test_rollouts_come_back_as_they_were(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    for number in (3, 1, 0):
        put(log, number, rollout(number))
    assert list(log_of(tmp_path).read([0, 1, 2])) == [rollout(0), rollout(1)]


def test_failed_and_missing_ones_are_asked_for(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    put(log, 0, rollout(0))
    put(log, 2, rollout(2, reward=None, error="planner: no"))
    for each in (log, log_of(tmp_path)):
        assert each.missing(4, num_ranks=1) == [1, 2, 3] and each.num_done == 1
        assert each.missing(1, num_ranks=2) == []
        with pytest.raises(UserError, match=r"has 2 of rft.num_rollouts=4 .* --resume auto"):
            each.missing(4, num_ranks=2)
    put(log, 2, rollout(2, reward=0.0))
    for each in (log, log_of(tmp_path)):
        assert each.missing(3, num_ranks=1) == [1] and each.num_done == 2
    assert [t.reward for t in log.read(range(5))] == [1.0, 0.0]


def test_a_run_that_begins_reads_nothing_of_another(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").write_text("not ours\n")
    assert log_of(tmp_path, resumes=False).num_done == 0


@pytest.mark.parametrize("packed", ["", "x", "eNoDAAAAAAE="])
def test_a_damaged_rollout_is_told_by_its_number(tmp_path: Path, packed: str) -> None:
    log = log_of(tmp_path)
    put(log, 0, rollout(0))
    record = json.loads(log.path.read_text())
    log.path.write_text(json.dumps({**record, "group": packed}) + "\n")
    with pytest.raises(UserError, match="demonstration 0 is damaged"):
        list(log_of(tmp_path).read([0]))


def test_rollouts_of_other_tasks_are_refused(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    put(log, 1, rollout(1))
    log.check(TASKS)
    log.check(TASKS[:1])
    with pytest.raises(UserError, match="'t-1' as demonstration 1, but the task is 't-0' now"):
        log.check([TASKS[1], TASKS[0]])


def config(folder: Path, **sections: dict[str, object]) -> Config:
    rft = {"expert": "gpt", **sections.pop("rft", {})}
    engine = {"model": "m", **sections.pop("engine", {})}
    run = {"dir": str(folder), "resume": "auto"}
    return Config.model_validate({"run": run, "engines": {"gpt": engine}, "rft": rft, **sections})


def begin(folder: Path) -> None:
    facts = {PINS: pins(config(folder))}
    (folder / "manifest.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": {"temperature": 0.5}}, "engines.gpt.temperature was 0.0, is 0.5"),
        ({"agent": {"max_turns": 9}}, "agent.max_turns was 3, is 9"),
        ({"rft": {"fictional": True}}, "rft.fictional was false, is true"),
        ({"model": {"path": "other"}}, 'model.path was "tiny", is "other"'),
    ],
)
def test_other_options_of_collection_are_refused(
    tmp_path: Path, changes: dict[str, dict[str, object]], said: str
) -> None:
    begin(tmp_path)
    with pytest.raises(UserError, match=f"{re.escape(said)}.*another --run.dir"):
        open_log(config(tmp_path, **changes))


def test_options_of_training_and_of_the_way_to_the_engine_may_change(tmp_path: Path) -> None:
    begin(tmp_path)
    engine = {"base_url": "http://127.0.0.1:1/v1", "price_in": 3.0, "max_concurrency": 2}
    rft = {"num_rollouts": 7, "num_epochs": 3, "lr": 1e-5, "screen": "shortcuts", "keep": "all"}
    open_log(config(tmp_path, engine=engine, rft=rft))


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="is the folder of a run without a teacher"):
        open_log(config(tmp_path))
