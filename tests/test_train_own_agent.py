"""A training run of an agent of one's own, as a person starts it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from cli_runs import Server, read

pytest_plugins = ("cli_runs",)
EXAMPLE = Path(__file__).parents[1] / "examples" / "my_agent.py"
MINE = ("--agent.name", f"{EXAMPLE}:MyAgent", "--agent.max_turns", "2")
APPO = ("--algorithm.name", "appo", "--appo.num_roots", "2", "--appo.spacing", "1")
NEW = ("--model.path", "tiny", "--train.num_steps", "2")


def test_an_agent_of_ones_own_trains_and_branches(
    place: Path, server: Server, words: tuple[str, ...]
) -> None:
    """What was sampled stays in its prompts, a branch shares it, and the trainer agrees with it."""
    run = place / "own"
    (place / "by_length.py").write_text(
        "def score(task, answer, trajectory):\n    return len(answer) % 2"
    )
    reward = ("--reward.function", f"{place}/by_length.py:score")
    at = words.index("--agent.tools")
    options = (*words[:at], *words[at + 2 :], *MINE, *APPO, *NEW, *reward, "--run.dir", run)
    code, lines, _ = server.run("train", *options)
    assert code == 0, lines
    steps = [line for line in read(run / "metrics.jsonl") if line["step"] > 0]
    assert [line["version"] for line in steps] == [1, 2]
    for line in steps:
        assert line["turns_mean"] == 2.0, line
        assert line["num_tokens"] > 0 and line["logprob_mismatch"] < 1e-4
    rollouts = read(run / "trajectories.jsonl")
    assert any("branch" in rollout for rollout in rollouts)
    for rollout in rollouts:
        for before, turn in pairwise(rollout["turns"]):
            # Of the prompt those ids are logged that the one before has not.
            assert turn["prompt_shared"] == before["num_prompt_tokens"]
            sampled = before["response_ids"]
            assert turn["prompt_ids"][: len(sampled)] == sampled
