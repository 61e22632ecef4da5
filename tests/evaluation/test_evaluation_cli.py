"""`python -m flowtrain.evaluation` as a person runs it, against a real server on loopback that
plays the frozen planner and generator.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_servers import ChatServer, Gate, chat_server
from cli_runs import Server, read, timeless
from starlette.responses import JSONResponse
from toy_options import FLOW

from flowtrain.records import Task
from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.facts import facts_tasks
from flowtrain.trainer.distributed import World
from flowtrain.utils.lock import Lock
from flowtrain.weights import Publisher, PublishOptions, WeightStore

pytest_plugins = ("cli_runs",)

NUM_ROWS, NUM_TRIALS = 6, 2
NUM_ROLLOUTS = 2 * NUM_ROWS * NUM_TRIALS


@pytest.fixture(scope="module")
def lookups() -> list[Task]:
    """Questions that one search in the shipped corpus answers."""
    tasks = facts_tasks(load_corpus(), "texts", 200, seed=0)
    return [task for task in tasks if task.kind == "lookup"][: 2 * NUM_ROWS]


@pytest.fixture(scope="module")
def data(lookups: list[Task], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two benchmarks with the same pids, in AgentFlow's form."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, tasks in (("bamboogle", lookups[:NUM_ROWS]), ("hotpotqa", lookups[NUM_ROWS:])):
        rows = [
            {"pid": str(pid), "query": task.question, "answer": list(task.answers), "image": None}
            for pid, task in enumerate(tasks)
        ]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


def scores(path: Path) -> dict[str, Any]:
    """The scores of an evaluation of one system, by benchmark."""
    found = json.loads((path / "summary.json").read_text())["scores"]
    return {score["benchmark"]: score for score in found}


class Script:
    """A planner that looks the right thing up, but guesses where the question's number is odd; a
    generator that repeats the result.
    """

    def __init__(self, lookups: list[Task]) -> None:
        self.steps = {
            task.question: (task.plan[0].sub_goal, number % 3)
            for number, task in enumerate(lookups)
        }
        self.refused: set[str] = set()
        """Questions that get HTTP 400."""

    def __call__(self, body: dict[str, Any]) -> Any:
        prompt = body["messages"][0]["content"]
        question = re.search(r"^Question: (.*)$", prompt, re.MULTILINE)[1]  # type: ignore[index]
        if question in self.refused:
            return JSONResponse({"error": "no"}, 400)
        if prompt.startswith("You write the final answer"):
            value = re.findall(r'"result": "The .* is (.*?)\.?"', prompt)
            return f"1. ...\n2. <answer>{value[-1] if value else 'unknown'}</answer>"
        sub_goal, kind = self.steps[question]
        return (
            f"Justification: x\nContext: y\nSub-Goal: {sub_goal}\nTool Name: "
            f"{'Base_Generator' if kind == 1 else 'Search'}"
        )


@pytest.fixture
def script(lookups: list[Task]) -> Script:
    return Script(lookups)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def endpoint(script: Script, gate: Gate) -> Iterator[ChatServer]:
    with chat_server(script, gate) as endpoint:
        yield endpoint
        gate.open_for = float("inf")


@pytest.fixture
def words(data: Path, endpoint: ChatServer) -> tuple[str, ...]:
    return (
        *("--benchmarks", "bamboogle,hotpotqa", "--trials", str(NUM_TRIALS), "--data", str(data)),
        *("--planner", "gpt", "--engines.gpt.model", "scripted"),
        *FLOW,
        *("--engines.gpt.base_url", endpoint.base_url, "--engines.gpt.api_key_env", ""),
        *("--engines.gpt.price_in", "2", "--engines.gpt.price_out", "10"),
        *("--engines.gpt.max_retries", "0", "--roles.generator", "gpt"),
        *("--agent.tools", '["Search", "Base_Generator"]', "--rollout.max_in_flight", "4"),
        *("--run.threads", "1", "--run.device", "cpu"),
    )


def without_clock(path: Path) -> dict[tuple[str, str, int], Any]:
    return {
        (r["benchmark"], r["pid"], r["trial"]): timeless(r)
        for r in read(path / "trajectories.jsonl")
    }


# ---- a whole evaluation


def test_an_evaluation_leaves_its_records_and_numbers(
    server: Server,
    words: tuple[str, ...],
    endpoint: ChatServer,
    lookups: list[Task],
    tmp_path: Path,
) -> None:
    code, lines, out = server.run("evaluation", *words, "--out", tmp_path / "run", "--paper")
    assert code == 0, lines
    records = read(tmp_path / "run" / "trajectories.jsonl")
    keys = [(record["benchmark"], record["pid"], record["trial"]) for record in records]
    assert sorted(keys) == sorted(
        (b, str(p), t) for b in ("bamboogle", "hotpotqa") for p in range(NUM_ROWS) for t in (1, 2)
    )
    assert {record["trial"] for record in records[: 2 * NUM_ROWS - 4]} == {1}, (
        "the second trial comes after the first"
    )
    for record in records:
        number = int(record["pid"]) + NUM_ROWS * (record["benchmark"] == "hotpotqa")
        task = lookups[number]
        found = (record["question"], record["answers"], record["scored_by"])
        assert found == (task.question, list(task.answers), "qa")
        (turn,) = record["turns"]
        assert task.question in turn["prompt_text"] and turn["response_text"].startswith(
            "Justification"
        )
        if number % 3 != 1:
            assert (record["reward"], record["answer"]) == (1.0, task.answers[0])
            (used,) = turn["tool_calls"]
            assert used["name"] == "Search" and task.answers[0] in used["result"]
    summary = scores(tmp_path / "run")["bamboogle"]
    rewards = {
        t: [r["reward"] for r in records if (r["benchmark"], r["trial"]) == ("bamboogle", t)]
        for t in (1, 2)
    }
    assert summary["accuracy"]["by_trial"] == [
        pytest.approx(sum(rewards[t]) / NUM_ROWS) for t in (1, 2)
    ]
    found = (summary["num_questions"], summary["num_failed"], summary["stats"]["turns_mean"])
    assert found == (NUM_ROWS, 0, 1.0)
    expected = {"Search": pytest.approx(2 / 3), "Base_Generator": pytest.approx(1 / 3)}
    assert summary["stats"]["tool_shares"] == expected
    # Two requests per rollout; the server counts words as tokens.
    assert len(endpoint.asked) == 2 * NUM_ROLLOUTS
    usage = [record["usage"] for record in records]
    prompt_tokens = sum(len(prompt.split()) for prompt in endpoint.prompts)
    assert sum(each["prompt_tokens"] for each in usage) == prompt_tokens
    assert sum(each["cost"] for each in usage) == pytest.approx(
        (2 * prompt_tokens + 10 * sum(each["reply_tokens"] for each in usage)) / 1e6
    )
    assert "bamboogle" in out and "paper: 7B Flow-GRPO" in out
    assert not [path for path in tmp_path.iterdir() if path.name != "run"], "nothing else is left"


def test_the_config_that_is_left_gives_the_same_records(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    assert server.run("evaluation", *words, "--out", tmp_path / "one")[0] == 0
    flags = words[: words.index("--engines.gpt.model")]
    code, lines, _ = server.run(
        *("evaluation", "--config", tmp_path / "one" / "config.toml", *flags),
        *("--out", tmp_path / "two"),
    )
    assert code == 0, lines
    assert without_clock(tmp_path / "one") == without_clock(tmp_path / "two")
    one, two = (
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")
    )
    assert one["evaluation"] == two["evaluation"] and one["versions"] == two["versions"]
    pins = one["evaluation"]
    assert pins["benchmarks"]["hotpotqa"]["rows"] == NUM_ROWS
    assert len(pins["benchmarks"]["hotpotqa"]["sha256"]) == 64
    assert (pins["seed"], pins["trials"]) == (0, NUM_TRIALS)
    assert (pins["planners"], pins["max_turns"]) == (["gpt"], [3])


# ---- gone on with


def test_failed_rollouts_stand_apart_and_are_asked_again(
    server: Server,
    words: tuple[str, ...],
    endpoint: ChatServer,
    script: Script,
    lookups: list[Task],
    tmp_path: Path,
) -> None:
    script.refused = {lookups[0].question}
    code, lines, _ = server.run("evaluation", *words, "--out", tmp_path / "run")
    assert code == 0
    assert any(
        "2 rollouts failed" in line and "HTTP 400" in line and "--resume" in line for line in lines
    ), lines
    summary = scores(tmp_path / "run")
    expected = (2, NUM_ROWS - 1)
    assert (summary["bamboogle"]["num_failed"], summary["bamboogle"]["num_questions"]) == expected
    failed = [record for record in read(tmp_path / "run" / "trajectories.jsonl") if record["error"]]
    assert [(record["pid"], record["reward"], record["error"][:8]) for record in failed] == [
        ("0", None, "planner:")
    ] * 2

    script.refused, num_asked = set(), len(endpoint.asked)
    code, lines, _ = server.run("evaluation", *words, "--out", tmp_path / "run", "--resume")
    assert (code, lines) == (0, []) and len(endpoint.asked) - num_asked == 2 * 2
    summary = scores(tmp_path / "run")
    expected = (0, NUM_ROWS)
    assert (summary["bamboogle"]["num_failed"], summary["bamboogle"]["num_questions"]) == expected


# ---- refused


def test_another_evaluation_is_not_gone_on_with(
    server: Server, words: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    own, log = tmp_path / "data", tmp_path / "run" / "trajectories.jsonl"
    shutil.copytree(data, own)
    words = (*words, "--data", str(own), "--rows", "1", "--out", str(tmp_path / "run"))
    assert server.run("evaluation", *words)[0] == 0
    before = log.read_bytes()
    engine = ("--engines.gpt.temperature", "0.5")
    for more, said in (
        ((), "holds an evaluation: continue it with --resume"),
        (("--resume", "--agent.eval_max_turns", "9"), "max_turns was [3], is [9]"),
        (("--resume", *engine), "config.engines.gpt.temperature was 0.0, is 0.5"),
        (("--resume", "--trials", "3"), "trials was 2, is 3"),
        (("--resume", "--run.seed", "1"), "seed was 0, is 1"),
        (("--resume",), "benchmarks.hotpotqa.sha256 was"),
    ):
        if "sha256" in said:
            rows = json.loads((own / "hotpotqa.json").read_text())
            rows[0]["query"] += " Really?"
            (own / "hotpotqa.json").write_text(json.dumps(rows))
        code, lines, _ = server.run("evaluation", *words, *more)
        assert code == 2 and len(lines) == 1 and said in lines[0], lines
        assert log.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("--benchmarks", "gaia"),
            "copy test/gaia/data/data.json of https://github.com/lupantech/AgentFlow",
        ),
        (("--benchmarks", "mmlu"), "benchmark 'mmlu' is unknown; known: bamboogle"),
        (("--benchmarks", " , "), "eval.trials=2 requires eval.benchmarks"),
        (
            ("--planner", "claude"),
            "--planner 'claude' may be 'policy' or a name in [engines], which holds gpt",
        ),
        (("--roles.executor", "policy"), "roles.executor='policy' would load the policy too"),
        (("--planner", "gpt,claude"), "--planner 'claude' may be 'policy' or a name in [engines]"),
        (("--turns", "3,0"), "--turns '3,0' must be numbers from 1, separated by commas"),
        (("--benchmarks", "mine=/nowhere.jsonl", "--paper"), "there is no such file"),
        (("--rows", "some"), "eval.rows='some': Input should be a valid integer"),
        (("--trials", "0"), "eval.trials=0: Input should be greater than 0"),
        (("--temperature", "-1"), "eval.temperature=-1"),
        (("--engines.gpt.base_url", "ftp://x"), "engines.gpt.base_url"),
    ],
)
def test_mistakes_are_named_in_one_line(
    server: Server, words: tuple[str, ...], tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    code, lines, _ = server.run("evaluation", *words, "--out", tmp_path / "run", *more)
    assert code == 2 and len(lines) == 1 and said in lines[0], lines
    assert not (tmp_path / "run").exists()


def test_without_a_folder_it_says_where_to_name_one(server: Server, tmp_path: Path) -> None:
    code, lines, _ = server.run("evaluation", "--benchmarks", "gaia")
    assert code == 2 and "needs tasks.benchmarks, the folder with gaia.json" in lines[0]


def test_a_folder_in_use_is_refused(server: Server, words: tuple[str, ...], tmp_path: Path) -> None:
    with Lock.of_folder(tmp_path / "out", "end it"):
        code, lines, _ = server.run("evaluation", *words, "--out", tmp_path / "out")
    assert code == 2 and len(lines) == 1
    assert lines[0].startswith(f"flowtrain.evaluation: {tmp_path / 'out'} is in use by ")
    assert f"process {os.getpid()}, since" in lines[0] and lines[0].endswith("another --out")


def test_it_is_one_process(server: Server, words: tuple[str, ...], tmp_path: Path) -> None:
    code, lines, _ = server.run(
        "evaluation",
        *words,
        "--out",
        tmp_path / "run",
        before="import os; os.environ['WORLD_SIZE'] = '2'",
    )
    assert code == 2 and "start it without torchrun" in lines[0]


# ---- with the policy


def test_the_policy_plans_and_two_runs_are_the_same(
    server: Server, warm: Path, data: Path, tmp_path: Path
) -> None:
    words = (
        *("--config", warm / "config.toml", "--model.path", warm / "model", "--data", data),
        *("--benchmarks", "bamboogle", "--trials", "2", "--temperature", "0", "--rows", "3"),
    )
    left = WeightStore(tmp_path / ".one.weights")  # by a process that was killed
    Publisher(left, PublishOptions(torch.float32), World(0, 1, torch.device("cpu"))).publish(
        {"x": torch.ones(4)}, 0
    )
    assert server.run("evaluation", *words, "--out", tmp_path / "one")[0] == 0
    code, lines, _ = server.run("evaluation", *words, "--out", tmp_path / "two")
    assert code == 0, lines
    assert without_clock(tmp_path / "one") == without_clock(tmp_path / "two")
    records = read(tmp_path / "two" / "trajectories.jsonl")
    assert len(records) == 6 and all(record["turns"][0]["prompt_ids"] for record in records)
    by_trial = [
        [(r["pid"], r["answer"]) for r in records if r["trial"] == trial] for trial in (1, 2)
    ]
    assert sorted(by_trial[0]) == sorted(by_trial[1]), "greedy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"], "no weights stay"
    assert (tmp_path / "two" / "tokenizer.json").read_text() == (
        tmp_path / "one" / "tokenizer.json"
    ).read_text()
    path = tmp_path / "two" / "manifest.json"
    written = json.loads(path.read_text())
    assert re.fullmatch("[0-9a-f]{32}", written["evaluation"]["weights"])
    written["evaluation"]["weights"] = "0" * 32
    path.write_text(json.dumps(written))
    code, lines, _ = server.run("evaluation", *words, "--out", tmp_path / "two", "--resume")
    assert code == 2 and len(lines) == 1 and "weights was" in lines[0]
