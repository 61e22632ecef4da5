"""Runs whose numbers go wrong: what the user is told, when the run ends, and that weights, moments
and checkpoints stay good.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import saved_state
from cli_runs import Server, read
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
from flowtrain.training.trainer import Trainer
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


def told(lines: list[str]) -> list[str]:
    """The lines about steps that have nothing to learn from."""
    return [line for line in lines if "nothing to learn from" in line]


def check_as_before(run: Path, warm: Path) -> None:
    """The weights of the newest checkpoint are the warm ones to the bit, and no moment moved."""
    newest = max((run / "checkpoints").iterdir())
    models = (newest / "model", warm / "model")
    ours, theirs = (load_file(path / "model.safetensors") for path in models)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(name.startswith("model.") for name in saved_state(newest))


def check_finite(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/*/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values()), path


def check_goes_on(server: Server, run: Path, *argv: object) -> None:
    """Without what was wrong the same command trains to its end."""
    server.resume(run, *argv)
    assert read(run / "metrics.jsonl")[-1]["num_optim_steps"] > 0
    check_finite(run)


@pytest.mark.parametrize(
    ("before", "options", "num_told", "words_told"),
    [
        pytest.param(
            REWARD.format("float('nan')"),
            (),
            3,
            "all 32 rollouts failed; the first failed because of 'scorer exact: its reward is nan, "
            "not from 0 to 1'",
            id="rewards that are no numbers",
        ),
        pytest.param(
            REWARD.format("0.0"),
            ("--train.max_idle_steps", 4),
            4,
            "all 32 rewards are 0; of ",
            id="answers that are never right",
        ),
        pytest.param(
            REWARD.format("1.0"),
            ("--train.max_idle_steps", 4),
            4,
            "all 32 rewards are above 0; of ",
            id="answers that are always right",
        ),
        pytest.param(
            "",
            ("--rollout.request_timeout_s", 1e-6),
            3,
            "no response has a token",
            id="responses that are empty",
        ),
    ],
)
def test_a_run_without_anything_to_learn_from_says_so_and_ends(
    before: str,
    options: tuple[object, ...],
    num_told: int,
    words_told: str,
    server: Server,
    words: tuple[str, ...],
    warm: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    command = (*words, *EVERY, "--run.dir", run)
    code, lines, _ = server.run("train", *command, *options, before=before)
    assert code == 2 and len(told(lines)) == num_told, lines
    assert words_told in told(lines)[0] and words_told in lines[-1]
    assert f"nothing to learn from in step {num_told} ({num_told} steps in a row)" in lines[-1]
    assert lines[-1].startswith("flowtrain.train: ") and "run.resume = 'auto'" in lines[-1]
    check_as_before(run, warm)
    if not options:
        check_goes_on(server, run, *words, *EVERY)


def test_prompts_that_outgrow_the_model_are_named(
    server: Server, words: tuple[str, ...], warm: Path, tmp_path: Path
) -> None:
    tasks = [
        {"question": f"What is {i}" + " plus 1" * 400, "answer": str(i + 400)} for i in range(20)
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    run = tmp_path / "run"
    code, lines, _ = server.run(
        "train", *(*words, *EVERY, "--run.dir", run, "--tasks.path", tmp_path / "long.jsonl")
    )
    assert code == 2 and len(told(lines)) == 3, lines
    assert "all prompts outgrow the model" in lines[-1]
    check_as_before(run, warm)


def test_equal_rewards_end_no_run_that_asks_for_that(
    server: Server, words: tuple[str, ...], warm: Path, tmp_path: Path
) -> None:
    command = (*words, *EVERY, "--run.dir", tmp_path / "run", "--train.max_idle_steps", 0)
    options = ("--train.num_steps", 4)
    code, lines, _ = server.run("train", *command, *options, before=REWARD.format("0.0"))
    assert code == 0 and len(told(lines)) == 3, "the first three of four steps are told"
    check_as_before(tmp_path / "run", warm)


def test_a_step_that_is_not_finite_is_skipped_and_told(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before = SPOILED.format(first=3, last=4, what=GRADIENT)
    code, lines, _ = server.run("train", *words, *EVERY, "--run.dir", run, before=before)
    assert code == 0
    (number,) = {int(line.split()[5]) for line in lines if "is skipped" in line}
    skipped = {s["step"]: s["num_steps_skipped"] for s in read(run / "metrics.jsonl") if s["step"]}
    assert skipped[number] == 2 and sum(skipped.values()) == 2
    assert read(run / "metrics.jsonl")[-1]["num_optim_steps"] > 0, "it goes on"
    check_finite(run)


def test_steps_that_stay_not_finite_end_the_run_with_a_cure(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before = SPOILED.format(first=3, last=99, what=LOSS)
    command = (*words, *EVERY, "--run.dir", run)
    code, lines, _ = server.run("train", *command, before=before)
    assert code == 2 and "3 optimizer steps in a row were skipped" in lines[-1], lines
    assert "a learning rate below 0.003 may help" in lines[-1]
    check_finite(run)
    check_goes_on(server, run, *words, *EVERY)
