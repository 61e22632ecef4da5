"""The shipped configs of APPO and InfoFlow as a person runs them, APPO on two ranks, and what
fine-tuning makes of a refiner.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SMALL, Server, alike, check_same_run, read, rows
from tokenizers import Tokenizer

from flowtrain import toy
from flowtrain.training import model as models

pytest_plugins = ("cli_runs",)

CONFIGS = Path(__file__).parents[1] / "configs"


def train(
    server: Server, name: str, warm: Path, run: Path, *argv: object
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(metrics of every step, rollouts) of a shipped config, small."""
    config = ("--config", CONFIGS / f"{name}.toml", "--model.path", warm / "model")
    code, lines, out = server.run("train", *config, *SMALL, *argv, "--run.dir", run)
    # so small a run may have steps without anything to learn from, which it says
    lines = [line for line in lines if "nothing to learn from" not in line]
    assert (code, lines) == (0, []) and "held-out reward" in out
    assert {"summary.json", "checkpoints", "held_out.jsonl"} <= {
        path.name for path in run.iterdir()
    }
    assert json.loads((run / "manifest.json").read_text())["argv"]
    steps, rollouts = read(run / "metrics.jsonl")[1:], read(run / "trajectories.jsonl")
    for step in steps:
        check_account(step, [each for each in rollouts if each["step"] == step["step"]])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens"]["tokens/sampled"] == sum(step["tokens/sampled"] for step in steps)
    assert f"tokens: {summary['tokens']['text']}" in out
    return steps, rollouts


def check_account(step: dict[str, Any], rollouts: list[dict[str, Any]]) -> None:
    """Compare a step's account with the log of its rollouts."""
    fates = {key: num for key, num in step.items() if key.startswith("tokens/to/")}
    turns = [turn for rollout in rollouts for turn in rollout["turns"]]
    num_tokens = sum(len(turn["response_ids"]) for turn in turns)
    shared = step.get("tokens/shared", 0)
    assert step["tokens/sampled"] == step["num_sampled_tokens"]
    assert step["tokens/sampled"] + shared == num_tokens == sum(fates.values())
    weighed = sum(len(turn["response_ids"]) for turn in turns if turn["training"])
    in_rows = fates.get("tokens/to/trained", 0) + fates.get("tokens/to/no_weight", 0)
    assert in_rows == weighed


def test_appos_config_branches_and_trains(server: Server, warm: Path, tmp_path: Path) -> None:
    steps, rollouts = train(server, "appo", warm, tmp_path / "run", "--train.num_steps", 3)
    assert [step["step"] for step in steps] == [1, 2, 3] and all(
        step["branch_s"] > 0 for step in steps
    )
    for step in steps:
        of_step = [rollout for rollout in rollouts if rollout["step"] == step["step"]]
        assert len(of_step) == 4 * 8
        for index in range(4):
            group = [rollout for rollout in of_step if rollout["group_index"] == index]
            assert [rollout.get("branch", {}).get("parent") is None for rollout in group] == [
                True
            ] * 4 + [False] * 4
            assert sorted(rollout["branch"]["parent"] for rollout in group[4:]) == [0, 1, 2, 3], (
                "one of each root"
            )
            assert not any(turn["training"] for rollout in group[4:] for turn in rollout["turns"])
        roots = [rollout for rollout in of_step if "branch" not in rollout]
        own = sum(len(turn["response_ids"]) for rollout in roots for turn in rollout["turns"])
        new = [
            len(turn["response_ids"])
            for r in of_step
            if "branch" in r
            for turn in r["turns"][r["branch"]["turn"] :]
        ]
        assert step["num_sampled_tokens"] == own + sum(new) - sum(
            r["branch"]["token"] for r in of_step if "branch" in r
        )
    assert not any("branch" in rollout for rollout in read(tmp_path / "run" / "held_out.jsonl"))


def test_infoflows_config_rewards_sub_goals_and_gives_hints_for_a_while(
    server: Server, warm: Path, tmp_path: Path
) -> None:
    """Hints end after half of the steps, and evaluation has none."""
    steps, rollouts = train(
        server,
        "infoflow",
        warm,
        tmp_path / "run",
        "--train.num_steps",
        4,
        "--infoflow.hint_rate",
        1,
    )
    assert steps[0]["hinted_share"] > steps[2]["hinted_share"] == steps[3]["hinted_share"] == 0
    hinted = [rollout for rollout in rollouts if "hint_turn" in rollout]
    assert hinted and {rollout["kind"] for rollout in rollouts} == {"sum4", "sum5"}
    assert all(
        rollout["hint_turn"] >= 1 and len(rollout["turns"]) > rollout["hint_turn"]
        for rollout in hinted
    )
    for step in steps:
        shares = [rollout["sub_goals"] for rollout in rollouts if rollout["step"] == step["step"]]
        assert (
            step["sub_goal_mean"] == pytest.approx(sum(shares) / len(shares), abs=1e-4)
            and 0 <= min(shares) <= max(shares) <= 1
        )
    tokenizer = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    for rollout in hinted:
        told = ["Hint:" in tokenizer.decode(turn["prompt_ids"]) for turn in rollout["turns"]]
        assert told == [number >= rollout["hint_turn"] for number in range(len(told))]
    assert not any("hint_turn" in rollout for rollout in read(tmp_path / "run" / "held_out.jsonl"))


