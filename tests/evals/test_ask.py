"""Rollouts of an evaluation on a scripted flow: seeds, order, failures, judges and what each
rollout used.
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

import pytest
from make import Chat, rollout

from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.planner import ModelPlanner
from flowtrain.agents.agentflow.prompts import FullPrompt
from flowtrain.agents.agentflow.voices import ChatVoice
from flowtrain.config import Judge as JudgeOptions
from flowtrain.engines.chat import Meter, metered
from flowtrain.engines.protocol import EngineError
from flowtrain.evals.ask import ask, questions
from flowtrain.evals.records import RecordLog
from flowtrain.evals.system import System
from flowtrain.metrics import ProgressLine
from flowtrain.rewards import Judge, JudgeCache
from flowtrain.types import Action, Task, Trajectory, UserError

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


def run(
    folder: Path,
    flow: FakeFlow,
    judge: Judge | None = None,
    *,
    benchmark: str = "aime24",
    num_trials: int = 1,
    **more: int,
) -> RecordLog:
    log = RecordLog(folder)
    tasks = [replace(task, id=task.id.replace("aime24", benchmark)) for task in TASKS]
    todo = questions("policy", (3,), {benchmark: tasks}, num_trials)[more.get("first", 0) :]
    system = System({3: flow}, judge)  # type: ignore[dict-item]
    ask(system, todo, log, more.get("seed", 0), 2, ProgressLine(len(todo), 0, enabled=False))
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
    assert waited[0] and len(log.done) == 3


def test_what_is_done_is_counted_as_it_ends(tmp_path: Path) -> None:
    log = run(tmp_path, FakeFlow(right))
    assert log.done is log.done, "it is not made anew for each rollout"
    assert len(log.done) == 3 and log.state() == "accuracy 100.0%"
    log.append({**read_one(log), "pid": "9", "reward": None, "error": "no reply"})
    assert len(log.done) == 3 and log.state() == "accuracy 100.0%, 1 failed"


def read_one(log: RecordLog) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(log.path.read_text().splitlines()[0])
    return record


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
        (entry.error, entry.outcome.reward)
        for entry in log.entries.values()
        if entry.key.pid == "1"
    ] == [("planner: no reply", None)]
    expected = {"0": 1.0, "1": None, "2": 1.0}
    assert {entry.key.pid: entry.outcome.reward for entry in log.entries.values()} == expected

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
    found = {
        entry.key.pid: (entry.outcome.reward, entry.scored_by) for entry in log.entries.values()
    }
    assert found == {"0": (1.0, "math"), "1": (1.0, "judge"), "2": (1.0, "judge")}
    assert len(chat.asked) == 2
    (tmp_path / "again").mkdir()
    run(tmp_path / "again", FakeFlow(lambda task: "seven"), judge)
    assert len(chat.asked) == 3, "what it has judged is in its cache"


def test_a_short_answer_has_its_exact_match_and_f1(tmp_path: Path) -> None:
    answers = {"0": "Oslo", "1": "Oslo, Norway", "2": "I don't know"}
    tasks = [Task(f"nq-{pid}", f"{pid}?", ("Oslo",), "nq", 0, "qa") for pid in answers]
    log = RecordLog(tmp_path)
    flow = FakeFlow(lambda task: answers[task.id.removeprefix("nq-")])
    system = System({3: flow}, None)  # type: ignore[dict-item]
    todo = questions("policy", (3,), {"nq": tasks}, 1)
    ask(system, todo, log, 0, 2, ProgressLine(len(todo), 0, enabled=False))
    assert {entry.key.pid: entry.metrics for entry in log.entries.values()} == {
        "0": {"em": 1.0, "f1": 1.0},
        "1": {"em": 0.0, "f1": pytest.approx(2 / 3)},
        "2": {"em": 0.0, "f1": 0.0},
    }
    (tmp_path / "numbers").mkdir()
    numbers = run(tmp_path / "numbers", FakeFlow(right)).entries.values()
    assert {tuple(entry.metrics) for entry in numbers} == {()}, "no short answers"


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
