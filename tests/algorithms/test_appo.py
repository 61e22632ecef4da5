"""APPO's dual groups, on examples worked by hand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import make
import pytest
import torch
from batches import batch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.algorithms import load_algorithm
from flowtrain.config.options import parse
from flowtrain.records import BranchPoint, Group, Trajectory


def rollout(reward: float, *lengths: int, branch: tuple[int, int, int] | None = None) -> Trajectory:
    """`branch`: (root, turn, token)."""
    point = None if branch is None else BranchPoint(*branch, score=1.0)
    return make.rollout(*map(make.turn, lengths), reward=reward, branch=point)


appo = functools.partial(batch, "appo")


def advantages(*trajectories: Trajectory, **options: str) -> list[list[float]]:
    found = appo([Group(0, trajectories)], appo=options)
    return [list(sample.advantages) for sample in found.samples]


single = functools.partial(advantages, advantage_groups="single")
"""The advantages with one group."""


def approx(value: Any) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


A = 0.5 / 0.500001
"""The advantage of rewards 1 and 0: mean 1/2, population std 1/2."""


def test_two_groups_by_hand() -> None:
    """Roots 1, 0: +-A. Branches 0, 1 of root 0 at token 1 and 3: -A and +A. Token 0 shares both
    (mean 0), 1 and 2 the second.
    """
    roots = rollout(1, 4), rollout(0, 2)
    branches = rollout(0, 4, branch=(0, 0, 1)), rollout(1, 4, branch=(0, 0, 3))
    assert advantages(*roots, *branches) == [approx([A + 0, A + A, A + A, A]), approx([-A, -A])]


def test_a_branch_credits_every_turn_before_it() -> None:
    """It left turn 1 (the second) at token 2: all of turn 0, tokens 0 and 1 of turn 1, nothing of
    turn 2.
    """
    roots = rollout(1, 2, 3, 2), rollout(0, 1)
    branches = rollout(1, 2, 3, branch=(0, 1, 2)), rollout(0, 1, branch=(1, 0, 0))
    first, second, third, other = advantages(*roots, *branches)
    expected = (approx([2 * A] * 2), approx([2 * A, 2 * A, A]), approx([A, A]))
    assert (first, second, third) == expected
    assert other == approx([-A]), "a branch at the first token shares none"


def test_one_group_by_hand() -> None:
    """Roots 4, 0, 2 and a branch 2: mean 2, std sqrt(2), and the branch has 0 like the last root.
    Roots 1, 1 and branches 0, 2 of root 0 at tokens 1 and 3: roots 0, branches -C and +C with std
    sqrt(1/2). Branches alone would have std 1.
    """
    lopsided = rollout(4, 3), rollout(0, 1), rollout(2, 9, branch=(0, 0, 1)), rollout(2, 9)
    half = 2 / (2**0.5 + 1e-6)
    assert single(*lopsided) == [approx([half] * 3), approx([-half]), approx([0.0] * 9)]
    roots = rollout(1, 4), rollout(1, 2)
    branches = rollout(0, 9, branch=(0, 0, 1)), rollout(2, 9, branch=(0, 0, 3))
    c = 1 / (0.5**0.5 + 1e-6)
    assert single(*roots, *branches) == [approx([0, c, c, 0]), approx([0, 0])]
    alone = 1 / (1 + 1e-6)
    assert advantages(*roots, *branches) == [approx([0, alone, alone, 0]), approx([0, 0])]


def test_one_group_compares_roots_with_branches() -> None:
    """Roots 1, 1 and branches 0, 0: apart nobody differs, and nothing is trained; together std
    1/2: roots +A, branches -A, which cancel on the token that root 0 shares with its branch.
    """
    flat = (
        rollout(1, 2),
        rollout(1, 2),
        rollout(0, 9, branch=(0, 0, 1)),
        rollout(0, 9, branch=(1, 0, 0)),
    )
    assert advantages(*flat) == []
    assert single(*flat) == [approx([0, A]), approx([A, A])]
    failed = replace(rollout(0, 5, branch=(1, 0, 1)), reward=None, error="timeout")
    assert single(*flat, failed) == single(*flat), "failed rollouts are no part of it"


def test_a_branch_may_outlive_its_root() -> None:
    """A reward that failed takes the root away; its branch is still compared with the other."""
    failed = replace(rollout(0, 2), reward=None, error="reward: timeout")
    others = rollout(1, 2), rollout(0, 2)
    branches = rollout(1, 2, branch=(0, 0, 1)), rollout(0, 2, branch=(1, 0, 1))
    assert advantages(failed, *others, *branches) == [approx([0, A]), approx([-A, -A])]


@pytest.mark.parametrize(("token", "shared"), [(0, 0), (2, 2), (3, 3)])
def test_branches_at_the_first_and_the_last_token(token: int, shared: int) -> None:
    root, _ = advantages(
        rollout(1, 3),
        rollout(0, 3),
        rollout(1, 3, branch=(0, 0, token)),
        rollout(0, 3, branch=(1, 0, 0)),
    )
    assert root == approx([2 * A] * shared + [A] * (3 - shared))


def test_only_roots_are_trained_and_every_token_counts_alike() -> None:
    group = Group(
        3,
        (
            rollout(1, 4, 2),
            rollout(0, 2, 0),
            rollout(0, 9, branch=(0, 1, 1)),
            rollout(1, 9, branch=(0, 0, 2)),
        ),
    )
    out = appo([group], num_minibatches=2, num_groups=4)
    found = [len(s.response_ids) for s in out.samples]
    assert found == [4, 2, 2], "neither branches nor turns without tokens"
    assert out.num_filtered == {"empty": 1}
    assert all(set(s.loss_weights) == {1.0} and s.minibatch == 1 for s in out.samples)
    assert [s.sample_id for s in out.samples] == [(3, 0, 0), (3, 0, 1), (3, 1, 0)]


def test_groups_without_signal_are_left_out() -> None:
    flat = (
        rollout(1, 2),
        rollout(1, 2),
        rollout(1, 2, branch=(0, 0, 1)),
        rollout(1, 2, branch=(1, 0, 1)),
    )
    assert appo([Group(0, flat)]).num_groups_dropped == 1 and appo([Group(0, flat)]).samples == ()
    kept = appo([Group(0, flat)], algorithm={"equal_groups": "keep"})
    assert kept.num_groups_dropped == 0 and {s.advantages for s in kept.samples} == {(0.0, 0.0)}
    in_branches = (*flat[:3], replace(flat[3], reward=0.0))
    out = appo([Group(0, in_branches)])
    assert out.num_groups_dropped == 0
    assert [list(s.advantages) for s in out.samples] == [approx([A, 0]), approx([-A, 0])]


def test_whole_rollouts_after_the_branches_are_roots() -> None:
    trajectories = rollout(1, 1), rollout(0, 1), rollout(1, 1, branch=(1, 0, 0)), rollout(1, 1)
    assert len(appo([Group(0, trajectories)]).samples) == 3


LOG_RATIOS = torch.tensor([0.3, 0.4, -0.1, 0.3, 1.5, 1.5])
BOUNDS = torch.tensor([0, 3, 4, 6])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--appo.future_scope", "rollout"), [2.2, 2.2, 2.0, 2.2, 0.0, 0.0]),
        (("--appo.dual_clipped", "drop"), [3.3, 3.3, 3.0, 3.3, 0.0, 0.0]),
        (
            ("--appo.dual_clipped", "drop", "--appo.future_coef", "2", "--appo.future_high", "1.1"),
            [4.8, 4.8, 4.5, 4.8, 0.0, 0.0],
        ),
    ],
)
def test_what_looks_at_the_mini_batch_has_the_options_of_the_run(
    words: tuple[str, ...], wanted: list[float]
) -> None:
    """A_fut of the first two tokens and the fourth is above 1.2, of the third exp(-.1), so 1; two
    tokens of the last sequence, of four in six that stay, are dual-clipped.
    """
    config = parse(["--algorithm.name", "appo", *words])
    algorithm = load_algorithm(config)
    factor = algorithm.minibatch_factor()
    assert factor is not None and factor.joins_turns == ("rollout" in words)
    advantage_T = torch.tensor([1.0, 1, 1, 1, -1, -1])
    assert factor.of(LOG_RATIOS, advantage_T, torch.ones(6), BOUNDS).tolist() == approx6(wanted)
    spec = algorithm.loss_spec()
    assert algorithm.token_loss(spec) == spec, "the factor is applied once"


@pytest.mark.parametrize(
    "words", [(), ("--appo.future_scope", "rollout", "--appo.future_coef", "0")]
)
def test_by_default_and_without_a_future_no_pass_is_added(words: tuple[str, ...]) -> None:
    config = parse(["--algorithm.name", "appo", *words])
    assert config is not None and load_algorithm(config).minibatch_factor() is None


def approx6(value: list[float]) -> Any:
    return pytest.approx(value, rel=1e-6)


REWARDS = st.sampled_from([0.0, 0.5, 1.0])


@given(
    st.lists(
        st.tuples(REWARDS, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        min_size=2,
        max_size=4,
    ),
    st.lists(
        st.tuples(REWARDS, st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), max_size=5
    ),
)
def test_without_its_branches_a_token_has_the_advantage_of_its_rollout(
    roots: Sequence[tuple[float, list[int]]], branches: Sequence[tuple[float, int, int, int]]
) -> None:
    """Against the definition; the branches' part averages those that share the token."""
    made = [rollout(reward, *lengths) for reward, lengths in roots]
    forks = [
        rollout(r, 1, branch=(n % len(made), t % len(made[n % len(made)].turns), k))
        for r, n, t, k in branches
    ]
    samples = iter(appo([Group(0, (*made, *forks))]).samples)
    plain, of_forks = _normal([t.reward for t in made]), _normal([t.reward for t in forks])
    wanted = []
    for number, root in enumerate(made):
        for index, each in enumerate(root.turns):
            row = []
            for token in range(len(each.calls["planner"].response_ids)):
                points = [(f.branch, a) for f, a in zip(forks, of_forks, strict=True)]
                mine = [
                    a
                    for p, a in points
                    if p and p.parent == number and (index, token) < (p.turn, p.token)
                ]
                row.append(plain[number] + (sum(mine) / len(mine) if mine else 0.0))
            wanted.append(row)
    if any(any(row) for row in wanted):
        found = [list(s.advantages) for s in samples]
        assert found == [pytest.approx(row, abs=1e-9) for row in wanted]
    else:
        assert not list(samples)


def _normal(rewards: Sequence[float | None]) -> list[float]:
    values = [r for r in rewards if r is not None]
    mean = sum(values) / max(len(values), 1)
    std = (sum((v - mean) ** 2 for v in values) / max(len(values), 1)) ** 0.5
    return [(v - mean) / (std + 1e-6) for v in values]
