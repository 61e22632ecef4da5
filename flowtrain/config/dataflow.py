"""`[dataflow]`: rollouts from nodes that come and go."""

from __future__ import annotations

from math import floor

from pydantic import Field, PositiveFloat, PositiveInt

from flowtrain.config.section import Section


class Dataflow(Section):
    url: str = ""
    """address of the service that batches come from; empty: this run samples its own batches"""
    store: str = ""
    """folder or URL at which nodes find the weights that this run trains; empty: run.dir/weights,
    if all nodes can read it"""
    max_staleness: int = Field(4, ge=0)
    """versions by which a trained token may be older than the weights that a step trains"""
    max_waiting: int = Field(0, ge=0)
    """groups that may wait or be under way; 0: as many as can be trained within max_staleness, of
    which none begins while a whole batch waits"""
    lease_s: PositiveFloat = 60.0
    """seconds without a sign of life from a node after which its task goes to another; a node says
    when an overloaded machine should have more"""
    trainer_timeout_s: PositiveFloat = 120.0
    """seconds without a sign of life from a trainer after which nothing is sampled for it"""
    wait_s: PositiveFloat = 1800.0
    """seconds that a trainer waits for a batch, and any process for the service, before it gives up
    with an error"""
    max_attempts: PositiveInt = 5
    """failures after which a task counts as one that no node can do: the rollouts raised an error
    or their group was refused; leases that ran out, and those of nodes that ended, count only from
    ten times as many"""
    prompt_filter: str = "all"
    """choice of prompts to roll out: all, greso, curriculum, or one of yours, mine.py:Mine
    (docs/dataflow-rules.md)"""
    group_filter: str = "all"
    """choice of groups to keep: all, mixed (rewards differ: dynamic sampling), or one of yours"""
    selector: str = "deadline"
    """order of waiting groups: deadline, arrival, latest, weighted (by kind), or one of yours"""
    replay_share: float = Field(0.0, ge=0, lt=1)
    """share of a batch that consists of groups trained before; max_staleness holds for them too"""
    replay_selector: str = "latest"
    """order of the groups that may be trained again; the names are those of selector"""

    def num_replays(self, num_groups: int) -> int:
        """Return how many groups of a batch may have been trained before."""
        return floor(num_groups * self.replay_share + 1e-9)  # 0.29 of 100 are 29
