"""Several planners with several budgets of turns in one evaluation, against a scripted endpoint."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_servers import ChatServer, Gate, chat_server
from cli_runs import Server, read, timeless
from toy_options import FLOW

from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.facts import facts_tasks

pytest_plugins = ("cli_runs",)

NUM_ROWS = 4
TURNS = (1, 3)


class Script:
    """The planner "steady" looks the right thing up, but names a tool that there is not in as many
    turns before as the question's number says; "lost" always does. The generator repeats results.
    """

    def __init__(self, sub_goals: dict[str, str]) -> None:
        self.sub_goals = sub_goals

    def __call__(self, body: dict[str, Any]) -> str:
        prompt = body["messages"][0]["content"]
        question = re.search(r"^Question: (.*)$", prompt, re.MULTILINE)[1]  # type: ignore[index]
        if prompt.startswith("You write the final answer"):
            value = re.findall(r'"result": "The .* is (.*?)\.?"', prompt)
            return f"<answer>{value[-1] if value else 'not known'}</answer>"
        number = list(self.sub_goals).index(question)
        is_lost = body["model"] == "lost" or prompt.count('"Action Step') < number
        tool = "Telescope" if is_lost else "Search"
        return (
            f"Justification: x\nContext: y\nSub-Goal: {self.sub_goals[question]}\nTool Name: {tool}"
        )


@pytest.fixture(scope="module")
def sub_goals() -> dict[str, str]:
    """Questions that one search in the shipped corpus answers, and what to search for."""
    tasks = facts_tasks(load_corpus(), "texts", 200, seed=0)
    lookups = [task for task in tasks if task.kind == "lookup"][:NUM_ROWS]
    return {task.question: task.plan[0].sub_goal for task in lookups}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def endpoint(sub_goals: dict[str, str], gate: Gate) -> Iterator[ChatServer]:
    with chat_server(Script(sub_goals), gate) as endpoint:
        yield endpoint
        gate.open_for = float("inf")


@pytest.fixture
def words(sub_goals: dict[str, str], endpoint: ChatServer, tmp_path: Path) -> tuple[str, ...]:
    tasks = facts_tasks(load_corpus(), "texts", 200, seed=0)
    answers = {task.question: list(task.answers) for task in tasks}
    rows = [{"question": question, "answer": answers[question]} for question in sub_goals]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engines = [
        word
        for name in ("steady", "lost")
        for key, value in (("model", name), ("base_url", endpoint.base_url), ("api_key_env", ""))
        for word in (f"--engines.{name}.{key}", value)
    ]
    return (
        *("--benchmarks", f"nq={path},mine={path}:qa", "--planner", "steady,lost"),
        *("--turns", ",".join(map(str, TURNS)), "--trials", "2"),
        *FLOW,
        *engines,
        *("--roles.generator", "steady", "--agent.tools", '["Search", "Base_Generator"]'),
        *("--run.threads", "1", "--run.device", "cpu", "--rollout.max_in_flight", "4"),
    )


def num_turns(planner: str, limit: int, number: int) -> int:
    return min(limit, number + 1) if planner == "steady" else limit


NUM_ROLLOUTS = 2 * 2 * 2 * NUM_ROWS * len(TURNS)
NUM_REQUESTS = sum(
    4 * (num_turns(planner, limit, number) + 1)
    for planner in ("steady", "lost")
    for limit in TURNS
    for number in range(NUM_ROWS)
)
"""Two benchmarks, two trials; a request for each turn and one for the answer."""


def without_clock(path: Path) -> dict[tuple[Any, ...], Any]:
    names = ("planner", "max_turns", "benchmark", "pid", "trial")
    return {
        tuple(record[name] for name in names): timeless(record)
        for record in read(path / "trajectories.jsonl")
    }


def test_a_sweep_has_a_row_for_each_planner_and_budget(
    server: Server, words: tuple[str, ...], endpoint: ChatServer, tmp_path: Path
) -> None:
    code, lines, out = server.run("evaluation", *words, "--out", tmp_path / "run")
    assert (code, lines) == (0, [])
    assert len(endpoint.asked) == NUM_REQUESTS
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [
        (each["planner"], each["max_turns"], each["accuracy"]["mean"], each["accuracy"]["spread"])
        for each in found["averages"]
    ] == [
        *(("steady", limit, limit / NUM_ROWS, 0.0) for limit in TURNS),
        *(("lost", limit, 0.0, 0.0) for limit in TURNS),
    ]
    assert [score["benchmark"] for score in found["scores"]] == ["nq", "mine"] * 4
    for score in found["scores"]:
        planner, limit = score["planner"], score["max_turns"]
        turns = [num_turns(planner, limit, each) for each in range(NUM_ROWS)]
        assert score["stats"]["turns_mean"] == pytest.approx(sum(turns) / NUM_ROWS)
        assert score["em"]["by_trial"] == score["accuracy"]["by_trial"]
        assert score["num_questions"] == NUM_ROWS
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    assert lines[0][:5] == ["planner", "budget", "benchmark", "questions", "mean %"]
    assert lines[5][:5] == ["steady", "3 turns", "nq", "4", "75.0"]
    assert lines[7][:5] == ["steady", "3 turns", "average", "75.0", "0.0"]
    written = (tmp_path / "run" / "summary.md").read_text()
    assert "| steady | 3 turns | nq | 4 | 75.0 | 0.0 |" in written
    pins = json.loads((tmp_path / "run" / "manifest.json").read_text())["evaluation"]
    assert (pins["planners"], pins["max_turns"]) == (["steady", "lost"], [1, 3])
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for record in read(tmp_path / "run" / "trajectories.jsonl"):
        key = tuple(record[name] for name in ("benchmark", "pid", "trial"))
        seeds.setdefault(key, set()).add(record["seed"])
    assert {len(each) for each in seeds.values()} == {1}, "all planners and budgets share them"
    assert len(set().union(*seeds.values())) == len(seeds)

    code, lines, again = server.run("evaluation", *words, "--out", tmp_path / "run", "--resume")
    assert (code, lines, again) == (0, [], out) and len(endpoint.asked) == NUM_REQUESTS


def test_a_sweep_that_was_cut_short_asks_nothing_twice(
    server: Server, words: tuple[str, ...], endpoint: ChatServer, gate: Gate, tmp_path: Path
) -> None:
    """By SIGTERM, while the second planner is asked; tests/test_rft_teacher.py kills a process with
    such a log.
    """
    log = tmp_path / "run" / "trajectories.jsonl"
    gate.open_for = NUM_REQUESTS - 30
    process = server.start("evaluation", *words, "--out", tmp_path / "run")
    process.wait_for(lambda: gate.num_held == 4)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 130
    said = r"stopped; continue with: python -m flowtrain.evaluation --benchmarks .* --resume"
    assert re.search(said, process.err.read_text())
    finished = read(log)
    assert 0 < len(finished) < NUM_ROLLOUTS
    assert {record["planner"] for record in finished} == {"steady", "lost"}
    with log.open("a") as file:
        file.write('{"step": 1, "benchmark": "mi')  # as a write that a kill has cut
    before = len(endpoint.asked)
    gate.open_for = float("inf")

    code, lines, out = server.run("evaluation", *words, "--out", tmp_path / "run", "--resume")
    assert code == 0, lines
    records = read(log)
    assert records[: len(finished)] == finished and len(records) == NUM_ROLLOUTS
    left = records[len(finished) :]
    assert len(endpoint.asked) - before == sum(len(record["turns"]) + 1 for record in left)
    code, _, whole = server.run("evaluation", *words, "--out", tmp_path / "whole")
    assert code == 0 and without_clock(tmp_path / "run") == without_clock(tmp_path / "whole")
    assert out.splitlines()[:14] == whole.splitlines()[:14]


def test_what_is_refused(
    server: Server, words: tuple[str, ...], endpoint: ChatServer, tmp_path: Path
) -> None:
    words = (*words, "--rows", "1", "--trials", "1")
    assert server.run("evaluation", *words, "--out", tmp_path / "one")[0] == 0
    num_asked = len(endpoint.asked)
    for more, said in (
        (("--paper",), "--paper: AgentFlow's paper has none of nq, mine; it has bamboogle"),
        (("--resume", "--turns", "1,2"), "max_turns was [1, 3], is [1, 2]"),
        (("--resume", "--planner", "lost,steady"), 'planners was ["steady", "lost"], is ["lost"'),
    ):
        code, lines, _ = server.run("evaluation", *words, "--out", tmp_path / "one", *more)
        assert code == 2 and len(lines) == 1 and said in lines[0], lines
    assert len(endpoint.asked) == num_asked
