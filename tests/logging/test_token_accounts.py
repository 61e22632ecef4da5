"""The account of a step's tokens is exact, for any rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import make
import pytest
from batches import flow_grpo
from hypothesis import given, settings
from hypothesis import strategies as st
from make import call

from flowtrain.algorithms import filter_samples
from flowtrain.logging.tally import Tally
from flowtrain.logging.token_counts import account, count_tokens
from flowtrain.records import (
    BranchPoint,
    Group,
    TokenAccount,
    Trajectory,
    Turn,
    account_of,
)
from flowtrain.records.token_account import FAILED, LOST, NO_SIGNAL, NO_WEIGHT, SKIPPED, TRAINED
from flowtrain.trainer.packing import pack

MAX_POSITIONS, VOCAB_SIZE = 12, 50


def turn(num_tokens: int, num_prompt: int = 3, token: int = 7, verifier: int = 0) -> Turn:
    calls = {"planner": call([token] * num_tokens, num_prompt)}
    if verifier:
        calls["verifier"] = call([token] * verifier, 2)
    return make.turn(calls=calls)


def rollout(*turns: Turn, reward: float = 0.0, error: str = "") -> Trajectory:
    return make.rollout(*turns, reward=None if error else reward, error=error)


def found(groups: list[Group], sampled: int | None = None, **lost: int) -> TokenAccount:
    """Account as a step does; `dropped` tokens leave the loss, a step of `skipped` is not taken."""
    batch = filter_samples(flow_grpo(groups), MAX_POSITIONS, VOCAB_SIZE)
    rows = pack(batch.samples, 1, 64)
    tally = Tally()
    count_tokens(tally, groups, batch, rows, policy="planner", sampled=sampled)
    weighted = sum(int((row.loss_weight_T != 0).sum()) for part in rows for row in part)
    skipped = lost.get("skipped", 0)
    return account(tally, weighted - skipped - lost.get("dropped", 0), skipped)


ROLLOUT = st.tuples(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([7, 7, 99])), max_size=3),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(["", "", "", "generator: down"]),
)


@settings(max_examples=100)
@given(
    drawn=st.lists(st.lists(ROLLOUT, min_size=2, max_size=4), min_size=1, max_size=3),
    lost=st.integers(0, 20),
)
def test_any_rollouts_add_up(drawn: list[Any], lost: int) -> None:
    groups = [
        Group(
            index,
            tuple(
                rollout(*(turn(n, token=token) for n, token in turns), reward=reward, error=error)
                for turns, reward, error in members
            ),
        )
        for index, members in enumerate(drawn)
    ]
    made = sum(n for members in drawn for turns, _, _ in members for n, _ in turns)
    failed = sum(n for m in drawn for turns, _, error in m if error for n, _ in turns)
    learned = [m for m in drawn if len({reward for _, reward, error in m if not error}) > 1]
    whole = [t for m in learned for turns, _, error in m if not error for t in turns]
    result = found(groups, made + lost)
    assert result.difference == 0 and result.sampled == made + lost
    assert result.fates.get(LOST, 0) == lost
    assert result.fates.get(FAILED, 0) == failed
    assert result.fates.get("token", 0) == sum(n for n, token in whole if token == 99)
    assert result.fates.get(TRAINED, 0) == sum(n for n, token in whole if token != 99)
    assert account_of(result.metrics()) == result


def test_branches_share_tokens_of_their_root() -> None:
    root = rollout(turn(4, verifier=2), turn(5, verifier=3), reward=1.0)
    branch = replace(
        rollout(turn(4, verifier=2), turn(6, verifier=1)),
        branch=BranchPoint(parent=0, turn=1, token=2, score=0.0),
    )
    assert (branch.num_tokens("planner"), branch.num_shared("planner")) == (10, 6)
    assert (branch.num_tokens("verifier"), branch.num_shared("verifier")) == (3, 2)
    unborn = replace(branch, turns=(turn(4),))  # it failed before its first turn
    assert (unborn.num_tokens("planner"), unborn.num_shared("planner")) == (4, 4)
    result = found([Group(0, (root, branch))], sampled=9 + 4)
    assert result == TokenAccount(13, 6, 0, {TRAINED: 19})
    assert found([Group(0, (root, branch))]) == result  # nodes' rollouts tell it themselves
    lost = found([Group(0, (root, branch))], sampled=9 + 4 + 2)
    assert lost == TokenAccount(15, 6, 0, {TRAINED: 19, LOST: 2})


def test_what_the_trainer_drops_or_skips_is_not_trained() -> None:
    group = Group(0, (rollout(turn(4), reward=1.0), rollout(turn(5))))
    result = found([group], sampled=9, dropped=2, skipped=3)
    assert result.fates == {TRAINED: 4, NO_WEIGHT: 2, SKIPPED: 3} and result.difference == 0


def test_it_says_what_no_engine_has_returned(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(0, (rollout(turn(4), reward=1.0), rollout(turn(5))))
    result = found([group], sampled=8)
    assert result.difference == -1
    assert "8 sampled = 9 trained + -1 UNACCOUNTED FOR" in caplog.text


def test_the_equation_in_words() -> None:
    fates = {NO_SIGNAL: 1000, TRAINED: 2345, LOST: 0}
    text = TokenAccount(3000, 300, 45, fates).text()
    assert text == (
        "3,000 sampled + 300 shared by branches + 45 trained again"
        " = 2,345 trained + 1,000 no signal"
    )
    text = TokenAccount(9, fates={LOST: 2, NO_SIGNAL: 4, FAILED: 4, TRAINED: 0}).text()
    assert text == "9 sampled = 0 trained + 4 failed + 4 no signal + 2 lost + -1 UNACCOUNTED FOR"
    one = TokenAccount(1, 0, 0, {TRAINED: 1})
    assert one + TokenAccount(2, 1, 0, {LOST: 3}) == TokenAccount(3, 1, 0, {TRAINED: 1, LOST: 3})
