"""The KL that a batch reports, and the rows that it counts."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowtrain.records import Sample
from flowtrain.trainer.distributed import World
from flowtrain.trainer.packing import empty_row, pack_row
from flowtrain.trainer.step_metrics import StepMetrics

STATS = ("num_tokens_sum", "entropy_sum", "kl_sum", "ratio_sum", "clipped_low_sum")
STATS += ("clipped_high_sum", "ratio_max", "ratio_min")
WORLD = World(0, 1, torch.device("cpu"))


def test_rows_that_only_keep_step_are_not_counted() -> None:
    """They would lower the packing efficiency with every rank that a run has."""
    one = torch.tensor(1.0)
    metrics = StepMetrics()
    packed = pack_row([Sample((1, 2), (3, 4), (-1.0,) * 2, (1.0,) * 2, (1.0,) * 2)])
    for row in (replace(packed, num_repeated_tokens=2), None):
        metrics.add(dict.fromkeys(STATS, one), one, one, row)
    assert len(empty_row().input_ids_N) == 1, "which would be counted"
    metrics.close_step(1.0)
    found = metrics.reduce(WORLD, 0.1)
    assert (found["num_rows"], found["num_packed_tokens"]) == (1, 3)
    assert found["repeated_token_share"] == 2 / 3


def test_the_kl_is_named_for_the_policy_that_it_is_to() -> None:
    names = [set(StepMetrics(has).reduce(WORLD, 0.1)) for has in (False, True)]
    assert names[0] - names[1] == {"kl_old"} and names[1] - names[0] == {"kl_ref"}
