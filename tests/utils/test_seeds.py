"""Seeds from names: written as numbers, since a run that resumes elsewhere must find them again."""

from __future__ import annotations

import pytest

from flowtrain.utils.seeds import derive_seed, derive_uniform


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0,), 4761921975702974394),
        ((7, "branch", 3), 2341560993556552480),
        (("é", 1), 7676344259917704307),
        ((-1, ""), 2553221135848197338),
    ],
)
def test_seeds_are_the_same_in_every_process_and_on_every_machine(
    parts: tuple[int | str, ...], seed: int
) -> None:
    assert derive_seed(*parts) == seed


def test_parts_do_not_run_together() -> None:
    assert len({derive_seed(*parts) for parts in ((1, 23), (12, 3), (123,), ("", 123))}) == 4


def test_a_uniform_number_is_that_of_its_seed() -> None:
    assert derive_uniform(0) == 0.5162886151263629
    draws = [derive_uniform("draw", number) for number in range(1000)]
    assert 0 <= min(draws) < 0.01 and 0.99 < max(draws) < 1
