"""Runs that train an adapter, with versions of merged weights and of the adapter alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from checkpoints import check_same
from cli_runs import AFTER_STEP_3, Server, read, rows
from safetensors import safe_open

pytest_plugins = ("cli_runs",)

NUM_STEPS = 4
LORA = (
    *("--lora.rank", "4", "--train.lr", "1e-2", "--algorithm.kl_coef", "0.1"),
    *("--rollout.group_size", "2", "--rollout.max_in_flight", "1", "--eval.num_tasks", "4"),
)
LAST = f"checkpoints/step_{NUM_STEPS:08d}"


def train(server: Server, words: tuple[str, ...], path: Path, *argv: str, before: str = "") -> int:
    steps = ("--train.num_steps", str(NUM_STEPS))
    options = (*words, *LORA, *steps, *argv, "--run.dir", path, "--resume", "auto")
    process = server.start("train", *options, before=before)
    code = process.wait()
    assert code in (0, -signal.SIGKILL), process.err.read_text()[-2000:]
    return code


@pytest.fixture
def lora_words(words: tuple[str, ...], by_seed: tuple[str, ...]) -> tuple[str, ...]:
    return (*words, *by_seed)


def test_a_killed_run_goes_on_to_the_same_bits(
    server: Server, lora_words: tuple[str, ...], tmp_path: Path
) -> None:
    argv = ("--lora.sync", "merged")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(server, lora_words, whole, *argv) == 0
    assert train(server, lora_words, killed, *argv, before=AFTER_STEP_3) == -signal.SIGKILL
    assert train(server, lora_words, killed, *argv) == 0
    check_same(killed / LAST, whole / LAST)
    assert rows(killed, "metrics.jsonl") == rows(whole, "metrics.jsonl")
    trained = read(whole / "metrics.jsonl")[1:]
    assert min(row["grad_norm"] for row in trained) > 0
    assert trained[-1]["kl_ref"] > 0, "the reference is the frozen model"


def test_versions_of_an_adapter_are_small_and_its_checkpoint_is_a_model(
    server: Server, lora_words: tuple[str, ...], tmp_path: Path
) -> None:
    """What the sampler says is what the trainer says, before the run is resumed and after it."""
    path = tmp_path / "run"
    assert train(server, lora_words, path, "--lora.sync", "adapter", "--train.num_steps", "2") == 0
    (path / "summary.json").unlink()
    assert train(server, lora_words, path, "--lora.sync", "adapter") == 0
    (snapshot,) = (path / f"weights/v{NUM_STEPS:08d}").glob("*.safetensors")
    with safe_open(snapshot, "pt") as tensors:
        assert all(".lora_" in name for name in tensors.keys())  # noqa: SIM118
    trained = read(path / "metrics.jsonl")[1:]
    assert len(trained) == NUM_STEPS and min(row["grad_norm"] for row in trained) > 0
    assert max(row["logprob_mismatch"] for row in trained) < 1e-4
    again = tmp_path / "again"
    argv = ("--model.path", path / LAST / "model", "--train.num_steps", "0", "--run.dir", again)
    code, lines, _ = server.run("train", *lora_words, "--eval.num_tasks", "4", *argv)
    assert code == 0, lines
    assert (again / "weights/v00000000").exists()
    ends = [json.loads((each / "summary.json").read_text()) for each in (path, again)]
    assert ends[0]["trained"] == ends[1]["warm"], "the merged model answers as the adapted one did"
