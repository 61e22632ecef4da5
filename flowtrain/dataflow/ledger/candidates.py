"""What a batch can be made of, and what was made of it."""

from __future__ import annotations

import json
from typing import Any

from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.rules import Candidate, Outcome

_GROUPS = (
    "SELECT s.unit, s.min_version, g.event, g.rewards, g.num_tokens, u.task_id, u.kind FROM shares "
    "s"
    " JOIN groups g ON g.unit = s.unit JOIN units u ON u.id = s.unit"
)


def waiting(transaction: Transaction, policy: Any) -> list[Candidate]:
    """Groups that no batch has had, in the order of their commits."""
    rows = transaction.all(
        f"{_GROUPS} WHERE s.policy = ? AND s.state = 'fresh' AND g.event IS NOT NULL ORDER BY "
        "g.event",
        policy.name,
    )
    return [_candidate(row, policy.max_staleness) for row in rows]


def consumed(transaction: Transaction, policy: Any, step: int) -> list[Candidate]:
    """Those that batches have had and that may be trained in `step` again, in the order of their
    first serving.
    """
    rows = transaction.all(
        f"{_GROUPS} JOIN places p ON p.unit = s.unit AND p.policy = s.policy AND p.is_replay = 0 "
        "JOIN payloads d ON d.unit = s.unit"
        " WHERE s.policy = ? AND s.state = 'served' AND s.min_version >= ? ORDER BY p.step, "
        "p.place",
        policy.name,
        step - 1 - policy.max_staleness,
    )
    return [_candidate(row, policy.max_staleness) for row in rows]


def _candidate(row: Any, max_staleness: int) -> Candidate:
    outcome = Outcome(
        row.unit, row.task_id, row.kind, tuple(json.loads(row.rewards)), row.num_tokens
    )
    return Candidate(outcome, row.min_version + max_staleness, row.event)


def batch_stats(transaction: Transaction, policy: str, step: int) -> dict[str, float]:
    """`Batch.stats`; what was left out is what was found so since the batch before."""
    by_state = {
        row.state: row
        for row in transaction.all(
            "SELECT state, count(*) AS num, avg(num_tokens) AS tokens FROM shares WHERE policy = ? "
            "AND step = ? GROUP BY state",
            policy,
            step,
        )
    }
    ages = [
        step - 1 - row.min_version
        for row in transaction.all(
            "SELECT s.min_version FROM places p JOIN shares s ON s.unit = p.unit AND s.policy = "
            "p.policy WHERE p.policy = ? AND p.step = ?",
            policy,
            step,
        )
    ]
    counts = {
        f"num_{state}": by_state[state].num if state in by_state else 0
        for state in ("stale", "filtered", "surplus", "empty")
    }
    tokens = {
        f"{state}_tokens_mean": float(by_state[state].tokens) if state in by_state else 0.0
        for state in ("stale", "served")
    }
    fresh = transaction.one(
        "SELECT count(*) AS num FROM shares WHERE policy = ? AND state = 'fresh'", policy
    ).num
    replayed = transaction.one(
        "SELECT count(*) AS num FROM places WHERE policy = ? AND step = ? AND is_replay = 1",
        policy,
        step,
    ).num
    leased = transaction.one("SELECT count(*) AS num FROM units WHERE state = 'leased'").num
    ages_known = {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)}
    return {
        **ages_known,
        "num_buffered": fresh,
        "num_leased": leased,
        "num_replayed": replayed,
        **counts,
        **tokens,
    }


def forget_payloads(transaction: Transaction, *, keep_for_replay: bool) -> None:
    """Deletes the groups that no batch can need any more: neither fresh, nor in a batch after a
    checkpoint, nor to be trained again.
    """
    again = (
        " OR (s.state = 'served' AND s.min_version >= p.checkpoint - p.max_staleness)"
        if keep_for_replay
        else ""
    )
    transaction.run(
        "DELETE FROM payloads WHERE NOT EXISTS (SELECT 1 FROM shares s JOIN policies p ON p.name = "
        "s.policy WHERE s.unit = payloads.unit"
        f" AND (s.state = 'fresh'{again}))"
        " AND NOT EXISTS (SELECT 1 FROM places l JOIN policies p ON p.name = l.policy"
        " WHERE l.unit = payloads.unit AND l.step > p.checkpoint)"
    )
