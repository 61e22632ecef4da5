"""The simulated schedule of attention's programs, beside what was measured on an H200."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import schedule
from bench.attention import SplitTree, cases
from bench.schedule import Blocks, makespan


@given(st.lists(st.integers(1, 50), min_size=1, max_size=400))
def test_a_schedule_is_neither_shorter_than_an_even_one_nor_idle_while_work_waits(
    costs: list[int],
) -> None:
    taken = [cost + schedule._START for cost in costs]
    even, longest = sum(taken) / schedule._PROCESSORS, max(taken)
    assert max(even, longest) <= makespan(costs) <= even + longest


def test_predictions_are_within_a_twelfth_of_what_was_measured() -> None:
    """Of rows that the chain, whose time sets the scale, says nothing about."""
    rows = schedule.measured_rows()
    base = Blocks.of(rows["1 chain"])
    for layout in ("3 turns", "10 turns", "4 chains"):
        found = schedule.predicted(rows[layout], "0.5b", base)
        for name in ("forward_ms", "backward_ms"):
            assert found[name] == pytest.approx(
                schedule._measured(layout, "0.5b")[name], rel=1 / 12
            )


def test_a_split_grid_has_the_same_products_in_smaller_programs() -> None:
    own = Blocks([1, 2, 2], [3, 1, 1])
    whole, split = (sorted(own.backward(4, 2, is_split)) for is_split in (False, True))
    assert sum(whole) == sum(split)
    assert max(whole) == 4 * 3 * 2 == 2 * max(split)


def test_the_lists_of_split_groups_are_made_once_per_row() -> None:
    """With the values of the tree that is not split."""
    case = next(cases(256, (4, 2, 16), torch.device("cpu"), has_backward=False))
    tree = SplitTree.of(case.subtree_end_N)
    first = tree.attend(*case.inputs, scaling=0.25)
    lists = tree.batched
    assert torch.equal(tree.attend(*case.inputs, scaling=0.25), first)
    assert tree.batched is lists
