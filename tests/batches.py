"""What algorithms make of groups that tests write by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from flowtrain.algorithms import Algorithm, load_algorithm
from flowtrain.config import Config
from flowtrain.types import Group, TrainBatch


def batch(
    name: str,
    groups: Sequence[Group],
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: str = "planner",
    **sections: dict[str, Any],
) -> TrainBatch:
    """Make the samples of a step; by default it has no more groups than these."""
    num_questions = max(len(groups), num_minibatches) if num_groups is None else num_groups
    options = {
        **sections,
        "algorithm": {"name": name, **sections.get("algorithm", {})},
        "train": {"num_minibatches": num_minibatches, "policy": policy},
        "rollout": {"num_questions": num_questions},
        "roles": {} if policy == "planner" else {policy: "own"},
    }
    return _algorithm(json.dumps(options)).advantages(groups)


@functools.cache
def _algorithm(options: str) -> Algorithm:
    return load_algorithm(Config.model_validate_json(options))


def flow_grpo(
    groups: Sequence[Group],
    mode: str = "paper",
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: str = "planner",
    equal_groups: str | None = None,
) -> TrainBatch:
    """Make the samples of Flow-GRPO."""
    own = {"mode": mode, "equal_groups": equal_groups}
    return batch("flow_grpo", groups, num_minibatches, num_groups, policy, algorithm=own)
