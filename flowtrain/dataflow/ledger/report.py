"""What people and programs ask: how it goes, whether it adds up, and what the rules saw and
decided.
"""

from __future__ import annotations

import json
from typing import Any

from flowtrain.dataflow.ledger.audit import Audit, audited
from flowtrain.dataflow.ledger.base import LedgerBase
from flowtrain.dataflow.ledger.curation import Decision, Event, decisions, events
from flowtrain.dataflow.ledger.room import standing
from flowtrain.dataflow.ledger.sql import Transaction

_RECENT_S = 60.0


class Reports(LedgerBase):
    def audit(self) -> Audit:
        with self._database.read() as transaction:
            return audited(transaction)

    def events(self, after: int = 0) -> list[Event]:
        """What the curator observes, in order: groups and new versions with greater numbers than
        `after`.
        """
        with self._database.read() as transaction:
            return list(events(transaction, after))

    def decisions(self) -> list[Decision]:
        """The curator's, in order."""
        with self._database.read() as transaction:
            return decisions(transaction)

    def status(self) -> dict[str, Any]:
        now = self._clock()
        with self._database.read() as transaction:
            units = {
                row.state: row.num
                for row in transaction.all(
                    "SELECT state, count(*) AS num FROM units GROUP BY state"
                )
            }
            endings = transaction.all(
                "SELECT ending, count(*) AS num FROM leases WHERE ending <> '' GROUP BY ending "
                "ORDER BY ending"
            )
            pushed = _pushed(transaction, now - _RECENT_S)
            decided = transaction.one(
                "SELECT count(*) AS num, coalesce(sum(admitted), 0) AS admitted FROM decisions"
            )
            return {
                "run": self.run,
                "time_s": now,
                "units": {
                    state: units.get(state, 0)
                    for state in ("leased", "waiting", "committed", "failed")
                },
                "lost_leases": {row.ending: row.num for row in endings},
                "groups_per_s": sum(row.num_recent for row in pushed.values()) / _RECENT_S,
                "tokens_per_s": float(sum(row.tokens_recent for row in pushed.values()))
                / _RECENT_S,
                "tasks": {"asked": decided.num, "admitted": int(decided.admitted)},
                "policies": {
                    policy.name: self._policy(transaction, policy, now)
                    for policy in standing(transaction)
                },
                "nodes": {
                    row.name: _node(row, pushed.get(row.name), now) for row in _nodes(transaction)
                },
            }

    def _policy(self, transaction: Transaction, policy: Any, now: float) -> dict[str, Any]:
        lengths = transaction.all(
            "SELECT state, num_tokens, count(*) AS num FROM shares WHERE policy = ? GROUP BY "
            "state, num_tokens ORDER BY num_tokens",
            policy.name,
        )
        trained = transaction.one(
            "SELECT coalesce(sum(num_groups), 0) AS num FROM batches WHERE policy = ? AND made_s "
            ">= ?",
            policy.name,
            now - _RECENT_S,
        )
        newest = transaction.one(
            "SELECT stats FROM batches WHERE policy = ? AND step = ?", policy.name, policy.newest
        )
        return {
            "state": "done"
            if policy.is_done
            else "live"
            if self._is_live(policy, now)
            else "silent",
            "version": policy.version,
            "step": policy.newest,
            "checkpoint": policy.checkpoint,
            "num_groups": policy.num_groups,
            "max_staleness": policy.max_staleness,
            "groups_per_s": float(trained.num) / _RECENT_S,
            "seen_s_ago": now - policy.seen_s,
            "busy_s": policy.busy_s,
            "waited_s": policy.waited_s,
            "batch": json.loads(newest.stats) if newest else {},
            "groups": {
                state: _lengths(lengths, state)
                for state in dict.fromkeys(row.state for row in lengths)
            },
        }


def _node(node: Any, pushed: Any, now: float) -> dict[str, Any]:
    return {
        "seen_s_ago": now - node.seen_s,
        "joined_s_ago": now - node.joined_s,
        "num_leased": node.num_leased,
        "num_groups": pushed.num if pushed else 0,
        "groups_per_s": pushed.num_recent / _RECENT_S if pushed else 0.0,
        "versions": json.loads(node.versions),
        "busy_s": node.busy_s,
        "waited_s": node.waited_s,
    }


def _pushed(transaction: Transaction, since: float) -> dict[str, Any]:
    """By node: its groups, and how many groups and tokens of them came `since` then."""
    rows = transaction.all(
        "SELECT node, count(*) AS num, sum(CASE WHEN pushed_s >= ? THEN 1 ELSE 0 END) AS "
        "num_recent,"
        " sum(CASE WHEN pushed_s >= ? THEN num_tokens ELSE 0 END) AS tokens_recent FROM groups "
        "GROUP BY node",
        since,
        since,
    )
    return {row.node: row for row in rows}


def _nodes(transaction: Transaction) -> list[Any]:
    """The present life of each, with the seconds of all its lives."""
    return transaction.all(
        "SELECT n.name, n.seen_s, n.joined_s, n.versions, (SELECT sum(o.busy_s) FROM nodes o WHERE "
        "o.name = n.name) AS busy_s,"
        " (SELECT sum(o.waited_s) FROM nodes o WHERE o.name = n.name) AS waited_s,"
        " (SELECT count(*) FROM units u WHERE u.state = 'leased' AND u.node = n.name) AS num_leased"
        " FROM nodes n WHERE n.is_current = 1 ORDER BY n.name"
    )


def _lengths(rows: list[Any], state: str) -> dict[str, Any]:
    """How many groups, their tokens on average, and a histogram: {"256": 3} are 3 groups of 256 to
    511 tokens.
    """
    own = [row for row in rows if row.state == state]
    histogram: dict[str, int] = {}
    for row in own:
        bucket = str(1 << row.num_tokens.bit_length() - 1) if row.num_tokens else "0"
        histogram[bucket] = histogram.get(bucket, 0) + row.num
    num = sum(row.num for row in own)
    return {
        "num": num,
        "tokens_mean": sum(row.num * row.num_tokens for row in own) / num,
        "tokens": histogram,
    }
