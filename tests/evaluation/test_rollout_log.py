"""Rollouts of an evaluation on a scripted flow: seeds, order, failures, judges and what each
rollout used; and its log: whole lines, what counts as done, and what a killed process leaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import make
import pytest
from make import Chat, call, rollout

from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.planner import ModelPlanner
from flowtrain.agents.agentflow.prompts import FullPrompt
from flowtrain.agents.agentflow.voices import ChatVoice
from flowtrain.config import Judge as JudgeOptions
from flowtrain.config.options import parse
from flowtrain.evaluation.benchmarks import _DECIDING, _NOT_DECIDING, EvaluationLog, questions
from flowtrain.evaluation.rollout_log import Question, ask
from flowtrain.evaluation.summary import Key
from flowtrain.evaluation.system import System
from flowtrain.inference.chat import Meter, Usage, metered
from flowtrain.inference.protocol import EngineError
from flowtrain.logging import ProgressLine
from flowtrain.logging.fingerprints import check_same, pinned
from flowtrain.records import Action, Task, ToolResult, Trajectory, UserError, Verdict
from flowtrain.rewards import Judge, JudgeCache

TASKS = tuple(
    Task(f"aime24-{number}", f"{number} + 1?", (str(number + 1),), "aime24", 0, "math")
    for number in range(3)
)


@dataclass
class FakeFlow:
    """Answers as a script says, or fails as it does; each rollout costs one token for each that
    began before it.
    """

    script: Callable[[Task], str]
    seeds: dict[str, int] = field(default_factory=dict)
    under_way: int = 0
    most: int = 0
    meter: Meter = field(default_factory=lambda: Meter(price_in=1e6, price_out=0))

    async def run(self, task: Task, seed: int) -> Trajectory:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.seeds[task.id] = seed
        number = len(self.seeds)
        await asyncio.sleep(0)
        self.meter.count(number, 1)
        self.under_way -= 1
        return rollout(task=task, answer=self.script(task), seed=seed)


def log_of(folder: Path) -> EvaluationLog:
    return EvaluationLog(folder, ("Search",))


def put(
    flow: FakeFlow,
    log: EvaluationLog,
    benchmarks: dict[str, list[Task]],
    judge: Judge | None = None,
    num_trials: int = 1,
    first: int = 0,
    seed: int = 0,
) -> None:
    system = System({3: flow}, judge)  # type: ignore[dict-item]
    todo = questions("policy", system, benchmarks, num_trials, seed)[first:]
    progress = ProgressLine(len(todo), 0, enabled=False)
    ask(todo, log, max_in_flight=2, progress=progress, scoring=(judge, None, None))


def run(
    folder: Path, flow: FakeFlow, judge: Judge | None = None, benchmark: str = "aime24", **more: int
) -> EvaluationLog:
    log = log_of(folder)
    tasks = [replace(task, id=task.id.replace("aime24", benchmark)) for task in TASKS]
    put(flow, log, {benchmark: tasks}, judge, **more)
    return log


def right(task: Task) -> str:
    return task.answers[0]


def test_every_rollout_has_a_seed_of_its_own_that_its_neighbours_do_not_change(
    tmp_path: Path,
) -> None:
    def seeds(name: str, **more: Any) -> dict[str, int]:
        (tmp_path / name).mkdir()
        flow = FakeFlow(right)
        run(tmp_path / name, flow, **more)
        return flow.seeds

    first = seeds("first")
    assert len(set(first.values())) == 3 and seeds("same") == first
    assert seeds("alone", first=2) == {"aime24-2": first["aime24-2"]}
    assert not set(seeds("seed", seed=1).values()) & set(first.values())
    assert not set(seeds("benchmark", benchmark="amc23").values()) & set(first.values())
    assert not set(seeds("trial", first=3, num_trials=2).values()) & set(first.values())


def test_no_more_are_under_way_than_allowed_and_each_knows_what_it_used(tmp_path: Path) -> None:
    flow = FakeFlow(right)
    log = run(tmp_path, flow)
    assert flow.most == 2
    found = {entry.usage.prompt_tokens: entry.usage.cost for entry in log.entries.values()}
    assert found == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_slow_disk_holds_no_other_rollout_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line is on the disk only after a second rollout has begun."""
    second_began = threading.Event()
    waited: list[bool] = []
    sync = os.fsync

    def slow(file: int) -> None:
        waited.append(second_began.wait(60))
        sync(file)

    def script(task: Task) -> str:
        if task.id == "aime24-2":
            second_began.set()
        return right(task)

    monkeypatch.setattr(os, "fsync", slow)
    log = run(tmp_path, FakeFlow(script))
    assert waited[0] and log.num_done == 3


