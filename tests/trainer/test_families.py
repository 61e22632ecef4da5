"""A row of many samples, whatever it shares, gives the loss and the gradients of the samples one by
one under transformers' own eager attention; `family_cases.py` has the families.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from family_cases import (
    CASES,
    RECURRENT,
    alone,
    check_equal,
    families,
    fp64_rule,
    in_fp64_if_recurrent,
    model_of,
    on_rows,
    prepare,
    sample_trees,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.families import TRAINED, config_of, parity, samples
from flowtrain.records import Sample
from flowtrain.trainer.attention.flex import padded
from flowtrain.trainer.packing import pack_row, pack_rows

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "families.json"
WINDOWED = [name for name in ("gemma3_text", "gpt_oss", "granite_swa", "mistral") if name in CASES]
"""Two kinds of layers; the same with sinks, two ways; one kind."""


@pytest.fixture
def exact_rules() -> Iterator[None]:
    with fp64_rule():
        yield


@pytest.mark.parametrize("family", families(CASES))
def test_tree_packed_and_padded_rows_train_what_samples_alone_do(
    family: str, exact_rules: None
) -> None:
    model, every = in_fp64_if_recurrent(model_of(family)), samples()
    truth = alone(model, every)
    prepare(model)
    tree, packed = pack_rows(every, 1), [pack_row(every, share=False)]
    assert len(tree[0].input_ids_N) < 0.7 * len(packed[0].input_ids_N)
    for rows in (tree, packed, [padded(row) for row in tree], pack_rows(every, 4)):
        check_equal(on_rows(model, rows), truth, 1e-4 if family in RECURRENT else 1e-5)


@pytest.mark.parametrize("family", families(WINDOWED))
@settings(derandomize=True, deadline=None, max_examples=8)
@given(every=sample_trees(), window=st.integers(2, 8), num_rows=st.integers(1, 8))
def test_any_tree_under_any_window(
    family: str, every: list[Sample], window: int, num_rows: int
) -> None:
    model = model_of(family, sliding_window=window).double()  # fp32 rounds small gradients away
    truth = alone(model, every)
    prepare(model)
    check_equal(on_rows(model, pack_rows(every, num_rows)), truth)


@pytest.mark.parametrize("family", families(CASES))
def test_a_tree_has_the_log_probs_of_transformers(family: str) -> None:
    """The layers that were fused when it was tried are."""
    found = parity(config_of(family, TRAINED[family]))
    noise = 1e-4 if family in RECURRENT else 3e-6  # of transformers' rule
    assert found["largest_difference"] < noise * max(1.0, 2 * found["std_of_logprobs"])
    assert found["std_of_logprobs"] > 0.05, "the weights are large enough to tell"
    rows = json.loads(RESULTS.read_text())["rows"]
    assert found["fused"] == next(row["fused"] for row in rows if row["family"] == family)
