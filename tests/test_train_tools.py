"""The agent that calls tools, from the warm-up through two steps, as a person starts it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from cli_runs import RFT, SMALL, Server, read

pytest_plugins = ("cli_runs",)
CONFIG = ("--config", Path("configs/tools.toml").resolve(), *SMALL)


def test_the_example_trains_on_the_ids_that_were_sampled(server: Server, tmp_path: Path) -> None:
    """It learns to call, calls, reads, trains with the sampler's log-probs, and evaluates."""
    warm, run = tmp_path / "warm", tmp_path / "run"
    code, lines, _ = server.run("rft", *CONFIG, *RFT, "--run.dir", warm)
    assert code == 0, lines
    options = ("--train.num_steps", "2", "--algorithm.mode", "released", "--run.dir", run)
    code, lines, _ = server.run("train", *CONFIG, *options, "--model.path", warm / "model")
    assert code == 0, lines
    steps = [line for line in read(run / "metrics.jsonl") if line["step"] > 0]
    assert [line["version"] for line in steps] == [1, 2]
    for line in steps:
        assert line["num_tokens"] > 0 and line["logprob_mismatch"] < 1e-4
        assert 0 < line["tool_share/Search"] < 1
    num_calls = 0
    for rollout in read(run / "trajectories.jsonl"):
        for before, turn in pairwise(rollout["turns"]):
            num_calls += len(before.get("tool_calls", ()))
            # Of the prompt those ids are logged that the one before has not.
            assert turn["prompt_shared"] == before["num_prompt_tokens"]
            sampled = before["response_ids"]
            assert turn["prompt_ids"][: len(sampled)] == sampled
    assert num_calls > 10