def test_what_is_asked_outside_is_not_counted() -> None:
    meter = Meter(price_in=2.0, price_out=10.0)
    meter.count(5, 5)
    with metered() as outer:
        meter.count(1_000_000, 0)
        with metered() as inner:
            meter.count(0, 100_000)
    meter.count(7, 7)
    assert (outer.prompt_tokens, outer.reply_tokens, outer.cost) == (1_000_000, 0, 2.0)
    assert (inner.prompt_tokens, inner.reply_tokens, inner.cost) == (0, 100_000, 1.0)


def test_an_engine_that_fails_is_a_failed_rollout_and_a_mistake_ends_all(tmp_path: Path) -> None:
    def script(task: Task) -> str:
        if task.id == "aime24-1":
            raise EngineError("no reply")
        return right(task)

    log = run(tmp_path, FakeFlow(script))
    assert [
        (entry.error, entry.reward) for key, entry in log.entries.items() if key.pid == "1"
    ] == [("planner: no reply", None)]
    expected = {"0": 1.0, "1": None, "2": 1.0}
    assert {key.pid: entry.reward for key, entry in log.entries.items()} == expected

    def refused(task: Task) -> str:
        raise UserError("engines.gpt: a wrong key")

    with pytest.raises(UserError, match=r"engines\.gpt: a wrong key"):
        run(tmp_path, FakeFlow(refused))


def test_the_judge_is_asked_behind_the_rule_and_said_to_have_decided(tmp_path: Path) -> None:
    chat = Chat("Verdict: True")
    judge = Judge(chat, JudgeCache(tmp_path / "cache.sqlite"), JudgeOptions())
    log = run(
        tmp_path, FakeFlow(lambda task: right(task) if task.id == "aime24-0" else "seven"), judge
    )
    found = {key.pid: (entry.reward, entry.scored_by) for key, entry in log.entries.items()}
    assert found == {"0": (1.0, "math"), "1": (1.0, "judge"), "2": (1.0, "judge")}
    assert len(chat.asked) == 2
    (tmp_path / "again").mkdir()
    run(tmp_path / "again", FakeFlow(lambda task: "seven"), judge)
    assert len(chat.asked) == 3, "what it has judged is in its cache"


def test_a_short_answer_has_its_exact_match_and_f1(tmp_path: Path) -> None:
    answers = {"0": "Oslo", "1": "Oslo, Norway", "2": "I don't know"}
    tasks = [Task(f"nq-{pid}", f"{pid}?", ("Oslo",), "nq", 0, "qa") for pid in answers]
    log = log_of(tmp_path)
    put(FakeFlow(lambda task: answers[task.id.removeprefix("nq-")]), log, {"nq": tasks})
    assert {key.pid: entry.metrics for key, entry in log.entries.items()} == {
        "0": {"em": 1.0, "f1": 1.0},
        "1": {"em": 0.0, "f1": pytest.approx(2 / 3)},
        "2": {"em": 0.0, "f1": 0.0},
    }
    (tmp_path / "numbers").mkdir()
    numbers = run(tmp_path / "numbers", FakeFlow(right)).entries.values()
    assert {tuple(entry.metrics) for entry in numbers} == {()}, "no short answers"


# ---- the log

SUM = Task("7", "What is 1 plus 1?", ("2",))


