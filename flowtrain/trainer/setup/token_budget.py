"""The number that `train.token_budget = "auto"` stands for, found once when a run begins."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

from flowtrain.config import Config
from flowtrain.trainer.devices import memory_per_rank
from flowtrain.trainer.setup.components import LearnerComponents
from flowtrain.trainer.setup.placement import Placement

Components = TypeVar("Components", bound=LearnerComponents)

_FEWEST, _MOST = 1024, 65536
"""Bounds in tokens. 8 rollouts of AgentFlow's 10 turns are 64,460."""


def with_token_budget(components: Components, placement: Placement) -> Components:
    """Put the number into the config: that of the run which goes on in its folder, else the most
    that every rank which trains has memory for; collective, and the same on all ranks.
    """
    config, world = components.config, components.world
    if config.train.token_budget != "auto":
        return components
    known, own, begun = 0, _MOST, Path(config.run.dir) / "config.toml"
    if world.is_main and config.run.resume == "auto" and begun.exists():
        known = tomllib.loads(begun.read_text())["train"]["token_budget"]
    elif placement.trainers.is_member:
        own = largest_budget(*(_room(components, placement, end) for end in (_FEWEST, _MOST)))
    of_run, negative = map(int, world.max([known, -own]))
    return components.with_config(_with_number(config, of_run or -negative))


def largest_budget(few_room: float, most_room: float) -> int:
    """Return the tokens of a row that leave no room, in steps of 1,024, given the bytes that 1,024
    and 65,536 leave: memory grows in a line, but for a chunk of the head.
    """
    share = few_room / max(few_room - most_room, 1)
    num_tokens = int(_FEWEST + share * (_MOST - _FEWEST))
    return min(max(num_tokens, _FEWEST), _MOST) // _FEWEST * _FEWEST


def _room(components: LearnerComponents, placement: Placement, budget: int) -> float:
    config = _with_number(components.config, budget)
    plan = components.with_config(config).plan_memory(placement)
    return plan.room(config, memory_per_rank())


def _with_number(config: Config, budget: int) -> Config:
    train = config.train.model_copy(update={"token_budget": budget})
    return config.model_copy(update={"train": train})
