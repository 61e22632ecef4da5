"""The time that the linear loss should take, against sums by hand."""

from __future__ import annotations

import pytest

from bench.linear_cost import linear_cost


def test_the_parts_are_those_of_a_sum_by_hand() -> None:
    """Two chunks at 1 TFLOP/s and 1 TB/s: 1e9 FLOPs or bytes take a millisecond."""
    cost = linear_cost(2000, 500, 1000, chunk_rows=1000, tflops=1.0, tb_s=1.0)
    assert cost == pytest.approx(
        {
            "products": 3 * 2 * 2000 * 500 * 1000 / 1e9,
            "row kernel": 4 * 2000 * 1000 / 1e9,
            "dW in fp32": (4 + 8) * 1000 * 500 / 1e9,
            "dX": 2 * 2000 * 500 / 1e9,
            "dW handed over": (4 + 2) * 1000 * 500 / 1e9,
            "sum": 6.0 + 0.008 + 0.006 + 0.002 + 0.003,
        }
    )


@pytest.mark.parametrize(
    ("options", "weight", "handed_over"),
    [
        ({"chunk_rows": 2000}, 4, 6),
        ({"chunk_rows": 1999}, 12, 6),
        ({"chunk_rows": 500}, 28, 6),
        ({"chunk_rows": 1000, "into_buffer": True}, 16, 0),
        ({"chunk_rows": 1000, "element_bytes": 4}, 12, 0),
    ],
)
def test_the_first_chunk_writes_and_the_others_read_too(
    options: dict[str, int], weight: int, handed_over: int
) -> None:
    cost = linear_cost(2000, 500, 1000, tb_s=1.0, **options)
    assert cost["dW in fp32"] == pytest.approx(weight * 5e5 / 1e9)
    assert cost["dW handed over"] == pytest.approx(handed_over * 5e5 / 1e9)


def test_no_tokens_cost_no_product() -> None:
    cost = linear_cost(0, 500, 1000)
    assert cost["products"] == cost["row kernel"] == cost["dW in fp32"] == 0
