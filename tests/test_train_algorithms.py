"""The shipped configs of APPO and InfoFlow as a person runs them, and APPO on two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import SMALL, Ran, Run, Server, alike, check_same_run, read, rows
from safetensors.torch import load_file
from tokenizers import Tokenizer

from flowtrain.trainer import toy
from flowtrain.trainer.model import loading as models

pytest_plugins = ("cli_runs",)

CONFIGS = Path(__file__).parents[1] / "configs"


Train = Callable[..., Ran]


@pytest.fixture
def train(run: Run, warm: Path) -> Train:
    """Trains by a shipped config, small, and checks the account of its tokens."""

    def train(name: str, *argv: object) -> Ran:
        config = ("--config", CONFIGS / f"{name}.toml", "--model.path", warm / "model")
        ran = run("run", *config, *SMALL, *argv, base=())
        # so small a run may have steps without anything to learn from, which it says
        assert all("nothing to learn from" in line for line in ran.lines)
        assert "held-out reward" in ran.out
        left = {path.name for path in ran.path.iterdir()}
        assert {"summary.json", "checkpoints", "held_out.jsonl"} <= left
        assert ran.json("manifest.json")["argv"]
        for step in ran.steps:
            check_account(step, [each for each in ran.rollouts if each["step"] == step["step"]])
        tokens = ran.json("summary.json")["tokens"]
        assert tokens["tokens/sampled"] == sum(step["tokens/sampled"] for step in ran.steps)
        assert f"tokens: {tokens['text']}" in ran.out
        return ran

    return train


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


def test_appos_config_branches_and_trains(train: Train) -> None:
    ran = train("appo", "--train.num_steps", 3)
    steps, rollouts = ran.steps, ran.rollouts
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["branch_s"] > 0 for step in steps)
    for step in steps:
        of_step = [rollout for rollout in rollouts if rollout["step"] == step["step"]]
        assert len(of_step) == 4 * 8
        for index in range(4):
            group = [rollout for rollout in of_step if rollout["group_index"] == index]
            parents = [rollout.get("branch", {}).get("parent") for rollout in group]
            assert parents[:4] == [None] * 4
            assert sorted(parents[4:]) == [0, 1, 2, 3], "one of each root"
            assert not any(turn["training"] for rollout in group[4:] for turn in rollout["turns"])
        num_own = 0
        for rollout in of_step:
            at = rollout.get("branch", {"turn": 0, "token": 0})
            num_own -= at["token"]
            num_own += sum(len(turn["response_ids"]) for turn in rollout["turns"][at["turn"] :])
        assert step["num_sampled_tokens"] == num_own
    assert not any("branch" in rollout for rollout in read(ran.path / "held_out.jsonl"))


def test_infoflows_config_rewards_sub_goals_and_gives_hints_for_a_while(
    train: Train,
) -> None:
    """Hints end after half of the steps, and evaluation has none."""
    ran = train("infoflow", "--train.num_steps", 4, "--infoflow.hint_rate", 1)
    steps, rollouts = ran.steps, ran.rollouts
    assert steps[0]["hinted_share"] > steps[2]["hinted_share"] == steps[3]["hinted_share"] == 0
    hinted = [rollout for rollout in rollouts if "hint_turn" in rollout]
    assert hinted and {rollout["kind"] for rollout in rollouts} == {"sum4", "sum5"}
    assert all(len(rollout["turns"]) > rollout["hint_turn"] >= 1 for rollout in hinted)
    for step in steps:
        shares = [rollout["sub_goals"] for rollout in rollouts if rollout["step"] == step["step"]]
        assert step["sub_goal_mean"] == pytest.approx(sum(shares) / len(shares), abs=1e-4)
        assert 0 <= min(shares) <= max(shares) <= 1
    tokenizer = Tokenizer.from_file(str(ran.path / "tokenizer.json"))
    for rollout in hinted:
        told = ["Hint:" in tokenizer.decode(turn["prompt_ids"]) for turn in rollout["turns"]]
        assert told == [number >= rollout["hint_turn"] for number in range(len(told))]
    assert not any("hint_turn" in rollout for rollout in read(ran.path / "held_out.jsonl"))


@pytest.mark.dist
def test_two_ranks_branch_and_train_like_one(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    """The same roots, branches and rewards, and the same training but for the rounding of sums; the
    reference's log-probs travel along, and A_fut sees the turns of a rollout wherever they are. Cut
    short, the run goes on as if nothing had happened.
    """
    own = "--appo.num_roots 3 --appo.spacing 2 --appo.future_scope rollout"
    more = "--appo.dual_clipped drop --algorithm.name appo --train.num_steps 3"
    appo = (*words, *own.split(), *more.split())
    ours, theirs = _on_one_and_two_ranks(server, tmp_path, *appo)
    assert sum("branch" in record for record in ours) == 3 * 4 * 5
    for branch in (record for record in theirs if "branch" in record):
        at, group = branch["branch"], _place(branch)
        roots = [each for each in theirs if _place(each) == group and "branch" not in each]
        mine, root = (each["turns"][at["turn"]] for each in (branch, roots[at["parent"]]))
        for key in ("response_ids", "response_logprobs"):
            assert mine[key][: at["token"]] == root[key][: at["token"]]
    metrics = _metrics_of_both(tmp_path, "kl_ref", "ratio_max")
    assert metrics[-1]["kl_ref"] > 0 and any(step["num_tokens"] > 0 for step in metrics)
    one = tmp_path / "1"
    shutil.copytree(one, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000003")
    server.resume(tmp_path / "cut", *appo)
    check_same_run(tmp_path / "cut", one, 3)


@pytest.mark.dist
def test_two_ranks_learn_from_a_teacher_like_one(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    """The policy is its own teacher, who reads the answer first: trees of its own, on the rank that
    trains the row.
    """
    own = "--algorithm.name distill --algorithm.equal_groups keep --train.num_steps 3"
    hint = ("--distill.hint", "It is {answer} .", "--distill.divergence", "forward_kl")
    _on_one_and_two_ranks(server, tmp_path, *words, *own.split(), *hint)
    metrics = _metrics_of_both(tmp_path, "divergence")
    assert all(step["divergence"] > 1e-3 for step in metrics)
    one, two = (
        load_file(tmp_path / f"{size}/checkpoints/step_00000003/model/model.safetensors")
        for size in (1, 2)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)


Records = list[dict[str, Any]]


def _on_one_and_two_ranks(server: Server, path: Path, *words: object) -> tuple[Records, Records]:
    """Run three steps on one rank and on two, into folders 1 and 2; returns the rollouts of both,
    the last first, which are alike.
    """
    for size in (1, 2):
        processes = server.start_ranks(size, *words, "--run.dir", path / f"{size}")
        found = [process.wait() for process in processes]
        assert found == [0] * size, [process.err.read_text()[-1500:] for process in processes]
    logs = ("trajectories.jsonl", "trajectories.rank1.jsonl")
    ours = sorted((record for name in logs for record in rows(path / "2", name)), key=_place)
    theirs = sorted(rows(path / "1", "trajectories.jsonl"), key=_place)
    assert len(ours) == 3 * 4 * 8 and all(map(alike, ours, theirs))
    return ours, theirs


def _metrics_of_both(path: Path, *names: str) -> Records:
    """The metrics of two ranks, which are those of one but for rounding."""
    ours, theirs = (read(path / size / "metrics.jsonl")[1:] for size in "21")
    for name in ("reward_mean", "num_tokens", "num_sampled_tokens", "loss", "grad_norm", *names):
        found, wanted = ([step[name] for step in steps] for steps in (ours, theirs))
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
    return ours


def _place(record: dict[str, Any]) -> tuple[int, int]:
    """Rollouts of a group stay in their order."""
    return record["step"], record["group_index"]


def test_fine_tuning_feeds_a_refiner_that_is_the_policy_too(run: Run, tmp_path: Path) -> None:
    """Every turn is a search here, and every search adds what was made of it."""
    tokenizer = toy.new_tokenizer(
        ["The area of Chad is 1284. Looked for: the capital of Mali. Evidence: State nothing."], 512
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = toy.new_model(tokenizer, hidden_size=32, num_layers=1, num_heads=2, max_positions=2048)
    models.export(model, tokenizer, models.full_weights(model), tmp_path / "model")
    options = "--model.path model --rft.num_rollouts 20 --rft.num_steps 2 --rft.keep all"
    more = "--rft.expert_error 0 --train.token_budget 8192 --tasks.kinds lookup"
    num_turns = []
    for refiner in ("none", "policy"):
        argv = (*options.split(), *more.split(), "--roles.refiner", refiner)
        ran = run(refiner, *argv, module="rft", base=SMALL, cwd=tmp_path)
        assert not ran.lines
        num_turns.append(ran.json("model/rft.json")["num_turns"])
    assert num_turns[0] == 20 and num_turns[1] >= 40 and num_turns[1] % 2 == 0
