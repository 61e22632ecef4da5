"""Training runs of other agents than AgentFlow's, as a person starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import RFT, SMALL, TINY, Ran, Run, Server
from run_checks import check_prompts_grow, steps_of

pytest_plugins = ("cli_runs",)

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("--config", str(ROOT / "configs" / "tools.toml"), *TINY)
GATEWAY = (
    *("--config", str(ROOT / "configs" / "gateway.toml"), *TINY),
    *("--tasks.name", "facts", "--tasks.path", ""),
    *("--gateway.function", "examples/gateway/plain.py:solve"),
)
TWO_STEPS = ("--train.num_steps", "2")
RELEASED = (*TWO_STEPS, "--algorithm.mode", "released", "--algorithm.equal_groups", "keep")
"""Groups of one reward are kept, because a tiny model is seldom right."""


@pytest.fixture(scope="module")
def caller(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt to call tools."""
    folder = tmp_path_factory.mktemp("caller")
    shown, warm = folder / "shown.jsonl", folder / "warm"
    words = [sys.executable, "-m", "examples.tool_calls", str(shown), "300"]
    subprocess.run(words, cwd=ROOT, check=True)
    imitated = (*TOOLS, *RFT, "--rft.conversations", shown)
    code, lines, _ = server.run("rft", *imitated, "--run.dir", warm)
    assert code == 0, lines
    return warm / "model"


@pytest.fixture
def agent_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Options of a run whose agent has no tools of AgentFlow's."""
    own = words[len(SMALL) :]
    at = own.index("--agent.tools")
    return (*TINY, *own[:at], *own[at + 2 :], *TWO_STEPS)


def two_steps(ran: Ran) -> list[dict[str, Any]]:
    steps = steps_of(ran.path)
    assert len(steps) == 2 and all(step["num_tokens"] > 0 for step in steps)
    return steps


def test_the_agent_that_calls_tools_trains_on_the_ids_that_were_sampled(
    run: Run, caller: Path
) -> None:
    ran = run("run", *RELEASED, "--model.path", caller, base=TOOLS)
    assert all(0 < line["tool_share/Search"] < 1 for line in two_steps(ran))
    assert check_prompts_grow(ran.path) > 10


def test_a_history_that_is_rendered_anew_loses_no_token(run: Run, caller: Path) -> None:
    deployed = ("--agent.history", "as_deployed", "--model.path", caller)
    ran = run("run", *RELEASED, *deployed, base=TOOLS)
    for line in two_steps(ran):
        assert line["tokens/sampled"] == line["tokens/to/trained"] and "tokens/to/lost" not in line
        assert line["num_rewritten_tokens"] > 0


def test_a_program_behind_the_gateway_trains_on_the_ids_that_were_sampled(
    run: Run, caller: Path
) -> None:
    """A client of OpenAI's asks, calls tools of its own, and is trained in place."""
    ran = run("run", *RELEASED, "--model.path", caller, base=GATEWAY, cwd=ROOT)
    assert all(line["failed_rollouts"] == 0 for line in two_steps(ran))
    assert check_prompts_grow(ran.path) > 10


def test_an_agent_of_ones_own_trains_and_branches(
    run: Run, agent_words: tuple[str, ...], tmp_path: Path
) -> None:
    """What was sampled stays in its prompts, a branch shares it, and the trainer agrees with it."""
    by_length = tmp_path / "by_length.py"
    by_length.write_text("def score(task, answer, trajectory):\n    return len(answer) % 2")
    mine = ("--agent.name", f"{ROOT}/examples/my_agent.py:MyAgent", "--agent.max_turns", "2")
    appo = ("--algorithm.name", "appo", "--appo.num_roots", "2", "--appo.spacing", "1")
    reward = ("--reward.function", f"{by_length}:score", "--model.path", "tiny")
    ran = run("run", *mine, *appo, *reward, base=agent_words)
    assert all(line["turns_mean"] == 2.0 for line in two_steps(ran))
    assert any("branch" in rollout for rollout in ran.rollouts)
    check_prompts_grow(ran.path)


def test_the_agent_of_one_turn_trains(run: Run, agent_words: tuple[str, ...]) -> None:
    """It rolls out, trains with the sampler's log-probs, publishes and evaluates; no tool runs."""
    single = ("--agent.name", "single", "--agent.prompt", "compact", "--agent.instructions", "Go.")
    ran = run("run", *single, *RELEASED, base=agent_words)
    for line in two_steps(ran):
        assert line["turns_mean"] == 1.0 and line["malformed_share"] == 0.0
        assert not [name for name in line if name.startswith("tool_share")]
    assert ran.json("tokenizer.json")["model"]["type"] == "BPE"
    for rollout in ran.rollouts:
        (turn,) = rollout["turns"]
        assert turn["action"] is None and not turn["problem"]
        assert rollout["answer"] == turn["response_text"].strip()
        assert turn["prompt_ids"] and turn["response_ids"]
    told = re.findall("nothing to learn from in step ([0-9]+)", "\n".join(ran.lines))
    summary = ran.json("summary.json")
    assert told and summary["idle_steps"] == list(map(int, told))
    assert summary["last_cause"].startswith("all 32 rewards are 0")
