"""Beginnings that sequences share."""

from __future__ import annotations


def num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Count the items that both begin with; by halving, because slices compare fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
