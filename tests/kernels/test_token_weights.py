"""The averaging rules as weights, against the averages written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flowkernels import token_weights
from hypothesis import given, settings
from hypothesis import strategies as st

BOUNDS = torch.tensor([0, 3, 3, 4, 9])
"""Sequences of 3, 0, 1 and 5 tokens."""
MASK = torch.tensor([True, False, True, False, True, True, True, False, True])
"""2, 0, 0 and 4 of them are trained."""


def test_token_mean() -> None:
    """DAPO: one mean over all tokens."""
    assert token_weights(BOUNDS, 9, "token").tolist() == pytest.approx([1 / 9] * 9)
    weights = token_weights(BOUNDS, 9, "token", mask_T=MASK)
    assert weights.tolist() == pytest.approx([is_trained / 6 for is_trained in MASK.tolist()])


def test_sequence_mean() -> None:
    """GRPO: those without a token add nothing but count."""
    found = token_weights(BOUNDS, 9, "sequence").tolist()
    assert found == pytest.approx([1 / 12] * 3 + [1 / 4] + [1 / 20] * 5)
    weights = token_weights(BOUNDS, 9, "sequence", mask_T=MASK)
    eighth, sixteenth = 1 / 4 / 2, 1 / 4 / 4
    expected = [eighth, 0, eighth, 0, sixteenth, sixteenth, sixteenth, 0, sixteenth]
    assert weights.tolist() == pytest.approx(expected)


def test_constant() -> None:
    """Dr.GRPO: the sum by four sequences of at most 10 tokens, whatever their lengths."""
    assert token_weights(BOUNDS, 9, "constant", length=10).tolist() == pytest.approx([1 / 40] * 9)
    weights = token_weights(BOUNDS, 9, "constant", length=10, mask_T=MASK)
    assert weights.tolist() == pytest.approx([is_trained / 40 for is_trained in MASK.tolist()])


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    sequences=st.lists(
        st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=5), min_size=1, max_size=6
    ),
    length=st.integers(1, 9),
)
def test_weighted_sums_are_the_averages(
    sequences: list[list[tuple[float, bool]]], length: int
) -> None:
    """Averages of any numbers, sequence by sequence."""
    tokens = [token for sequence in sequences for token in sequence]
    bounds = torch.tensor([0] + [len(sequence) for sequence in sequences]).cumsum(0)
    numbers = torch.tensor([x for x, _ in tokens])
    mask = torch.tensor([is_trained for _, is_trained in tokens], dtype=torch.bool)
    trained = [[x for x, is_trained in sequence if is_trained] for sequence in sequences]
    means = [sum(kept) / len(kept) if kept else 0.0 for kept in trained]
    total, count = sum(map(sum, trained)), sum(map(len, trained))
    expected = {
        "token": total / max(count, 1),
        "sequence": sum(means) / len(sequences),
        "constant": total / (len(sequences) * length),
    }
    for averaging, average in expected.items():
        options: dict[str, Any] = {"length": length} if averaging == "constant" else {}
        weights = token_weights(bounds, len(tokens), averaging, mask_T=mask, **options)
        assert weights.dtype == torch.float32 and weights.shape == (len(tokens),)
        assert (weights * numbers).sum().item() == pytest.approx(average, rel=1e-5, abs=1e-6)
        assert (weights[~mask] == 0).all()


@pytest.mark.parametrize("averaging", ["token", "sequence", "constant"])
def test_nothing_to_average_over(averaging: Any) -> None:
    options: dict[str, Any] = {"length": 4} if averaging == "constant" else {}
    for bounds in ([0], [0, 0, 0]):
        assert token_weights(torch.tensor(bounds), 0, averaging, **options).shape == (0,)
    untrained = token_weights(
        BOUNDS, 9, averaging, mask_T=torch.zeros(9, dtype=torch.bool), **options
    )
    assert untrained.tolist() == [0.0] * 9
