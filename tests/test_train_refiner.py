"""The commands with a refiner that is a policy: its warm-up, its training beside a frozen planner,
and the training of a planner beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import RFT, SMALL, Server, read
from safetensors.torch import load_file

pytest_plugins = ("cli_runs",)

OWN = (
    *("--roles.refiner", "own", "--agent.num_passages", "3", "--agent.tools", '["Search"]'),
    *("--policies.refiner.max_new_tokens", "16"),
)
LOOKUPS = ("--tasks.kinds", '["lookup"]', "--rft.expert_error", "0", *OWN)
OTHER = {"planner": "refiner", "refiner": "planner"}
PARITY = """
def odd(task, answer, trajectory):
    return float(len(answer) % 2)
"""
"""A reward that varies whatever so small a refiner writes."""


@pytest.fixture(scope="session")
def models(once: Callable[..., Path], server: Server) -> dict[str, Path]:
    """A warm model of each policy, which the script shows searches that find something."""

    def make(path: Path) -> None:
        policy = path.name.removeprefix("warm_lookup_")
        argv = (*SMALL, *RFT, *LOOKUPS, "--train.policy", policy, "--run.dir", path)
        code, lines, out = server.run("rft", *argv)
        assert (code, lines) == (0, []) and "kept 300" in out

    return {policy: once(f"warm_lookup_{policy}", make) / "model" for policy in OTHER}


def options(
    place: Path, policy: str, models: dict[str, Path], words: tuple[str, ...]
) -> tuple[object, ...]:
    """Questions about the areas of eight countries."""
    (place / "parity.py").write_text(PARITY)
    tasks = [{"question": f"What is the area of Land{n}?"} for n in range(8)] * 5
    (place / "areas.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    frozen = (f"--policies.{OTHER[policy]}.path", models[OTHER[policy]])
    return (
        *(*words, *OWN, "--tasks.path", place / "areas.jsonl"),
        *("--reward.function", f"{place / 'parity.py'}:odd"),
        *("--train.policy", policy, "--model.path", models[policy], *frozen),
    )


@pytest.fixture(scope="session", params=["planner", "refiner"])
def run(
    request: pytest.FixtureRequest,
    place: Path,
    once: Callable[..., Path],
    server: Server,
    words: tuple[str, ...],
    models: dict[str, Path],
) -> Path:
    """The folder of a run that trained one of them."""

    def make(path: Path) -> None:
        argv = (*options(place, request.param, models, words), "--train.num_steps", "2")
        code, lines, _ = server.run("train", *argv, "--run.dir", path)
        assert (code, lines) == (0, [])

    return once(f"beside_{OTHER[request.param]}", make)


def test_the_warm_up_imitates_the_scripts_evidence(models: dict[str, Path]) -> None:
    steps = read(models["refiner"].parent / "metrics.jsonl")
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]


def test_one_policy_is_trained_and_the_other_stays(run: Path, models: dict[str, Path]) -> None:
    policy = OTHER[run.name.removeprefix("beside_")]
    num_trained = num_refined = 0
    for record in read(run / "trajectories.jsonl"):
        for turn in record["turns"]:
            searched = turn["action"] and turn["action"]["tool_name"] == "Search"
            assert ("refiner" in turn) == bool(searched and not turn["is_error"])
            calls = {"planner": turn} | {name: turn[name] for name in ("refiner",) if name in turn}
            for name, call in calls.items():
                version = record["step"] - 1 if name == policy else 0
                assert call["spans"] == [[0, len(call["response_ids"]), version]]
                if (training := call["training"]) is not None:
                    assert name == policy
                    assert len(training["logprobs"]) == len(call["response_ids"])
                    num_trained += len(training["logprobs"])
            num_refined += "refiner" in turn
    _, *steps = read(run / "metrics.jsonl")
    assert num_refined > 10 and num_trained == sum(step["num_tokens"] for step in steps) > 0
    for step in steps:
        assert step["logprob_mismatch"] < 1e-4, "the trainer's model is the one that sampled"
        assert 0 <= step["refiner/empty_share"] < 0.5 and 0 < step["refiner/kept_share"] < 1
    saved, before = run / "checkpoints" / "step_00000002" / "model", models[policy]
    assert (saved / "tokenizer.json").read_text() == (before / "tokenizer.json").read_text()
    ours, theirs = (load_file(each / "model.safetensors") for each in (saved, before))
    assert any((ours[name] != theirs[name]).any() for name in theirs)
