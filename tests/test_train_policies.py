"""The commands with a verifier or a refiner as second policy: its warm-up and training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import RFT, SMALL, Server, check_same_run, read
from run_checks import check_left, check_trained, steps_of

pytest_plugins = ("cli_runs",)

OWN = {
    "verifier": ("--roles.verifier", "own", "--policies.verifier.max_new_tokens", "12"),
    "refiner": (
        *("--roles.refiner", "own", "--agent.num_passages", "3", "--agent.tools", '["Search"]'),
        *("--policies.refiner.max_new_tokens", "16"),
    ),
}
LOOKUPS = ("--tasks.kinds", '["lookup"]', "--rft.expert_error", "0", *OWN["refiner"])
TWO_STEPS = ("--train.num_steps", "2")
CASES = [(role, policy) for role in OWN for policy in ("planner", role)]
PARITY = "def odd(task, answer, trajectory):\n    return float(len(answer) % 2)\n"
"""A reward that varies whatever so small a refiner writes."""
Models = dict[str, dict[str, Path]]


@pytest.fixture(scope="session")
def models(once: Callable[..., Path], server: Server, warm: Path) -> Models:
    """A warm model of each policy; a refiner is shown searches that find something."""

    def warmed(name: str, *argv: str) -> Path:
        def make(path: Path) -> None:
            code, lines, out = server.run("rft", *SMALL, *RFT, *argv, "--run.dir", path)
            assert (code, lines) == (0, []) and "kept 300" in out

        return once(name, make) / "model"

    def looking_up(policy: str) -> Path:
        return warmed(f"warm_lookup_{policy}", *LOOKUPS, "--train.policy", policy)

    own = ("--roles.verifier", "own", "--train.policy", "verifier")
    return {
        "verifier": {"planner": warm / "model", "verifier": warmed("warm_verifier", *own)},
        "refiner": {policy: looking_up(policy) for policy in ("planner", "refiner")},
    }


def options(
    role: str, policy: str, models: Models, words: tuple[str, ...], place: Path
) -> tuple[object, ...]:
    """Train a policy beside the frozen one. With a refiner, it is asked about eight countries."""
    mine = models[role]
    (frozen,) = mine.keys() - {policy}
    argv = (*words, *OWN[role], "--train.policy", policy, "--model.path", mine[policy])
    argv += (f"--policies.{frozen}.path", mine[frozen])
    if role == "verifier":
        return argv
    (place / "parity.py").write_text(PARITY)
    tasks = [{"question": f"What is the area of Land{n}?"} for n in range(8)] * 5
    (place / "areas.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    reward = ("--reward.function", f"{place / 'parity.py'}:odd")
    return (*argv, "--tasks.path", place / "areas.jsonl", *reward)


@pytest.fixture(scope="session", params=CASES, ids="-".join)
def trained(
    request: pytest.FixtureRequest,
    place: Path,
    once: Callable[..., Path],
    server: Server,
    words: tuple[str, ...],
    models: Models,
) -> tuple[str, str, Path]:
    """The role that is a policy, the policy that was trained, and the run's folder."""
    role, policy = request.param

    def make(path: Path) -> None:
        argv = (*options(role, policy, models, words, place), *TWO_STEPS, "--run.dir", path)
        code, lines, _ = server.run("train", *argv)
        assert (code, lines) == (0, [])

    return role, policy, once(f"{policy}_with_{role}", make)


def test_a_warm_up_imitates_the_script(models: Models) -> None:
    for role, most in (("verifier", 0.5), ("refiner", 0.7)):
        steps = read(models[role][role].parent / "metrics.jsonl")
        assert steps[-1]["loss"] < most * steps[0]["loss"]
    texts = [(path / "tokenizer.json").read_text() for path in models["verifier"].values()]
    assert texts[0] != texts[1], "it has words of its own"


def test_one_policy_is_trained_and_the_other_stays(
    trained: tuple[str, str, Path], models: Models
) -> None:
    role, policy, run = trained
    records = check_trained(run, policy)
    assert len(records) == 2 * 32
    for turn in (turn for record in records for turn in record["turns"]):
        if role == "verifier":
            assert turn["verdict_text"].startswith("Conclusion:")
            assert len(turn["verifier"]["response_ids"]) <= 12
        else:
            found = [used["name"] for used in turn["tool_calls"] if not used["is_error"]]
            assert ("refiner" in turn) == (found == ["Search"])
    assert sum(role in turn for record in records for turn in record["turns"]) > 10
    for step in steps_of(run):
        if role == "verifier":
            assert 0 <= step["verifier/malformed_share"] < 0.5
            assert 0 < step["verifier/stop_share"] < 1
            assert "verifier/agreement_share" not in step, "questions from a file have no rule"
        else:
            assert 0 <= step["refiner/empty_share"] < 0.5 and 0 < step["refiner/kept_share"] < 1
    check_left(run, models[role][policy])
    assert (run / "weights" / "HEAD").read_text() == "2\n"
    logged, planner = (
        json.loads((path / "tokenizer.json").read_text())["model"]
        for path in (run, models[role]["planner"])
    )
    assert logged == planner, "the ids in the logs are the planner's"


def test_a_run_with_two_policies_is_resumed_exactly(
    server: Server,
    words: tuple[str, ...],
    by_seed: tuple[str, ...],
    models: Models,
    place: Path,
    tmp_path: Path,
) -> None:
    """Each request is a batch of its own, so that roundings do not depend on load."""
    alone = ("--rollout.max_batch_size", 1, "--rollout.group_size", 2, *by_seed)
    argv = (*options("verifier", "verifier", models, words, place), *alone)
    argv += ("--checkpoint.every", 1)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for path, num_steps in ((whole, 3), (halves, 2)):
        code, lines, _ = server.run(
            "train", *argv, "--train.num_steps", num_steps, "--run.dir", path
        )
        assert (code, lines) == (0, [])
    server.resume(halves, *argv, "--train.num_steps", 3)
    check_same_run(halves, whole, 3)
    assert min(step["grad_norm"] for step in read(whole / "metrics.jsonl")[1:]) > 0