def trajectory(answer: str = "2", reward: float | None = 1.0, error: str = "") -> Trajectory:
    said = call((8, 9), (5, 6, 7), (-0.5, -0.25), text="text")
    action, found = Action("", "", "1 + 1", "Python_Coder"), ToolResult("2")
    turn = make.turn(said, action, found, '{"code": "1"}', verdict=Verdict.STOP, seconds=0.5)
    fields = {"reward": reward, "scored_by": "exact", "error": error, "seconds": 1.5, "seed": 42}
    return make.rollout(turn, task=SUM, answer=answer, **fields)


def append(
    log: EvaluationLog, benchmark: str = "aime24", trial: int = 1, **changes: object
) -> None:
    key = Key("policy", 10, benchmark, "7", trial)
    question = Question(key, 3, FakeFlow(right), SUM, 42)  # type: ignore[arg-type]
    log.append(question, trajectory(**changes), Usage(70, 5, 0.5))  # type: ignore[arg-type]


def test_a_line_holds_all_there_is_to_know(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    append(log)
    (line,) = map(json.loads, log.path.read_text().splitlines())
    expected = ("aime24", "7", 1, 1, 3)
    keys = "benchmark", "pid", "trial", "step", "group_index"
    assert tuple(line[key] for key in keys) == expected
    expected = ("What is 1 plus 1?", ["2"], "2", 1.0)
    assert (line["question"], line["answers"], line["answer"], line["reward"]) == expected
    expected = ("exact", 42, 1.5, "")
    assert (line["scored_by"], line["seed"], line["seconds"], line["error"]) == expected
    assert (line["planner"], line["max_turns"], line["metrics"]) == (
        "policy",
        10,
        {"em": 1.0, "f1": 1.0},
    )
    assert line["usage"] == {"prompt_tokens": 70, "reply_tokens": 5, "cost": 0.5}
    (turn,) = line["turns"]
    (used,) = turn["tool_calls"]
    assert (turn["prompt_ids"], turn["response_text"]) == ([5, 6, 7], "text")
    assert (used["name"], used["arguments"], used["result"]) == (
        *("Python_Coder", '{"code": "1"}'),
        "2",
    )
    assert (turn["verdict"], turn["num_prompt_tokens"]) == ("STOP", 3)
    assert (turn["response_ids"], turn["seconds"]) == ([8, 9], 0.5)


def done(log: EvaluationLog) -> set[tuple[str, int]]:
    return {(key.benchmark, key.trial) for key in log.entries if log.is_done(key)}


def test_what_is_read_back_is_what_was_appended(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    for trial in (1, 2):
        append(log, trial=trial)
    append(log, "amc23", reward=0.0)
    for each in (log, log_of(tmp_path)):
        assert done(each) == {("aime24", 1), ("aime24", 2), ("amc23", 1)}, "the same pid twice"
        assert [entry.reward for entry in each.entries.values()] == [1.0, 1.0, 0.0]
        assert each.state() == "reward 0.667, 210 + 15 tokens, cost 1.5000"
        assert each.entries == log.entries
    assert log.entries[Key("policy", 10, "aime24", "7", 1)].counts["turns"] == 1


def test_a_failed_rollout_is_not_done_and_the_last_line_counts(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    append(log, reward=None, error="generator: no answer")
    for each in (log, log_of(tmp_path)):
        assert not done(each) and each.failures == ["generator: no answer"]
        assert each.state() == "reward 0.000, 1 failed, 70 + 5 tokens, cost 0.5000"
    append(log)
    for each in (log, log_of(tmp_path)):
        assert done(each) == {("aime24", 1)} and each.failures == []
        assert each.state() == "reward 1.000, 140 + 10 tokens, cost 1.0000"


def test_lines_without_counts_are_refused(tmp_path: Path) -> None:
    """Else the table would count rollouts without turns."""
    log = log_of(tmp_path)
    append(log)
    record = json.loads(log.path.read_text())
    del record["counts"]
    log.path.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match="lines without counts, so it cannot be continued: choose"):
        log_of(tmp_path)


@pytest.mark.parametrize("num_bytes", [1, 40, -1])
def test_a_torn_last_line_is_dropped_and_the_next_one_is_whole(
    tmp_path: Path, num_bytes: int
) -> None:
    log = log_of(tmp_path)
    append(log, trial=1)
    whole = log.path.read_bytes()
    append(log, trial=2)
    log.path.write_bytes(whole + log.path.read_bytes()[len(whole) :][:num_bytes])
    again = log_of(tmp_path)
    # Without its newline alone the second line is all there.
    trials = (1, 2) if num_bytes == -1 else (1,)
    assert done(again) == {("aime24", trial) for trial in trials}
    again.repair()
    append(again, trial=3)
    assert done(log_of(tmp_path)) == done(again)
    assert [json.loads(line)["trial"] for line in log.path.read_text().splitlines()][-1] == 3


# ---- pins


def pins(words: list[str]) -> dict[str, Any]:
    return pinned(parse(words), _DECIDING, _NOT_DECIDING)  # type: ignore[arg-type]


def test_the_same_config_is_the_same_and_folders_do_not_matter() -> None:
    one, two = (
        pins(["--run.dir", run, "--rollout.max_in_flight", number])
        for run, number in (("a", "1"), ("b", "2"))
    )
    check_same(Path("x"), one, two)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("agent.prompt", "compact", 'agent.prompt was "full", is "compact"'),
        ("model.path", "other", 'model.path was "tiny", is "other"'),
        ("roles.judge", "gpt", 'roles.judge was "none", is "gpt"'),
        ("engines.gpt.model", "x", 'engines.gpt.model was absent, is "x"'),
        ("judge.mode", "judge-only", 'judge.mode was "rules-first", is "judge-only"'),
        ("rollout.max_new_tokens", "9", "rollout.max_new_tokens was 2048, is 9"),
    ],
)
def test_what_differs_is_named(option: str, value: str, said: str) -> None:
    begun, now = pins([]), pins([f"--{option}", value])
    with pytest.raises(UserError, match="runs/x was started with other settings") as error:
        check_same(Path("runs/x"), begun, now)
    assert said in str(error.value) or (
        "engines.gpt" in str(error.value) and option.startswith("engines")
    )


