"""What the folder of a run shows of training: calls, the weights that sampled them, the model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from cli_runs import read
from safetensors.torch import load_file

POLICIES = ("planner", "verifier", "refiner")


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of the steps, each of which made a version that agrees with the sampler."""
    steps = [line for line in read(run / "metrics.jsonl") if line["step"] > 0]
    assert [line["version"] for line in steps] == [*range(1, len(steps) + 1)]
    assert all(line["logprob_mismatch"] < 1e-4 for line in steps)
    return steps


def calls_of(turn: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each policy has said in a turn; the planner's is the turn itself."""
    return {"planner": turn} | {name: turn[name] for name in POLICIES[1:] if name in turn}


def check_trained(run: Path, policy: str = "planner") -> list[dict[str, Any]]:
    """Check that each call is of the weights of its step, those of other policies of the first,
    and that the steps count the tokens that were trained. Returns the rollouts.
    """
    records, num_trained = read(run / "trajectories.jsonl"), 0
    for record in records:
        assert record["version"] == record["step"] - 1
        for turn in record["turns"]:
            for name, call in calls_of(turn).items():
                num = len(call["response_ids"])
                assert call["spans"] == [[0, num, record["version"] if name == policy else 0]]
                assert len(call["response_logprobs"]) == num
                if call["training"] is not None:
                    assert name == policy
                    num_trained += num
    assert num_trained == sum(step["num_tokens"] for step in steps_of(run)) > 0
    return records


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


def check_left(run: Path, model: Path, is_trained: bool = True) -> None:
    """Check that the newest checkpoint has the model's tokenizer, and other weights if trained."""
    saved = max((run / "checkpoints").iterdir()) / "model"
    assert (saved / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    ours, theirs = (load_file(each / "model.safetensors") for each in (saved, model))
    assert ours.keys() == theirs.keys()
    assert any((ours[name] != theirs[name]).any() for name in theirs) == is_trained