@pytest.mark.dist
def test_two_ranks_branch_and_train_like_one(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    """The same roots, branches and rewards, and the same training but for the rounding of sums; the
    reference's log-probs travel along, and A_fut sees the turns of a rollout wherever they are. Cut
    short, the run goes on as if nothing had happened.
    """
    appo = (
        *words,
        "--algorithm.name",
        "appo",
        "--appo.num_roots",
        "3",
        "--appo.spacing",
        "2",
        *("--appo.future_scope", "rollout", "--appo.dual_clipped", "drop"),
        "--train.num_steps",
        "3",
    )
    for size in (1, 2):
        processes = server.start_ranks(size, *appo, "--run.dir", tmp_path / f"{size}")
        assert [process.wait() for process in processes] == [0] * size, [
            process.err.read_text()[-1500:] for process in processes
        ]
    one, two = (tmp_path / "1", tmp_path / "2")
    ours = sorted(
        (
            record
            for name in ("trajectories.jsonl", "trajectories.rank1.jsonl")
            for record in rows(two, name)
        ),
        key=_place,
    )
    theirs = sorted(rows(one, "trajectories.jsonl"), key=_place)
    assert len(ours) == 3 * 4 * 8 and all(map(alike, ours, theirs))
    assert sum("branch" in record for record in ours) == 3 * 4 * 5
    for branch in (record for record in theirs if "branch" in record):
        at, group = branch["branch"], _place(branch)
        roots = [each for each in theirs if _place(each) == group and "branch" not in each]
        mine, root = (each["turns"][at["turn"]] for each in (branch, roots[at["parent"]]))
        for key in ("response_ids", "response_logprobs"):
            assert mine[key][: at["token"]] == root[key][: at["token"]]
    metrics = [read(run / "metrics.jsonl")[1:] for run in (two, one)]
    sums = ("reward_mean", "num_tokens", "num_sampled_tokens", "loss", "grad_norm", "kl_ref")
    for name in (*sums, "ratio_max"):
        assert [step[name] for step in metrics[0]] == pytest.approx(
            [step[name] for step in metrics[1]], rel=1e-3, abs=1e-6
        ), name
    assert metrics[0][-1]["kl_ref"] > 0 and any(step["num_tokens"] > 0 for step in metrics[0])
    shutil.copytree(one, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000003")
    server.resume(tmp_path / "cut", *appo)
    check_same_run(tmp_path / "cut", one, 3)


def _place(record: dict[str, Any]) -> tuple[int, int]:
    """Rollouts of a group stay in their order."""
    return record["step"], record["group_index"]


def test_fine_tuning_feeds_a_refiner_that_is_the_policy_too(server: Server, tmp_path: Path) -> None:
    """Every turn is a search here, and every search adds what was made of it."""
    tokenizer = toy.new_tokenizer(
        ["The area of Chad is 1284. Looked for: the capital of Mali. Evidence: State nothing."], 512
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = toy.new_model(tokenizer, hidden_size=32, num_layers=1, num_heads=2, max_positions=2048)
    models.export(model, tokenizer, models.full_weights(model), tmp_path / "model")
    options = (
        "--model.path",
        "model",
        "--tasks.kinds",
        '["lookup"]',
        "--rft.num_rollouts",
        20,
        "--rft.num_steps",
        2,
    )
    expert = ("--rft.keep", "all", "--rft.expert_error", 0, "--train.token_budget", 8192)
    num_turns = []
    for refiner in ("none", "policy"):
        argv = (*SMALL, *options, *expert, "--roles.refiner", refiner, "--run.dir", refiner)
        code, lines, _ = server.run("rft", *argv, cwd=tmp_path)
        assert (code, lines) == (0, [])
        num_turns.append(
            json.loads((tmp_path / refiner / "model" / "rft.json").read_text())["num_turns"]
        )
    assert num_turns[0] == 20 and num_turns[1] >= 40 and num_turns[1] % 2 == 0
