"""Training runs with rewards that a user has written, as a person starts them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from cli_runs import Run, Server, alike, read, rows

pytest_plugins = ("cli_runs",)

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_reward.py"
QUICK = ("--checkpoint.every", "1", "--eval.at_ends", "false", "--reward.timeout_s", "300")
MINE = """
import asyncio, threading

def score(task, answer, trajectory):
    assert task.extra["tests"] == [str(task.extra["number"])] and not task.answers
    match task.extra["number"] % 4:
        case 0:
            raise ValueError("no such number")
        case 1:
            threading.Event().wait()
    return {"size": task.extra["number"] / 100, "half": (trajectory.seed % 2) / 2, "never": 0}

async def later(task, answer, trajectory):
    await asyncio.sleep(0)
    return trajectory.seed % 3 / 10
"""


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    return written(
        tmp_path / "gsm8k.jsonl",
        [
            {"question": f"What is {n} plus {n % 7}?", "answer": f"{n} + {n % 7} #### {n + n % 7}"}
            for n in range(40)
        ],
    )


@pytest.fixture
def unanswered(tmp_path: Path) -> Path:
    """Rows that only a function can score."""
    rows = [{"question": f"Name {n}.", "number": n, "tests": [str(n)]} for n in range(40)]
    return written(tmp_path / "unanswered.jsonl", rows)


def written(path: Path, tasks: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def test_the_example_trains_and_its_run_can_be_resumed(
    gsm8k: Path, run: Run, server: Server, words: tuple[str, ...]
) -> None:
    command = (*QUICK, "--tasks.path", gsm8k, "--reward.low", "-0.2")
    command += ("--reward.function", f"{EXAMPLE}:score")
    whole = run("whole", *command, "--train.num_steps", 3)
    found = whole.rollouts
    assert not whole.lines
    for each in found:
        parts = each["reward_parts"]
        assert each["reward"] == pytest.approx(parts["closeness"] + parts["length"])
        assert each["scored_by"] == f"{EXAMPLE}:score"
    assert len({each["reward"] for each in found}) > 3
    for line in whole.steps:
        mine = [each for each in found if each["step"] == line["step"]]
        assert line["reward_mean"] == pytest.approx(fmean(each["reward"] for each in mine))
        for part_name in ("closeness", "length"):
            mean = fmean(each["reward_parts"][part_name] for each in mine)
            assert line[f"reward/{part_name}"] == pytest.approx(mean)
        assert {line[f"reward_failures/{why}"] for why in ("exception", "timeout", "value")} == {0}
    assert any(line["num_optim_steps"] > 0 for line in whole.steps)

    part = run("part", *command, "--train.num_steps", 1)
    assert not part.lines
    server.resume(part.path, *words, *command, "--train.num_steps", 3)
    for name in ("trajectories.jsonl", "metrics.jsonl"):
        ours, theirs = rows(part.path, name), rows(whole.path, name)
        assert len(ours) == len(theirs) > 0 and all(map(alike, ours, theirs)), name


def test_functions_that_fail_fail_their_rollouts_alone(
    unanswered: Path, run: Run, tmp_path: Path
) -> None:
    """A plain function that raises or hangs for some tasks, and an async one beside it."""
    (tmp_path / "mine.py").write_text(MINE)
    functions = '{"mine.py:score" = 1.0, "mine.py:later" = 0.5}'
    command = ("--reward.function", functions, "--reward.timeout_s", 2, "--train.num_steps", 2)
    ran = run("run", *QUICK, "--tasks.path", unanswered, *command, cwd=tmp_path)
    assert ran.out.count(", a part of the reward, was 0 in every step") == 1
    assert "'never', a part of the reward" in ran.out
    found = ran.rollouts
    names = "mine.py:score + mine.py:later"
    whys = {
        "exception": "mine.py:score: ValueError: no such number (mine.py, line ",
        "timeout": "mine.py:score: no reward within 2 s",
    }
    seen = set()
    for each in found:
        kind = int(each["question"][5:-1]) % 4
        seen.add(kind)
        if kind < 2:
            # A machine that stands still for 2 s makes a timeout of everything.
            why = "exception" if each["scored_by"].endswith(": exception") else "timeout"
            assert each["reward"] is None and each["scored_by"] == f"{names}: {why}"
            assert kind == 0 or why == "timeout"
            assert whys[why] in each["error"] and "reward_parts" not in each
        elif not each["error"]:
            parts = each["reward_parts"]
            assert set(parts) == {"size", "half", "later", "never"} and each["scored_by"] == names
            result = each["reward"]
            assert result == pytest.approx(parts["size"] + parts["half"] + 0.5 * parts["later"])
    assert seen > {0, 1}
    for line in ran.steps:
        mine = [each for each in found if each["step"] == line["step"]]
        for why in ("exception", "timeout", "value"):
            number = sum(each["scored_by"].endswith(f": {why}") for each in mine)
            assert line[f"reward_failures/{why}"] == number
        assert line["failed_rollouts"] == sum(bool(each["error"]) for each in mine) > 0
    told = [line for line in ran.lines if "the rollout fails" in line]
    assert len(told) == 2 and all("mine.py:score" in line for line in told), ran.lines


def test_functions_that_always_fail_end_the_run_with_their_name(
    unanswered: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(task, answer, trajectory):\n    return 'good'\n")
    command = (*QUICK, "--tasks.path", unanswered, "--reward.function", "mine.py:score")
    last = run("run", *command, cwd=tmp_path, code=2).lines[-1]
    assert "all 32 rollouts failed; the first failed because of" in last
    assert "mine.py:score: it returned 'good', not a number" in last


def test_evaluations_score_by_the_function(gsm8k: Path, run: Run) -> None:
    command = ("--reward.function", f"{EXAMPLE}:score", "--reward.low", "-0.2")
    ran = run("run", "--tasks.path", gsm8k, "--train.num_steps", 0, *command)
    held_out = read(ran.path / "held_out.jsonl")
    rewards = [each["reward"] for each in held_out]
    assert rewards == [pytest.approx(sum(each["reward_parts"].values())) for each in held_out] != []
    assert ran.json("summary.json")["warm"]["eval_reward"] == pytest.approx(fmean(rewards))


def test_equal_rewards_are_told_with_the_bounds_of_the_run(
    unanswered: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(task, answer, trajectory):\n    return -1\n")
    command = (*QUICK, "--tasks.path", unanswered, "--train.max_idle_steps", 1)
    command += ("--reward.function", "mine.py:score", "--reward.high", 2)
    for low, told in ((-1, "all 32 rewards are -1"), (-2, "all 32 rewards are -1")):
        ran = run(f"run{low}", *command, "--reward.low", low, cwd=tmp_path, code=2)
        assert told in ran.lines[-1], ran.lines


def test_rft_keeps_what_has_the_greatest_reward(unanswered: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(task, answer, trajectory):\n    return 2.0 * (task.extra['number'] % 2)\n"
    )
    command = ("--reward.function", "mine.py:score", "--rft.expert", "policy", "--reward.high", 2)
    command += ("--rft.num_rollouts", 12, "--rft.num_steps", 1, "--rft.batch_size", 2)
    out = run("run", "--tasks.path", unanswered, *command, module="rft", cwd=tmp_path).out
    kept = int(out.partition("kept ")[2].split()[0].rstrip(":"))
    mean = float(out.partition("mean reward ")[2].partition(",")[0])
    assert 0 < kept < 12 and mean == pytest.approx(2 * kept / 12, abs=1e-3)