def test_of_many_differences_three_are_named() -> None:
    told = r"a was 1, is 2; b was 1, is 2; c\.x was 1, is absent; restore them or choose"
    with pytest.raises(UserError, match=told):
        check_same(
            Path("x"),
            {"a": 1, "b": 1, "c": {"x": 1}},
            {"a": 2, "b": 2, "d": {"y": 1}, "e": None, "f": 0},
        )


# ---- a frozen planner


def test_a_chat_engine_plans_from_the_question_and_the_memory() -> None:
    echo = Chat("Justification: j\nContext: c\nSub-Goal: area of Chad\nTool Name: search")
    planner = ModelPlanner(ChatVoice(echo, 7.0), FullPrompt([]), ("Search",))
    memory = Memory((MemoryEntry("Search", "area of Mali", "x", "The area of Mali is 1240."),))
    plan = asyncio.run(planner.plan(TASKS[0], memory, 1, 5, 100.0))
    assert (
        plan.action == Action("j", "c", "area of Chad", "Search") and plan.call.text == echo.reply
    )
    ((prompt, seed, deadline_s),) = echo.asked
    assert plan.call.prompt_text == prompt
    assert TASKS[0].question in prompt
    assert "The area of Mali is 1240." in prompt
    assert deadline_s == 7.0 and (plan.call.prompt_ids, plan.call.response_ids) == ((), ())
    asyncio.run(planner.plan(TASKS[0], memory, 2, 5, 3.0))
    assert echo.asked[1][0] == prompt and echo.asked[1][1] != seed and echo.asked[1][2] == 3.0
    assert planner.measure(memory) > planner.measure(Memory()) >= 0
    echo.reply = "no idea"
    assert asyncio.run(planner.plan(TASKS[0], memory, 1, 5, 100.0)).action is None
