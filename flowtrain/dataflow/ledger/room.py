"""Backpressure: how many more units may be under way, so that what is sampled can still be trained
in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import floor
from typing import Any

from flowtrain.config import Dataflow
from flowtrain.dataflow.ledger.sql import Transaction


def room_of(policy: Any, num_leased: int, options: Dataflow, version: int) -> int:
    """How many units a node may lease on this policy's account, when what it samples with is
    weights `version`; below 0: too many are.
    """
    return limit(policy, options, version) - policy.num_fresh - num_leased


def limit(policy: Any, options: Dataflow, version: int) -> int:
    """Groups that may wait or be under way.

    A group of weights v can be trained by steps up to v + 1 + max_staleness. Each step from the
    next one (`newest` + 1) to that one takes num_groups of them, less what it takes from those that
    were trained before.
    """
    if options.max_waiting:
        return options.max_waiting
    num_steps = version + 1 + policy.max_staleness - policy.newest
    num_fresh = policy.num_groups - floor(policy.num_groups * options.replay_share)
    return policy.num_groups + num_fresh * (num_steps - 1) if num_steps > 0 else 0


def standing(transaction: Transaction) -> list[Any]:
    """The policies in the order in which they were registered, with num_fresh: their groups that
    wait.
    """
    return transaction.all(
        "SELECT p.*, (SELECT count(*) FROM shares s WHERE s.policy = p.name AND s.state = 'fresh') "
        "AS num_fresh"
        " FROM policies p ORDER BY p.number"
    )


def drop_surplus(transaction: Transaction, policies: list[Any], options: Dataflow) -> None:
    """Where a trainer cannot keep up with another one whose groups it shares, what would be the
    first to go stale.
    """
    for policy in policies:
        most = options.max_waiting or policy.num_groups * (policy.max_staleness + 1)
        if policy.num_fresh > most:
            transaction.run(
                "UPDATE shares SET state = 'surplus', step = ? WHERE policy = ? AND unit IN "
                "(SELECT unit FROM shares"
                " WHERE policy = ? AND state = 'fresh' ORDER BY min_version, unit LIMIT ?)",
                policy.newest + 1,
                policy.name,
                policy.name,
                policy.num_fresh - most,
            )


def sampled_version(policy: Any, versions: Mapping[str, int]) -> int:
    """What a node samples with: at best the newest published."""
    return min(policy.version, versions.get(policy.name, policy.version))
