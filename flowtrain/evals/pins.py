"""The pins of an evaluation: the options that decide its outcome."""

from __future__ import annotations

from typing import Any

from flowtrain.config import Config
from flowtrain.metrics.pins import flat

_DECIDING = ("model", "tiny", "tasks", "agent", "roles", "engines", "plugins", "rollout", "vllm")
_NOT_DECIDING = (
    "rollout.max_in_flight",
    "rollout.num_questions",
    "rollout.group_size",
    "agent.max_turns",
    "agent.eval_max_turns",
    "tasks.num_train",
)


def config_pins(config: Config) -> dict[str, Any]:
    """Return the options that an evaluation reads, as JSON, by dotted key."""
    values = config.model_dump(mode="json", include=set(_DECIDING))
    return {key: value for key, value in flat(values).items() if key not in _NOT_DECIDING}
