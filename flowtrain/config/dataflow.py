"""`[dataflow]`: rollouts from nodes that come and go."""

from __future__ import annotations

from math import floor

from pydantic import Field, PositiveFloat, PositiveInt

from flowtrain.config.section import Section


class Dataflow(Section):
    url: str = ""
    """address of the service that provides batches; empty: this run samples its own batches"""
    store: str = ""
    """folder or URL at which nodes find this run's weights; empty: run.dir/weights, if all nodes
    can read it"""
    max_staleness: int = Field(4, ge=0)
    """largest age of a trained token, in versions between its weights and those that a step trains
    """
    max_waiting: int = Field(0, ge=0)
    """largest number of waiting and running groups; 0: as many as can be trained within
    max_staleness, and no new group starts while a whole batch waits"""
    lease_s: PositiveFloat = 60.0
    """seconds without a heartbeat from a node after which its task goes to another node; a node
    warns if an overloaded machine needs more"""
    trainer_timeout_s: PositiveFloat = 120.0
    """seconds without a heartbeat from a trainer after which sampling for it stops"""
    wait_s: PositiveFloat = 1800.0
    """seconds that a trainer waits for a batch, and any process for the service, before it fails
    with an error"""
    max_attempts: PositiveInt = 5
    """number of failures after which a task is given up: rollouts that raise an error or groups
    that the service rejects; expired leases and leases of ended nodes count only from ten times
    this number"""
    prompt_filter: str = "all"
    """choice of prompts to roll out: all, greso, curriculum, or a custom class, mine.py:Mine
    (docs/dataflow-rules.md)"""
    group_filter: str = "all"
    """choice of groups to keep: all, mixed (rewards differ: dynamic sampling), or a custom class"""
    selector: str = "deadline"
    """order of waiting groups: deadline, arrival, latest, weighted (by kind), or a custom class"""
    replay_share: float = Field(0.0, ge=0, lt=1)
    """share of a batch with groups trained before; max_staleness applies to them too"""
    replay_selector: str = "latest"
    """order of the groups that may be trained again; takes the same names as selector"""

    def num_replays(self, num_groups: int) -> int:
        """Return how many groups of a batch may have been trained before."""
        return floor(num_groups * self.replay_share + 1e-9)  # 0.29 of 100 are 29
