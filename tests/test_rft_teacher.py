"""Fine-tuning on the rollouts of a teacher, from the command line: a scripted endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_servers import ChatServer, chat_server, reply
from cli_runs import KILL, SMALL, Server, read
from starlette.responses import JSONResponse

from flowtrain.config.options import parse
from flowtrain.records import Task
from flowtrain.tasks.sets import task_set
from flowtrain.utils.seeds import derive_seed

pytest_plugins = ("cli_runs",)
TASKS = (*SMALL, "--tasks.kinds", '["lookup", "chain"]')
NUM_ROLLOUTS = 40


def action(sub_goal: str, tool: str = "Search") -> str:
    """A reply in a form that the lenient rules alone read."""
    return f"## Context\nnone\n\n## Sub-Goal\n{sub_goal}\n\n## Tool Name\n{tool}\n"


class Teacher:
    """Follows the plan of each task. Of some it searches for the answer itself, of some it guesses,
    and of some its first reply names no tool.
    """

    def __init__(self) -> None:
        config = parse([*map(str, TASKS)])
        self.tasks = {task.question: task for task in task_set(config).train}

    @staticmethod
    def kind(task: Task) -> str:
        manner = {0: "shortcut", 1: "guess", 2: "malformed"}.get(hash_of(task) % 6, "right")
        return "right" if manner == "shortcut" and task.num_turns > 1 else manner

    def __call__(self, body: dict[str, Any]) -> str:
        prompt = body["messages"][0]["content"]
        task = self.tasks[re.search(r"^Question: (.*)$", prompt, re.MULTILINE)[1]]
        steps = json.loads(prompt.rpartition("Steps so far:\n")[2]).values()
        done = [step for step in steps if not step["result"].startswith("Error")]
        step, kind = task.plan[min(len(done), len(task.plan) - 1)], self.kind(task)
        if kind == "malformed" and not steps:
            return "I would search for it."
        if kind == "guess":
            return action(step.sub_goal, "Base_Generator")
        return action(f"{step.sub_goal} {task.answers[0] if kind == 'shortcut' else ''}".strip())


def hash_of(task: Task) -> int:
    return int(task.id.rpartition("-")[2])


class Gate:
    """Holds every request after the first `open_for`."""

    def __init__(self) -> None:
        self.open_for, self.num_asked = math.inf, 0

    async def __call__(self) -> None:
        self.num_asked += 1
        while self.num_asked > self.open_for:
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def chat(teacher: Teacher, gate: Gate) -> Iterator[ChatServer]:
    with chat_server(teacher, gate) as chat:
        yield chat
        gate.open_for = math.inf


def engine(url: str) -> tuple[str, ...]:
    return (
        *("--rft.expert", "gpt", "--engines.gpt.model", "scripted", "--engines.gpt.base_url", url),
        *("--engines.gpt.api_key_env", "", "--engines.gpt.max_retries", "0"),
        *("--engines.gpt.price_in", "2", "--engines.gpt.price_out", "10"),
    )


def words(url: str, run: Path, *options: object) -> tuple[object, ...]:
    return (
        *(*TASKS, *engine(url), "--agent.tools", '["Search", "Base_Generator"]'),
        *("--rft.num_rollouts", NUM_ROLLOUTS, "--rft.num_epochs", "2", "--rft.batch_size", "8"),
        *("--rft.screen", "shortcuts", "--rollout.max_in_flight", "4", "--run.dir", run, *options),
    )


def seeds_of(records: list[dict[str, Any]]) -> set[int]:
    """The seeds of all requests that these rollouts have made."""
    return {
        derive_seed(record["seed"], turn) % 2**31
        for record in records
        for turn in range(len(record["turns"]))
    }


def asked_seeds(chat: ChatServer) -> list[int]:
    return [body["seed"] for body in chat.asked]


def usage_of(chat: ChatServer, teacher: Teacher) -> dict[str, float]:
    """What the server has charged: it counts words."""
    each = [reply(teacher(body), body)["usage"] for body in chat.asked]
    asked, said = (sum(u[key] for u in each) for key in ("prompt_tokens", "completion_tokens"))
    cost = pytest.approx((2 * asked + 10 * said) / 1e6)
    return {"prompt_tokens": asked, "reply_tokens": said, "cost": cost}


def facts_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "model" / "rft.json").read_text()))


def made(server: Server, chat: ChatServer, run: Path, *options: object) -> str:
    """Fine-tune to the end; returns what is printed."""
    code, lines, out = server.run("rft", *words(chat.base_url, run, *options))
    assert code == 0, lines
    return out


def test_a_teachers_traces_are_collected_screened_and_imitated(
    server: Server, chat: ChatServer, teacher: Teacher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    out = made(server, chat, run)
    records = read(run / "trajectories.jsonl")
    assert sorted(record["group_index"] for record in records) == list(range(NUM_ROLLOUTS))
    assert sorted(asked_seeds(chat)) == sorted(seeds_of(records)), "each turn was asked for once"
    kinds = [teacher.kind(teacher.tasks[record["question"]]) for record in records]
    rewarded = [k for k, record in zip(kinds, records, strict=True) if record["reward"] == 1]
    num_turns = sum(len(record["turns"]) for record in records)
    facts = facts_of(run)
    assert facts["num_rollouts"] == NUM_ROLLOUTS
    assert facts["num_rejected"] == {
        "reward": NUM_ROLLOUTS - len(rewarded),
        "answer_not_found": rewarded.count("shortcut"),
    }
    assert rewarded.count("shortcut") > 1 and rewarded.count("right") > 10
    assert facts["num_excluded"] == {"malformed": rewarded.count("malformed")} != {"malformed": 0}
    assert facts["num_kept"] == len(rewarded) - rewarded.count("shortcut")
    kept = [r for k, r in zip(kinds, records, strict=True) if r["reward"] == 1 and k != "shortcut"]
    assert facts["num_turns"] == sum(len(r["turns"]) for r in kept) - rewarded.count("malformed")
    assert facts["num_steps"] == math.ceil(2 * facts["num_turns"] / 8)
    assert facts["usage"] == usage_of(chat, teacher) and len(chat.asked) == num_turns
    assert f"kept {facts['num_kept']} (rejected: {facts['num_rejected']['reward']} reward, " in out
    assert f"cost {facts['usage']['cost']:.4f}" in out
    assert (run / "model" / "model.safetensors").exists() and (run / "tokenizer.json").exists()
    turn = kept[0]["turns"][-1]
    assert turn["response_text"].endswith("\nTool Name: Search") and "rescued" not in turn


def test_a_killed_run_asks_for_nothing_twice_and_ends_as_if_it_had_not_been(
    server: Server, chat: ChatServer, teacher: Teacher, tmp_path: Path
) -> None:
    """It is killed while it collects and again while it trains, when the teacher has gone."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    made(server, chat, whole)
    chat.asked.clear()
    append = ("flowtrain.evaluation.rollout_log", "append_lines")
    killed = KILL.format(module=append[0], path=append[1], number=15, after=True)
    code, _, _ = server.run("rft", *words(chat.base_url, run), before=killed)
    first = read(run / "trajectories.jsonl")
    assert (code, len(first)) == (-signal.SIGKILL, 15) and not (run / "model").exists()
    chat.asked.clear()
    trains = KILL.format(
        module="flowtrain.trainer.trainer", path="Trainer.step", number=5, after=True
    )
    resumed = words(chat.base_url, run, "--resume", "auto")
    code, lines, _ = server.run("rft", *resumed, before=trains)
    assert code == -signal.SIGKILL, lines
    records = read(run / "trajectories.jsonl")
    assert records[:15] == first
    assert sorted(asked_seeds(chat)) == sorted(seeds_of(records[15:]))
    assert sorted(record["group_index"] for record in records) == list(range(NUM_ROLLOUTS))
    chat.asked.clear()
    made(server, chat, run, "--resume", "auto")
    assert not chat.asked
    assert facts_of(run)["usage"]["prompt_tokens"] == facts_of(whole)["usage"]["prompt_tokens"]
    models = [each / "model" / "model.safetensors" for each in (run, whole)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_collecting_alone_needs_no_training_and_training_no_teacher(
    server: Server, chat: ChatServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    out = made(server, chat, run, "--rft.collect_only", "true")
    assert "kept " in out and not (run / "model").exists()
    shown = (run / "config.toml").read_text()
    nowhere = words("http://127.0.0.1:9/v1", run, "--resume", "auto", "--rft.num_epochs", "1")
    code, lines, _ = server.run("rft", *nowhere)
    assert code == 0 and (run / "config.toml").read_text() == shown, lines
    assert facts_of(run)["num_steps"] == math.ceil(facts_of(run)["num_turns"] / 8)


def test_an_interrupt_waits_for_the_rollouts_under_way(
    server: Server, chat: ChatServer, gate: Gate, tmp_path: Path
) -> None:
    run, gate.open_for = tmp_path / "run", 12
    process = server.start("rft", *words(chat.base_url, run))
    process.wait_for(lambda: gate.num_asked == 16)
    os.kill(process.pid, signal.SIGINT)
    process.wait_for(lambda: "interrupt again to stop at once" in process.err.read_text())
    gate.open_for = math.inf
    assert process.wait() == 130
    records = read(run / "trajectories.jsonl")
    assert 4 <= len(records) < NUM_ROLLOUTS and not (run / "model").exists()
    assert sorted(asked_seeds(chat)) == sorted(seeds_of(records)), "all that was paid for is there"
    assert f"{len(records)} of {NUM_ROLLOUTS} rollouts are in" in process.out.read_text()


def test_a_failed_rollout_is_counted_and_asked_again(
    server: Server, teacher: Teacher, tmp_path: Path
) -> None:
    run, refused = tmp_path / "run", set[int]()

    def moody(body: dict[str, Any]) -> Any:
        """Refuse every sixth request, until it has refused five."""
        if len(refused) < 5 and body["seed"] % 6 == 0:
            refused.add(body["seed"])
            return JSONResponse({"error": "no"}, 400)
        return teacher(body)

    with chat_server(moody) as chat:
        options = ("--rft.collect_only", "true")
        code, lines, out = server.run("rft", *words(chat.base_url, run, *options))
        assert code == 0 and f"(rejected: {len(refused)} failed, " in out, lines
        assert lines[-1].startswith("5 rollouts failed (planner: engines.gpt: HTTP 400")
        chat.asked.clear()
        assert " failed" not in made(server, chat, run, "--resume", "auto")
    records = read(run / "trajectories.jsonl")
    assert len(records) == NUM_ROLLOUTS + len(refused)
    assert len([r for r in records if "engines.gpt: HTTP 400" in r["error"]]) == len(refused) == 5
    assert sorted(asked_seeds(chat)) == sorted(seeds_of(records[NUM_ROLLOUTS:]))


def test_other_settings_are_refused_with_both_values(
    server: Server, chat: ChatServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--rft.collect_only", "true", "--rft.num_rollouts", "4")
    made(server, chat, run, *options)
    changed = ("--resume", "auto", "--engines.gpt.temperature", "0.7")
    code, lines, _ = server.run("rft", *words(chat.base_url, run, *changed))
    assert code == 2 and "engines.gpt.temperature was 0.0, is 0.7" in lines[-1]
    code, lines, _ = server.run("rft", *words(chat.base_url, run))
    assert code == 2 and "pass --resume auto to continue it" in lines[-1]


def test_max_tokens_leaves_out_longer_turns(
    server: Server, chat: ChatServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    made(server, chat, run)
    records = {r["group_index"]: r for r in read(run / "trajectories.jsonl")}
    lengths = [
        turn["num_prompt_tokens"] + len(turn["response_ids"])
        for r in records.values()
        if r["reward"] == 1
        for turn in r["turns"]
        if turn["action"]
    ]
    most = sorted(lengths)[len(lengths) // 2]
    limit = ("--resume", "auto", "--rft.max_tokens", most, "--rft.screen", "none")
    made(server, chat, run, *limit)
    facts = facts_of(run)
    assert facts["num_excluded"]["too_long"] == sum(length > most for length in lengths) > 0
    assert facts["num_turns"] == sum(length <= most for length in lengths)


@pytest.mark.parametrize(
    ("role", "reply"),
    [("verifier", "It is there.\nFinal Determination: STOP"), ("refiner", "It is far away.")],
)
def test_a_teacher_of_another_policy_leaves_the_planner_to_its_own(
    role: str, reply: str, server: Server, warm: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    own = (f"--roles.{role}", "own", "--train.policy", role, "--agent.num_passages", 3)
    planner = ("--policies.planner.path", warm / "model", "--rft.keep", "all")
    with chat_server(lambda body: reply) as chat:
        made(server, chat, run, *own, *planner, "--rft.screen", "none")
        num_asked = len(chat.asked)
    turns = [turn for r in read(run / "trajectories.jsonl") for turn in r["turns"]]
    assert any(turn["response_logprobs"][0] < 0 for turn in turns), "the planner was sampled"
    mine = [turn for turn in turns if role in turn]
    assert facts_of(run)["num_turns"] == num_asked == len(mine) > 0
    if role == "verifier":
        assert num_asked >= NUM_ROLLOUTS and {turn["verdict"] for turn in mine} == {"STOP"}
    else:
        assert {turn["evidence"] for turn in mine} == {reply}
