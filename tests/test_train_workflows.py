"""Training runs of a program that asks two policies, as a person starts them."""

from __future__ import annotations

import signal
from pathlib import Path
from statistics import fmean

import pytest
import torch
from cli_runs import KILL, LOGS, SMALL, TINY, Run, Server, check_equal, check_same_run, read
from run_checks import steps_of
from test_train_dataflow import PACE, come_and_go

from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE
from flowtrain.trainer import toy

pytest_plugins = ("cli_runs",)

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "workflows" / "solver_verifier.py"
POLICIES = ("solver", "verifier")
PAID = """
from flowtrain.rewards import ByPolicy

def reward(task, answer, trajectory):
    return ByPolicy({t.policy: t.call.response_ids[0] % 2 for t in trajectory.turns})
"""
"""Each policy is paid for the kind of the first token that it last said: half of the tokens pay."""
BETWEEN_CHECKPOINTS = KILL.format(
    module="flowtrain.trainer.setup.learner", path="Learner.save", number=6, after=False
)
"""The verifier's of step 3 is on the disk, the solver's is not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a chat template."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = toy.new_tokenizer(["What is the area of Chad? Say yes or no."], 300)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    tiny = toy.new_model(tokenizer, hidden_size=32, num_layers=1, num_heads=2, max_positions=512)
    tiny.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def workflow(words: tuple[str, ...], model: Path, tmp_path: Path) -> tuple[object, ...]:
    own = words[len(SMALL) :]
    at = own.index("--agent.tools")
    (tmp_path / "paid.py").write_text(PAID)
    return (
        *(*TINY, *own[:at], *own[at + 2 :]),
        *("--agent.name", f"{EXAMPLE}:SolverVerifier", "--agent.max_turns", "3"),
        *("--model.path", model, "--train.num_steps", "2", "--rollout.max_new_tokens", "8"),
        *(word for name in POLICIES for word in (f"--policies.{name}.path", model)),
        *("--reward.function", f"{tmp_path / 'paid.py'}:reward"),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_learns_what_it_is_paid_for(
    run: Run, workflow: tuple[object, ...], policy: str
) -> None:
    steps = ("--train.num_steps", "12", "--train.lr", "1e-2", "--rollout.max_new_tokens", "1")
    ran = run("run", "--train.policy", policy, *steps, base=workflow)
    lines = steps_of(ran.path)
    for line in lines:
        assert line["num_tokens"] > 0 and line["failed_rollouts"] == 0
        assert line["solver/asked_share"] == line["verifier/asked_share"] == 1.0
    trained = {
        turn["policy"] for each in ran.rollouts for turn in each["turns"] if turn["training"]
    }
    assert trained == {policy}, "the other's calls are read, not trained"
    assert all(set(each["policy_rewards"]) == set(POLICIES) for each in ran.rollouts)
    paid = {name: [line[f"{name}/reward_mean"] for line in lines] for name in POLICIES}
    gained = {name: fmean(each[-3:]) - fmean(each[:3]) for name, each in paid.items()}
    assert gained.pop(policy) - 0.15 > max(0.05, *gained.values()), paid


def test_one_run_trains_both_by_the_same_rollouts(
    server: Server, run: Run, workflow: tuple[object, ...]
) -> None:
    """And goes on with both where it was killed between their checkpoints."""
    both = (*workflow, "--policies.verifier.trained", "true", "--checkpoint.every", "1")
    both = (*both, "--checkpoint.keep", "1", "--train.num_steps", "4", "--train.lr", "1e-3")
    both = (*both, "--log.replay", "true")
    whole = run("whole", base=both).path
    folders = {"solver": Path(), "verifier": Path("policies/verifier")}
    groups = {}
    for policy, folder in folders.items():
        lines, rollouts = steps_of(whole / folder), read(whole / folder / "trajectories.jsonl")
        assert len(lines) == 4 and all(line["num_tokens"] > 0 for line in lines)
        turns = [turn for each in rollouts for turn in each["turns"]]
        assert {turn["policy"] for turn in turns if turn["training"]} == {policy}
        for each in rollouts:
            versions = {span[2] for turn in each["turns"] for span in turn["spans"]}
            assert versions == {each["version"]}, "of both"
        groups[policy] = [[turn["response_ids"] for turn in each["turns"]] for each in rollouts]
        check_equal(server, whole / folder, 4)
    assert groups["solver"] == groups["verifier"]

    run("killed", base=both, before=BETWEEN_CHECKPOINTS, code=-signal.SIGKILL)
    again = run("killed", "--run.resume", "auto", base=both).path
    for folder in folders.values():
        logs = LOGS[:2] if folder.parts else LOGS  # the first measures what both have learnt
        check_same_run(again / folder, whole / folder, num_steps=4, logs=logs)


def test_the_workflow_of_the_demo(run: Run) -> None:
    """On the quickstart's questions; its verifier is here one that has never given a verdict."""
    few = ("--rollout.num_questions", "2", "--rollout.group_size", "4", "--eval.at_ends", "false")
    own = ("--policies.verifier.path", "quickstart", "--policies.verifier.trained", "true")
    config = ("--config", EXAMPLE.parents[2] / "configs" / "facts.toml", "--run.threads", "1")
    function = ("--reward.function", f"{EXAMPLE.with_name('facts.py')}:reward")
    agent = ("--agent.name", f"{EXAMPLE.with_name('facts.py')}:SolverVerifier", *function)
    ran = run("run", "--train.num_steps", "1", *few, *own, base=(*config, *agent))
    assert (ran.path / "policies" / "verifier" / "checkpoints" / "step_00000001").is_dir()
    for each in ran.rollouts:
        asked = [turn["policy"] for turn in each["turns"]]
        assert asked == ["solver", "verifier"] * (len(asked) // 2) and len(asked) in (2, 4, 6, 8)
        assert all(turn["tool_calls"] for turn in each["turns"][::2])
        ended = each["turns"][-1]["response_text"].strip() == "STOP"
        expected = each["policy_rewards"]["solver"] if ended else 0.25
        assert each["policy_rewards"]["verifier"] == expected


@pytest.mark.dist
def test_a_trainer_for_each_and_nodes_that_come_and_go(
    server: Server, workflow: tuple[object, ...], tmp_path: Path
) -> None:
    both = (*workflow, *PACE)
    come_and_go(server, tmp_path, {name: (*both, "--train.policy", name) for name in POLICIES})
