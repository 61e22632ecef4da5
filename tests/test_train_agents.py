"""Training runs of other agents than AgentFlow's, as a person starts them: the agent that calls
tools, a program behind the gateway, an agent of one's own, and the agent of one turn.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_runs import RFT, SMALL, TINY, Server, read

pytest_plugins = ("cli_runs",)
ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("--config", ROOT / "configs" / "tools.toml", *TINY)
GATEWAY = (
    *("--config", ROOT / "configs" / "gateway.toml", *TINY),
    *("--tasks.name", "facts", "--tasks.path", ""),
    *("--gateway.function", "examples/gateway/plain.py:solve"),
)
TWO_STEPS = ("--train.num_steps", "2")
RELEASED = (*TWO_STEPS, "--algorithm.mode", "released")
"""Groups of one reward are kept, because a tiny model is seldom right."""


@pytest.fixture(scope="module")
def caller(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt to call tools."""
    warm = tmp_path_factory.mktemp("caller") / "warm"
    code, lines, _ = server.run("rft", *TOOLS, *RFT, "--run.dir", warm)
    assert code == 0, lines
    return warm / "model"


@pytest.fixture
def agent_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Options of a run whose agent has no tools of AgentFlow's."""
    own = words[len(SMALL) :]
    at = own.index("--agent.tools")
    return (*TINY, *own[:at], *own[at + 2 :], *TWO_STEPS)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The two steps, which train what the sampler said."""
    steps = [line for line in read(run / "metrics.jsonl") if line["step"] > 0]
    assert [line["version"] for line in steps] == [1, 2]
    assert all(line["num_tokens"] > 0 and line["logprob_mismatch"] < 1e-4 for line in steps)
    return steps


def check_prompts_grow(run: Path) -> int:
    """Check that each prompt begins with the last one and what was sampled; count tool calls."""
    num_calls = 0
    for rollout in read(run / "trajectories.jsonl"):
        for before, turn in pairwise(rollout["turns"]):
            num_calls += len(before.get("tool_calls", ()))
            # Of the prompt those ids are logged that the one before has not.
            assert turn["prompt_shared"] == before["num_prompt_tokens"]
            sampled = before["response_ids"]
            assert turn["prompt_ids"][: len(sampled)] == sampled
    return num_calls


def test_the_agent_that_calls_tools_trains_on_the_ids_that_were_sampled(
    server: Server, caller: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = (*TOOLS, *RELEASED, "--model.path", caller, "--run.dir", run)
    code, lines, _ = server.run("train", *argv)
    assert code == 0, lines
    assert all(0 < line["tool_share/Search"] < 1 for line in steps_of(run))
    assert check_prompts_grow(run) > 10


def test_a_program_behind_the_gateway_trains_on_the_ids_that_were_sampled(
    server: Server, caller: Path, tmp_path: Path
) -> None:
    """A client of OpenAI's asks, calls tools of its own, and is trained in place."""
    run = tmp_path / "run"
    argv = (*GATEWAY, *RELEASED, "--model.path", caller, "--run.dir", run)
    code, lines, _ = server.run("train", *argv, cwd=ROOT)
    assert code == 0, lines
    assert all(line["failed_rollouts"] == 0 for line in steps_of(run))
    assert check_prompts_grow(run) > 10


def test_an_agent_of_ones_own_trains_and_branches(
    server: Server, agent_words: tuple[str, ...], tmp_path: Path
) -> None:
    """What was sampled stays in its prompts, a branch shares it, and the trainer agrees with it."""
    run = tmp_path / "run"
    (tmp_path / "by_length.py").write_text(
        "def score(task, answer, trajectory):\n    return len(answer) % 2"
    )
    mine = ("--agent.name", f"{ROOT}/examples/my_agent.py:MyAgent", "--agent.max_turns", "2")
    appo = ("--algorithm.name", "appo", "--appo.num_roots", "2", "--appo.spacing", "1")
    reward = ("--reward.function", f"{tmp_path}/by_length.py:score", "--model.path", "tiny")
    code, lines, _ = server.run("train", *agent_words, *mine, *appo, *reward, "--run.dir", run)
    assert code == 0, lines
    assert all(line["turns_mean"] == 2.0 for line in steps_of(run))
    assert any("branch" in rollout for rollout in read(run / "trajectories.jsonl"))
    check_prompts_grow(run)


def test_the_agent_of_one_turn_trains(
    server: Server, agent_words: tuple[str, ...], tmp_path: Path
) -> None:
    """It rolls out, trains with the sampler's log-probs, publishes and evaluates; no tool runs."""
    run = tmp_path / "run"
    single = ("--agent.name", "single", "--agent.prompt", "compact", "--agent.instructions", "Go.")
    code, lines, _ = server.run("train", *agent_words, *single, *RELEASED, "--run.dir", run)
    assert code == 0, lines
    for line in steps_of(run):
        assert line["turns_mean"] == 1.0 and line["malformed_share"] == 0.0
        assert not [name for name in line if name.startswith("tool_share")]
    tokenizer = json.loads((run / "tokenizer.json").read_text())
    assert tokenizer["model"]["type"] == "BPE"
    for rollout in read(run / "trajectories.jsonl"):
        (turn,) = rollout["turns"]
        assert turn["action"] is None and not turn["is_error"]
        assert rollout["answer"] == turn["response_text"].strip()
        assert turn["prompt_ids"] and turn["response_ids"]
    told = re.findall("nothing to learn from in step ([0-9]+)", "\n".join(lines))
    summary = json.loads((run / "summary.json").read_text())
    assert told and summary["idle_steps"] == list(map(int, told))
    assert summary["last_cause"].startswith("all 32 rewards are 0")
