"""All that rules have decided, with what they decided it on: enough to make every decision again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flowtrain.dataflow.ledger.base import LedgerBase
from flowtrain.dataflow.ledger.curation import Decision, Event, decisions, events
from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.rules import Outcome, Rules
from flowtrain.types import Task


@dataclass(frozen=True, slots=True)
class Share:
    """A group, as one policy has it."""

    policy: str
    outcome: Outcome
    event: int
    """Number of its commit; 0: it has none yet."""
    state: str
    """"fresh", "served", "stale", "filtered", "surplus" or "empty"."""
    min_version: int
    step: int
    """Whose batch has it, or before which it was left out; 0 for what is fresh."""


@dataclass(frozen=True, slots=True)
class MadeBatch:
    policy: str
    step: int
    num_groups: int
    max_staleness: int
    num_events: int
    """There were so many when it was put together."""
    fresh: tuple[int, ...]
    """Units, in the order of their places; the others of the batch were trained before."""
    again: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class History:
    seed: int
    """Of the run."""
    replay_share: float
    rules: Rules
    """New ones, which have observed nothing."""
    tasks: tuple[Task, ...]
    """In their order, as many as were decided about."""
    decisions: tuple[Decision, ...]
    events: tuple[Event, ...]
    shares: tuple[Share, ...]
    """In the order of their commits."""
    batches: tuple[MadeBatch, ...]
    """By policy, in the order of steps."""


class Histories(LedgerBase):
    def history(self) -> History:
        """Of one moment."""
        with self._database.read() as transaction:
            decided = tuple(decisions(transaction))
            happened = tuple(events(transaction, 0))
            shares, batches = _shares(transaction), _batches(transaction)
        with self._fold.turn():  # who draws tasks uses the same cursor
            tasks = tuple(self._tasks[position] for position in range(len(decided)))
        share = self._options.replay_share
        return History(
            self._config.run.seed,
            share,
            self._make_rules(),
            tasks,
            decided,
            happened,
            shares,
            batches,
        )


def _shares(transaction: Transaction) -> tuple[Share, ...]:
    rows = transaction.all(
        "SELECT s.policy, s.unit, s.state, s.min_version, s.step, g.event, g.rewards, "
        "g.num_tokens, u.task_id, u.kind FROM shares s"
        " JOIN groups g ON g.unit = s.unit JOIN units u ON u.id = s.unit ORDER BY g.event"
    )
    return tuple(
        Share(
            row.policy,
            Outcome(
                row.unit, row.task_id, row.kind, tuple(json.loads(row.rewards)), row.num_tokens
            ),
            row.event or 0,
            row.state,
            row.min_version,
            row.step or 0,
        )
        for row in rows
    )


def _batches(transaction: Transaction) -> tuple[MadeBatch, ...]:
    units: dict[tuple[str, int], list[Any]] = {}
    for place in transaction.all("SELECT policy, step, unit, is_replay FROM places ORDER BY place"):
        units.setdefault((place.policy, place.step), []).append(place)
    return tuple(
        MadeBatch(
            row.policy,
            row.step,
            row.num_groups,
            row.max_staleness,
            row.num_events,
            tuple(
                place.unit for place in units.get((row.policy, row.step), ()) if not place.is_replay
            ),
            tuple(place.unit for place in units.get((row.policy, row.step), ()) if place.is_replay),
        )
        for row in transaction.all("SELECT * FROM batches ORDER BY policy, step")
    )
