"""Callers side by side share calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flowtrain.utils.shared_calls import Together


class Doubling:
    """Doubles numbers, and remembers what it was asked together."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.together = Together(self.many, size=3)

    async def many(self, keys: Sequence[int]) -> list[int]:
        self.calls.append(list(keys))
        await asyncio.sleep(0)
        if 13 in keys:
            raise ValueError("unlucky")
        return [2 * key for key in keys]


def test_side_by_side_in_batches_and_equal_keys_once() -> None:
    doubling = Doubling()

    async def ask(*keys: int) -> list[int]:
        return await asyncio.gather(*map(doubling.together, keys))

    assert asyncio.run(ask(1, 2, 1, 3, 4, 2)) == [2, 4, 2, 6, 8, 4]
    assert doubling.calls == [[1, 2, 3], [4]]
    assert asyncio.run(ask(1)) == [2], "nothing is kept"
    assert len(doubling.calls) == 3


def test_who_shares_a_call_shares_its_failure_and_nobody_elses_cancellation() -> None:
    doubling = Doubling()

    async def fail() -> None:
        failed = await asyncio.gather(
            *map(doubling.together, (1, 13, 2, 5)), return_exceptions=True
        )
        assert [type(each) for each in failed] == [ValueError] * 3 + [int]
        assert await doubling.together(1) == 2, "asked anew"
        impatient, patient = (asyncio.ensure_future(doubling.together(7)) for _ in range(2))
        await asyncio.sleep(0)
        impatient.cancel()
        assert await patient == 14
        with pytest.raises(asyncio.CancelledError):
            await impatient

    asyncio.run(fail())
