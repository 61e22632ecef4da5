"""Runs whose numbers go wrong: what is told, when they end, and that what is saved is good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import saved_state
from cli_runs import Run, Server, read
from run_checks import check_left
from safetensors.torch import load_file

pytest_plugins = ("cli_runs",)

EVERY = ("--checkpoint.every", "1", "--eval.at_ends", "false")
# Of rollouts, not of the solutions that a run checks before.
REWARD = """
from flowtrain.rewards import scoring
real = scoring._scored
def spoiled(trajectory, reward, *rest):
    return real(trajectory, {} if trajectory.turns else reward, *rest)
scoring._scored = spoiled
"""
SPOILED = """
from flowtrain.trainer.trainer import Trainer
real, count = Trainer.optim_step, []
def optim_step(self, loss, number=0):
    count.append(0)
    if {first} <= len(count) <= {last}:
        {what}
    return real(self, loss, number)
Trainer.optim_step = optim_step
"""
GRADIENT = "next(self.model.parameters()).grad.fill_(float('nan'))"
LOSS = "loss = loss * float('inf')"
FOUR = ("--train.max_idle_steps", "4")
IDLE = {
    "rewards that are no numbers": (
        *(REWARD.format("float('nan')"), ()),
        "all 32 rollouts failed; the first failed because of 'scorer exact: its reward is nan, "
        "not from 0 to 1'",
    ),
    "answers that are never right": (REWARD.format("0.0"), FOUR, "all 32 rewards are 0"),
    "answers that are always right": (
        *(REWARD.format("1.0"), FOUR),
        "all 32 rewards are 1",
    ),
    "responses that are empty": (
        *("", ("--rollout.request_timeout_s", "1e-6")),
        "all responses are empty",
    ),
    "prompts that outgrow the model": (
        *("", ("--tasks.path", "long.jsonl")),
        "all prompts are longer than the model's positions",
    ),
}


def told(lines: list[str]) -> list[str]:
    """The lines about steps that have nothing to learn from."""
    return [line for line in lines if "nothing to learn from" in line]


def check_as_before(run: Path, warm: Path) -> None:
    """The weights of the newest checkpoint are the warm ones to the bit, and no moment moved."""
    check_left(run, warm / "model", is_trained=False)
    newest = max((run / "checkpoints").iterdir())
    assert all(name.startswith("model.") for name in saved_state(newest))


def check_finite(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/*/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values()), path


def check_goes_on(server: Server, run: Path, *argv: object) -> None:
    """Without what was wrong the same command trains to its end."""
    server.resume(run, *argv, *EVERY)
    assert read(run / "metrics.jsonl")[-1]["num_optim_steps"] > 0
    check_finite(run)


@pytest.mark.parametrize("case", IDLE)
def test_a_run_without_anything_to_learn_from_says_so_and_ends(
    case: str, run: Run, server: Server, words: tuple[str, ...], warm: Path, tmp_path: Path
) -> None:
    before, options, reason = IDLE[case]
    tasks = [{"question": f"What is {i}" + " plus 1" * 400, "answer": "1"} for i in range(20)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    ran = run("run", *EVERY, *options, code=2, before=before, cwd=tmp_path)
    num_told = 4 if options == FOUR else 3
    assert len(told(ran.lines)) == num_told, ran.lines
    last = ran.lines[-1]
    assert reason in told(ran.lines)[0] and reason in last
    assert f"nothing to learn from in step {num_told} ({num_told} steps in a row)" in last
    assert last.startswith("flowtrain.train: ") and "run.resume = 'auto'" in last
    check_as_before(ran.path, warm)
    if not options:
        check_goes_on(server, ran.path, *words)


def test_equal_rewards_end_no_run_that_asks_for_that(run: Run, warm: Path) -> None:
    options = ("--train.max_idle_steps", 0, "--train.num_steps", 4)
    ran = run("run", *EVERY, *options, before=REWARD.format("0.0"))
    assert len(told(ran.lines)) == 3, "the first three of four steps are told"
    check_as_before(ran.path, warm)


def test_a_step_that_is_not_finite_is_skipped_and_told(run: Run) -> None:
    ran = run("run", *EVERY, before=SPOILED.format(first=3, last=4, what=GRADIENT))
    (number,) = {int(line.split()[5]) for line in ran.lines if "is skipped" in line}
    skipped = {step["step"]: step["num_steps_skipped"] for step in ran.steps}
    assert skipped[number] == 2 and sum(skipped.values()) == 2
    assert ran.steps[-1]["num_optim_steps"] > 0, "it goes on"
    check_finite(ran.path)


def test_steps_that_stay_not_finite_end_the_run_with_a_cure(
    run: Run, server: Server, words: tuple[str, ...]
) -> None:
    ran = run("run", *EVERY, code=2, before=SPOILED.format(first=3, last=99, what=LOSS))
    assert "3 optimizer steps in a row were skipped" in ran.lines[-1], ran.lines
    assert "a learning rate below 0.003 may help" in ran.lines[-1]
    check_finite(ran.path)
    check_goes_on(server, ran.path, *words)
