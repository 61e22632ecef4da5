"""A program behind the gateway, from the warm-up through two steps, as a person starts it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from cli_runs import RFT, SMALL, Server, read

pytest_plugins = ("cli_runs",)
ROOT = Path(__file__).resolve().parents[1]
WARM_UP = ("--config", ROOT / "configs" / "tools.toml", *SMALL)
FACTS = ("--tasks.name", "facts", "--tasks.path", "")
CONFIG = ("--config", ROOT / "configs" / "gateway.toml", *FACTS, *SMALL)
PROGRAM = ("--gateway.function", "examples/gateway/plain.py:solve")


def test_the_example_trains_on_the_ids_that_were_sampled(server: Server, tmp_path: Path) -> None:
    """A client of OpenAI's asks, calls tools of its own, and is trained in place."""
    warm, run = tmp_path / "warm", tmp_path / "run"
    code, lines, _ = server.run("rft", *WARM_UP, *RFT, "--run.dir", warm)
    assert code == 0, lines
    options = (*PROGRAM, "--train.num_steps", "2", "--algorithm.mode", "released")
    model = ("--model.path", warm / "model")
    code, lines, _ = server.run("train", *CONFIG, *options, *model, "--run.dir", run, cwd=ROOT)
    assert code == 0, lines
    steps = [line for line in read(run / "metrics.jsonl") if line["step"] > 0]
    assert [line["version"] for line in steps] == [1, 2]
    for line in steps:
        assert line["num_tokens"] > 0 and line["logprob_mismatch"] < 1e-4
        assert line["failed_rollouts"] == 0
    num_calls = 0
    for rollout in read(run / "trajectories.jsonl"):
        for before, turn in pairwise(rollout["turns"]):
            num_calls += len(before.get("tool_calls", ()))
            assert turn["prompt_shared"] == before["num_prompt_tokens"]
            sampled = before["response_ids"]
            assert turn["prompt_ids"][: len(sampled)] == sampled
    assert num_calls > 10
