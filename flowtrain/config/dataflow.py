"""`[dataflow]`: rollouts from nodes that come and go."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from flowtrain.config.section import Section


class Dataflow(Section):
    url: str = ""
    """of the service that batches come from; empty: this run samples by itself, step after step"""
    store: str = ""
    """folder or URL at which nodes find the weights that this run trains; empty: run.dir/weights,
    where all of them can reach that"""
    max_staleness: int = Field(4, ge=0)
    """versions that a trained token may be older than the weights that a step trains"""
    max_waiting: int = Field(0, ge=0)
    """groups that may wait or be under way; 0: as many as max_staleness lets be trained in time"""
    lease_s: PositiveFloat = 60.0
    """seconds after which the task of a node that gave no sign of life goes to another"""
    trainer_timeout_s: PositiveFloat = 120.0
    """seconds without a sign of life after which nothing is sampled on a trainer's account"""
    wait_s: PositiveFloat = 1800.0
    """seconds that a trainer waits for a batch, and anybody for the service, before giving up with
    an error"""
    max_attempts: PositiveInt = 5
    """leases of a task before it counts as one that no node can do"""
    prompt_filter: str = "all"
    """which prompts are rolled out: all, greso, curriculum, or the name of an entry point in the
    group flowtrain.prompt_filters"""
    prompt_filter_options: dict[str, Any] = Field(default_factory=dict)
    """arguments of the prompt filter"""
    group_filter: str = "all"
    """which groups are kept: all, mixed (rewards differ: dynamic sampling), or an entry point in
    flowtrain.group_filters"""
    group_filter_options: dict[str, Any] = Field(default_factory=dict)
    """arguments of the group filter"""
    selector: str = "deadline"
    """which of the groups that wait come first: deadline, arrival, weighted (by kind), or an entry
    point in flowtrain.selectors"""
    selector_options: dict[str, Any] = Field(default_factory=dict)
    """arguments of the selector"""
    replay_share: float = Field(0.0, ge=0, lt=1)
    """share of a batch that are groups which were trained before, the latest first; they keep to
    max_staleness too"""
