"""Group filters, the make-up of a batch, and replay."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config import Dataflow
from flowtrain.rollouts.rules import Candidate, Outcome
from flowtrain.rollouts.rules.builtin import AllGroups, Arrival, EarliestDeadline, Latest, Mixed
from flowtrain.rollouts.rules.weighted import Weighted, rounded, shares


def candidate(
    work_item: int, deadline: int = 0, position: int | None = None, kind: str = ""
) -> Candidate:
    return Candidate(
        Outcome(work_item, f"task-{work_item}", kind, (1.0, 0.0), 10),
        deadline,
        work_item if position is None else position,
    )


@pytest.mark.parametrize(
    ("rewards", "is_mixed"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0), False),
        ((0.1 + 0.2, 0.3), False),
        ((0.3, 0.31), True),
        ((1.0,), False),
        ((), False),
    ],
)
def test_dynamic_sampling_keeps_a_group_whose_rewards_differ(
    rewards: tuple[float, ...], is_mixed: bool
) -> None:
    outcome = Outcome(1, "task", "", rewards, 10)
    assert Mixed().keeps(outcome) == is_mixed
    assert AllGroups().keeps(outcome)


def test_the_earliest_deadline_comes_first_and_then_what_came_first() -> None:
    waiting = [candidate(1, 7, 3), candidate(2, 5, 4), candidate(3, 7, 1), candidate(4, 9, 2)]
    assert EarliestDeadline().select(waiting, 3, 0) == [2, 3, 1]
    assert Arrival().select(waiting, 3, 0) == [3, 4, 1]
    assert EarliestDeadline().select(waiting, 9, 0) == [2, 3, 1, 4]


def test_weights_that_divide_the_batch_give_whole_shares() -> None:
    """Weights 3 and 1 in 8 places: 6 and 2; the kind without a weight of its own weighs 1 too."""
    waiting = [
        candidate(work_item, -work_item, kind="sum" if work_item % 2 else "chain")
        for work_item in range(40)
    ]
    chosen = Weighted({"sum": 3.0}).select(waiting, 8, 5)
    expected = [39, 38, 37, 36, 35, 33, 31, 29]
    assert chosen == expected  # earliest deadlines of each: 39 37 35 33 31 29, and 38 36


def test_what_a_kind_lacks_goes_to_the_others_by_their_weights() -> None:
    """12 places, weights 2:1:1, one group of the first: 1, and the other 11 in halves."""
    sizes = {"a": 1, "b": 9, "c": 9}
    weights = {"a": Fraction(2), "b": Fraction(1), "c": Fraction(1)}
    assert shares(sizes, weights, 12) == {"a": 1, "b": Fraction(11, 2), "c": Fraction(11, 2)}
    assert shares(sizes, weights, 19) == sizes
    expected = {"a": 1, "b": 2, "c": 5}
    assert (
        shares({"a": 1, "b": 2, "c": 9}, weights, 8) == expected
    )  # 4 2 2; then b has 7/2 of 7 and is full as well


def test_a_small_share_is_rounded_up_as_often_as_it_should() -> None:
    """0.4 of 4 places: 1 in 40 % of all batches, and never none in all of them."""
    waiting = [
        candidate(work_item, kind="rare" if work_item % 10 == 0 else "common")
        for work_item in range(100)
    ]
    chosen = [
        Weighted({"rare": 1.0, "common": 9.0}).select(waiting, 4, seed) for seed in range(500)
    ]
    num_rare = Counter(
        sum(work_item % 10 == 0 for work_item in work_items) for work_items in chosen
    )
    assert set(num_rare) == {0, 1} and num_rare[1] == pytest.approx(
        200, abs=35
    )  # 3 standard deviations


WEIGHTS = st.floats(1e-6, 1e6)
KINDS = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 8), WEIGHTS), min_size=1)


@given(kinds=KINDS, num=st.integers(1, 50), ticks=st.integers(0, 999))
def test_shares_and_their_rounding(
    kinds: dict[str, tuple[int, float]], num: int, ticks: int
) -> None:
    sizes = {kind: size for kind, (size, _) in kinds.items()}
    weights = {kind: Fraction(weight) for kind, (_, weight) in kinds.items()}
    num = min(num, sum(sizes.values()))
    share = shares(sizes, weights, num)
    assert sum(share.values()) == num and all(0 < share[kind] <= sizes[kind] for kind in sizes)
    places = rounded(share, Fraction(ticks, 1000))
    assert sum(places.values()) == num
    assert all(
        abs(places[kind] - share[kind]) < 1 and 0 <= places[kind] <= sizes[kind] for kind in sizes
    )


@given(kinds=KINDS, num=st.integers(1, 20))
def test_shares_are_right_in_the_mean_of_all_roundings(
    kinds: dict[str, tuple[int, float]], num: int
) -> None:
    sizes = {kind: size for kind, (size, _) in kinds.items()}
    share = shares(
        sizes,
        {kind: Fraction(weight) for kind, (_, weight) in kinds.items()},
        min(num, sum(sizes.values())),
    )
    total = Counter[str]()
    for tick in range(100):
        total.update(rounded(share, Fraction(tick, 100)))
    assert all(abs(total[kind] - 100 * share[kind]) <= 1 for kind in sizes)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=20),
    st.integers(1, 10),
    st.integers(0, 9),
)
def test_every_selector_fills_the_batch_with_different_groups(
    waiting: list[tuple[int, str]], num: int, seed: int
) -> None:
    candidates = [
        candidate(work_item, deadline, kind=kind)
        for work_item, (deadline, kind) in enumerate(waiting, 1)
    ]
    for selector in (EarliestDeadline(), Arrival(), Weighted({"a": 0.01, "b": 5.0})):
        work_items = selector.select(candidates, num, seed)
        assert len(work_items) == len(set(work_items)) == min(num, len(candidates))
        assert set(work_items) <= set(range(1, 21))
        assert work_items == selector.select(candidates[::-1], num, seed)


def test_the_latest_come_first() -> None:
    consumed = [candidate(work_item) for work_item in (3, 1, 4, 2)]
    assert Latest().select(consumed, 3, 0) == [2, 4, 1]
    assert Latest().select(consumed, 9, 0) == [2, 4, 1, 3]
    assert Latest().select(consumed, 0, 0) == []


@pytest.mark.parametrize(
    ("num_groups", "share", "num"), [(3, 0.34, 1), (3, 0.33, 0), (100, 0.29, 29), (10, 0.7, 7)]
)
def test_the_share_is_rounded_down_but_not_for_want_of_a_bit(
    num_groups: int, share: float, num: int
) -> None:
    assert Dataflow(replay_share=share).num_replays(num_groups) == num
