from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.logging.page.log import Place, choose, find_rollouts, spread
from flowtrain.records import UserError


def places(split: str, steps: range, num_groups: int, size: int, num_right: int) -> list[Place]:
    """Groups of a step have 0, 1, ... right answers, by turns."""
    return [
        Place(
            Path("x"), 0, 1, split, step, group, member, float(member < (group % (num_right + 1)))
        )
        for step in steps
        for group in range(num_groups)
        for member in range(size)
    ]


@given(
    st.integers(0, 12),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 30),
    st.integers(0, 300),
)
def test_chosen_are_whole_groups_within_the_number(
    num_steps: int, num_groups: int, size: int, num_held_out: int, number: int
) -> None:
    logged = places("train", range(1, num_steps + 1), num_groups, size, size) + places(
        "held-out", range(1), num_held_out, 1, 1
    )
    chosen = choose(logged, number)
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(logged)
    found = {place.group for place in chosen} & {place.group for place in set(logged) - set(chosen)}
    assert found == set(), "no group is torn"
    assert len(chosen) <= max(number, size if number else 0)
    assert chosen == sorted(
        chosen, key=lambda place: (place.step, place.split, place.group_index, place.member)
    )
    if number >= len(logged):
        assert len(chosen) == len(logged)
    if number and logged:
        assert chosen


def test_groups_are_chosen_at_even_distances() -> None:
    chosen = choose(places("train", range(1, 101), 16, 8, 8), 80)
    steps = sorted({place.step for place in chosen})
    assert len(chosen) == 80 and len(steps) == 10 and (steps[0], steps[-1]) == (1, 100)
    assert all(b - a in (11, 12) for a, b in pairwise(steps))


def test_a_quarter_is_held_out_as_long_as_there_is_enough() -> None:
    logged = places("train", range(1, 101), 4, 8, 8) + places(
        "held-out", range(0, 100, 10), 50, 1, 1
    )
    held_out = [place for place in choose(logged, 400) if place.split == "held-out"]
    assert len(held_out) == 100 and {place.step for place in held_out} == set(range(0, 100, 10))
    few = places("train", range(1), 1, 8, 8) + places("held-out", range(10), 50, 1, 1)
    assert len(choose(few, 100)) == 98 + 2


def test_one_group_is_shown_even_if_it_is_larger_than_asked() -> None:
    assert len(choose(places("train", range(3), 2, 8, 8), 5)) == 8
    assert choose(places("train", range(3), 2, 8, 8), 0) == []


@given(st.lists(st.integers(), max_size=50), st.integers(-3, 60))
def test_spread(items: list[int], number: int) -> None:
    chosen = spread(list(enumerate(items)), number)
    assert len(chosen) == min(max(number, 0), len(items))
    assert chosen == sorted(set(chosen))
    if number > 1 and items:
        assert chosen[0][0] == 0 and chosen[-1][0] == len(items) - 1


def test_every_rollout_is_found_where_it_lies_in_the_files_of_all_ranks(tmp_path: Path) -> None:
    line = '{{"step": {}, "group_index": {}, "reward": {}, "answer": "Ä{}"}}\n'
    (tmp_path / "trajectories.jsonl").write_text(
        "".join(line.format(1, group, 1.0, n) for n, group in enumerate((0, 0, 2)))
    )
    (tmp_path / "trajectories.rank1.jsonl").write_text(
        line.format(1, 1, 0.0, 3) + '{"step": 1, "group_ind'
    )
    found = find_rollouts(tmp_path, "train")
    expected = [(0, 0, 1.0), (0, 1, 1.0), (2, 0, 1.0), (1, 0, 0.0)]
    assert [(place.group_index, place.member, place.reward) for place in found] == expected
    assert [place.read()["answer"] for place in found] == ["Ä0", "Ä1", "Ä2", "Ä3"]
    assert find_rollouts(tmp_path, "held-out") == []


def test_damage_within_a_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"held_out\.jsonl line 2 is not a JSON object"):
        find_rollouts(tmp_path, "held-out")
