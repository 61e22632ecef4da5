"""Which prompts are rolled out: traces worked out by hand, and what holds for every trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.rollouts.rules import Outcome, PromptFilter
from flowtrain.rollouts.rules.builtin import AllPrompts
from flowtrain.rollouts.rules.curriculum import Curriculum
from flowtrain.rollouts.rules.greso import LEAST, MOST, Greso

GOOD, BAD, MIXED = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)


def outcome(task: str, rewards: Sequence[float]) -> Outcome:
    return Outcome(1, task, "", tuple(rewards), 10)


def probability(prompt_filter: PromptFilter, task: str) -> float:
    """Estimate the probability of being admitted, to 2^-40, from the decisions alone."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if prompt_filter.admits(task, "", middle) else (low, middle)
    return high


def probabilities(prompt_filter: PromptFilter) -> list[float]:
    return [pytest.approx(probability(prompt_filter, task), abs=1e-9) for task in "abcd"]


def test_greso_by_hand() -> None:
    """Written as z of kind and p^z; p starts at 0.5 and changes by 0.1, targets are 1/4 easy and
    1/2 hard, floors 0.1 and 0.4.
    """
    greso = Greso(
        start=0.5, step=0.1, target_easy=0.25, target_hard=0.5, floor_easy=0.1, floor_hard=0.4
    )

    def see(*groups: tuple[str, Sequence[float]]) -> None:
        for task, rewards in groups:
            greso.observe(outcome(task, rewards))

    assert probabilities(greso) == [1, 1, 1, 1]
    see(("a", GOOD), ("b", BAD), ("c", MIXED), ("d", BAD))
    greso.on_version(1)  # the first epoch: p stays
    assert probabilities(greso) == [0.5, 0.5, 1, 0.5]  # a: 1 easy; b: 1 hard; c: 0; d: 1 hard

    see(("a", GOOD), ("b", GOOD))
    expected = [0.25, 0.5, 1, 0.5]
    assert probabilities(greso) == expected  # a: 2 easy, 0.5^2; b: 1 easy, for the kind changed
    greso.on_version(2)  # easy 2 of 2 >= 1/4: p 0.4; hard 0 of 2 < 1/2: p 0.6
    assert probabilities(greso) == [0.16, 0.4, 1, 0.6]
    greso.on_version(3)  # nothing was seen
    assert probabilities(greso) == [0.16, 0.4, 1, 0.6]

    see(("d", BAD), ("a", MIXED), ("b", GOOD), ("c", GOOD))
    greso.on_version(4)  # easy 2 of 4 >= 1/4: p 0.3; hard 1 of 4 < 1/2: p 0.7
    expected = [1, 0.1, 0.3, 0.49]
    assert (
        probabilities(greso) == expected
    )  # a: 0; b: 2 easy, 0.09 below the floor; c: 1 easy; d: 2 hard, 0.7^2
    see(("d", BAD), ("b", BAD))
    assert probabilities(greso) == [1, 0.7, 0.3, 0.4]  # b: 1 hard; d: 3 hard, 0.343 below the floor


def test_greso_counts_a_share_that_is_just_at_its_target_as_reached() -> None:
    greso = Greso(step=0.1, target_easy=0.5, target_hard=0.25)
    for task, rewards in (("a", MIXED), ("a", GOOD), ("b", GOOD), ("b", MIXED)):
        greso.observe(outcome(task, rewards))
    greso.on_version(1)
    assert (greso.easy.chance, greso.hard.chance) == (0.4, 0.6)


def test_greso_keeps_p_between_its_limits() -> None:
    greso = Greso()
    for version in range(100):
        greso.observe(outcome("a", GOOD))
        greso.on_version(version)
    assert (greso.easy.chance, greso.hard.chance) == (LEAST, MOST)


def test_greso_learns_nothing_from_a_single_rollout() -> None:
    greso = Greso(step=0.1)
    for rewards in ((1.0,), (), (1.0,)):
        greso.observe(outcome("a", rewards))
    greso.on_version(1)
    assert probability(greso, "a") == 1 and greso.easy.chance == 0.5


def test_curriculum_by_hand() -> None:
    """e = 0.2: probability 0.2 + 0.8 * 4 s (1 - s)."""
    curriculum = Curriculum(exploration=0.2, memory=0.75)
    for task, rewards in (("a", GOOD), ("b", BAD), ("c", (1, 0, 0, 0))):
        curriculum.observe(outcome(task, rewards))
    expected = [0.2, 0.2, 0.8, 1]
    assert (
        probabilities(curriculum) == expected
    )  # c: s = 1/4, 4 * 3/16 = 0.75, 0.2 + 0.6; d was never tried
    curriculum.observe(outcome("a", BAD))  # s = 0.75
    curriculum.observe(
        outcome("a", MIXED)
    )  # s = 0.75 * 0.75 + 0.25 * 0.5 = 0.6875; 4 s (1 - s) = 0.859375
    curriculum.observe(outcome("b", ()))
    assert probabilities(curriculum) == [0.8875, 0.2, 0.8, 1]


def test_curriculum_takes_a_reward_above_one_as_one() -> None:
    curriculum = Curriculum(exploration=0.2)
    curriculum.observe(outcome("a", (1.3, 1.3)))
    assert probability(curriculum, "a") == pytest.approx(0.2)


PROMPT_FILTERS: dict[str, tuple[Callable[[], PromptFilter], float]] = {
    "all": (AllPrompts, 1.0),
    "greso": (lambda: Greso(step=0.2, floor_easy=0.15, floor_hard=0.25), 0.15),
    "curriculum": (lambda: Curriculum(exploration=0.15), 0.15),
}
"""How to make one, and the least probability with which any prompt is to come again."""

Event = tuple[str, Sequence[float]] | int
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abcd"), st.lists(st.sampled_from((0.0, 0.3, 1.0)), max_size=3)),
        st.integers(1, 9),
    ),
    max_size=40,
)


def tell(prompt_filter: PromptFilter, event: Event) -> None:
    if isinstance(event, int):
        prompt_filter.on_version(event)
    else:
        prompt_filter.observe(outcome(*event))


@pytest.mark.parametrize("name", PROMPT_FILTERS)
@given(events=EVENTS)
def test_being_asked_changes_nothing(name: str, events: list[Event]) -> None:
    """One that is told a ledger's history decides like one that was asked all along."""
    make, _ = PROMPT_FILTERS[name]
    asked, told = make(), make()
    for event in events:
        for task in "abcd":
            asked.admits(task, "", 0.3)
        tell(asked, event)
        tell(told, event)
    found = [probability(asked, task) for task in "abcd"]
    assert found == [probability(told, task) for task in "abcd"]


@pytest.mark.parametrize("name", PROMPT_FILTERS)
@given(events=EVENTS)
def test_no_prompt_starves(name: str, events: list[Event]) -> None:
    make, least = PROMPT_FILTERS[name]
    prompt_filter = make()
    for event in events:
        tell(prompt_filter, event)
    assert all(prompt_filter.admits(task, "", least - 1e-6) for task in "abcd")


@pytest.mark.parametrize("name", PROMPT_FILTERS)
@given(events=EVENTS)
def test_a_prompt_that_was_never_tried_is_always_rolled_out(name: str, events: list[Event]) -> None:
    make, _ = PROMPT_FILTERS[name]
    prompt_filter = make()
    for event in events:
        tell(prompt_filter, event)
    assert prompt_filter.admits("new", "", 1 - 2**-53)
