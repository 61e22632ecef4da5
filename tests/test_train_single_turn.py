"""A training run of the agent of one turn as a person starts it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli_runs import Server, read

pytest_plugins = ("cli_runs",)
SINGLE = ("--agent.name", "single", "--agent.prompt", "compact", "--agent.instructions", "Guess.")


def test_a_run_of_one_turn(place: Path, server: Server, words: tuple[str, ...]) -> None:
    """It rolls out, trains with the sampler's log-probs, publishes and evaluates; no tool runs."""
    run = place / "single"
    at = words.index("--agent.tools")
    options = (*words[:at], *words[at + 2 :], *SINGLE, "--train.num_steps", "2")
    # Groups of one reward are kept, because a tiny model is seldom right.
    code, lines, _ = server.run("train", *options, "--algorithm.mode", "released", "--run.dir", run)
    assert code == 0, lines
    steps = [line for line in read(run / "metrics.jsonl") if line["step"] > 0]
    assert [line["version"] for line in steps] == [1, 2]
    for line in steps:
        assert line["turns_mean"] == 1.0 and line["malformed_share"] == 0.0
        assert line["num_tokens"] > 0 and line["logprob_mismatch"] < 1e-4
        assert not [name for name in line if name.startswith("tool_share")]
    tokenizer = json.loads((run / "tokenizer.json").read_text())
    assert tokenizer["model"]["type"] == "BPE"
    for rollout in read(run / "trajectories.jsonl"):
        (turn,) = rollout["turns"]
        assert turn["action"] is None and not turn["is_error"]
        assert rollout["answer"] == turn["response_text"].strip()
        assert turn["prompt_ids"] and turn["response_ids"]
    told = re.findall("nothing to learn from in step ([0-9]+)", "\n".join(lines))
    summary = json.loads((run / "summary.json").read_text())
    assert told and summary["idle_steps"] == list(map(int, told))
    assert summary["last_cause"].startswith("all 32 rewards are 0")
