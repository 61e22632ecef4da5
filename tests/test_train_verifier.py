"""The commands with a verifier that is a policy: two warm-ups, and either policy trained beside the
other one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import RFT, SMALL, Server, check_same_run, read
from safetensors.torch import load_file

pytest_plugins = ("cli_runs",)

OWN = (
    *("--roles.verifier", "own", "--policies.verifier.max_new_tokens", "12"),
    *("--train.num_steps", "2"),
)
POLICIES = ("planner", "verifier")
OTHER = {"planner": "verifier", "verifier": "planner"}


@pytest.fixture(scope="session")
def warm_verifier(once: Callable[..., Path], server: Server) -> Path:
    def make(path: Path) -> None:
        own = ("--roles.verifier", "own", "--train.policy", "verifier")
        code, lines, out = server.run("rft", *SMALL, *RFT, *own, "--run.dir", path)
        assert (code, lines) == (0, []) and "kept 300" in out

    return once("warm_verifier", make) / "model"


@pytest.fixture(scope="session")
def models(warm: Path, warm_verifier: Path) -> dict[str, Path]:
    """The warm model of each policy."""
    return {"planner": warm / "model", "verifier": warm_verifier}


def options(policy: str, models: dict[str, Path], words: tuple[str, ...]) -> tuple[object, ...]:
    frozen = (f"--policies.{OTHER[policy]}.path", models[OTHER[policy]])
    return (*words, *OWN, "--train.policy", policy, "--model.path", models[policy], *frozen)


@pytest.fixture(scope="module", params=POLICIES)
def run(
    request: pytest.FixtureRequest,
    once: Callable[..., Path],
    server: Server,
    words: tuple[str, ...],
    models: dict[str, Path],
) -> Path:
    """The folder of a run that trained one of them."""

    def make(path: Path) -> None:
        argv = (*options(request.param, models, words), "--run.dir", path)
        code, lines, _ = server.run("train", *argv)
        assert (code, lines) == (0, [])

    return once(f"only_{request.param}", make)


def test_the_warm_up_imitates_the_scripts_verdicts(warm_verifier: Path, warm: Path) -> None:
    steps = read(warm_verifier.parent / "metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    ours, theirs = (
        (path / "tokenizer.json").read_text() for path in (warm_verifier, warm / "model")
    )
    assert ours != theirs, "it has words of its own"


def test_one_policy_is_trained_and_the_other_stays(run: Path) -> None:
    policy = run.name.removeprefix("only_")
    records, num_trained = read(run / "trajectories.jsonl"), 0
    assert len(records) == 2 * 32
    for record in records:
        for turn in record["turns"]:
            calls = {"planner": turn, "verifier": turn["verifier"]}
            for name, call in calls.items():
                assert call["spans"] == [
                    [0, len(call["response_ids"]), record["step"] - 1 if name == policy else 0]
                ]
            assert calls[OTHER[policy]]["training"] is None
            assert (
                turn["verdict_text"].startswith("Conclusion:")
                and len(calls["verifier"]["response_ids"]) <= 12
            )
            if (training := calls[policy]["training"]) is not None:
                assert len(training["logprobs"]) == len(calls[policy]["response_ids"])
                num_trained += len(training["logprobs"])
    _, *steps = read(run / "metrics.jsonl")
    assert num_trained == sum(step["num_tokens"] for step in steps) > 0
    for step in steps:
        assert step["logprob_mismatch"] < 1e-4, "the trainer's model is the one that sampled"
        assert 0 <= step["verifier/malformed_share"] < 0.5 and 0 < step["verifier/stop_share"] < 1
        assert "verifier/agreement_share" not in step, "questions from a file have no rule"


def test_what_is_left_is_the_trained_policys_model(run: Path, models: dict[str, Path]) -> None:
    policy = run.name.removeprefix("only_")
    saved = run / "checkpoints" / "step_00000002" / "model"
    assert (saved / "tokenizer.json").read_text() == (models[policy] / "tokenizer.json").read_text()
    before, after = (
        load_file(models[policy] / "model.safetensors"),
        load_file(saved / "model.safetensors"),
    )
    assert before.keys() == after.keys() and any(
        (before[name] != after[name]).any() for name in before
    )
    assert (run / "weights" / "HEAD").read_text() == "2\n"
    planner = json.loads((models["planner"] / "tokenizer.json").read_text())
    assert json.loads((run / "tokenizer.json").read_text())["model"] == planner["model"], (
        "the ids in the logs are the planner's"
    )


def test_a_run_with_two_policies_is_resumed_exactly(
    server: Server,
    words: tuple[str, ...],
    by_seed: tuple[str, ...],
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    """Two engines sample at once, and with shared batches roundings would depend on the machine's
    load: each request is a batch of its own.
    """
    alone = ("--rollout.max_batch_size", 1, "--rollout.group_size", 2, *by_seed)
    argv = (*options("verifier", models, words), *alone, "--checkpoint.every", 1)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for path, num_steps in ((whole, 3), (halves, 2)):
        options_of = ("--train.num_steps", num_steps, "--run.dir", path)
        code, lines, _ = server.run("train", *argv, *options_of)
        assert (code, lines) == (0, [])
    server.resume(halves, *argv, "--train.num_steps", 3)
    check_same_run(halves, whole, 3)
    assert min(step["grad_norm"] for step in read(whole / "metrics.jsonl")[1:]) > 0
