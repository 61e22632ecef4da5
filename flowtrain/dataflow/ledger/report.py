"""The report for people and programs: rates, buffers, trainers and nodes."""

from __future__ import annotations

import json
from typing import Any

from flowtrain.config import Dataflow
from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.ledger.token_accounts import token_accounts
from flowtrain.dataflow.ledger.trainers import is_live, policy_rows

_RECENT_S = 60.0
"""Seconds that rates are averaged over."""


def report(transaction: Transaction, run: str, options: Dataflow) -> dict[str, Any]:
    now = transaction.now()
    work_items = {
        row.state: row.num
        for row in transaction.all(
            "SELECT state, count(*) AS num FROM work_items WHERE evaluation = 0 GROUP BY state"
        )
    }
    endings = transaction.all(
        "SELECT ending, count(*) AS num FROM leases WHERE ending <> ''"
        " GROUP BY ending ORDER BY ending"
    )
    decided = transaction.one(
        "SELECT count(*) AS num, coalesce(sum(admitted), 0) AS admitted FROM decisions"
    )
    pushed = _pushed(transaction, now - _RECENT_S)
    num_groups = sum(row.num_recent for row in pushed.values())
    num_tokens = float(sum(row.tokens_recent for row in pushed.values()))
    accounts = token_accounts(transaction)
    states = ("leased", "waiting", "committed", "failed")
    return {
        "run": run,
        "time_s": now,
        "work_items": {state: work_items.get(state, 0) for state in states},
        "lost_leases": {row.ending: row.num for row in endings},
        "groups_per_s": num_groups / _RECENT_S,
        "tokens_per_s": num_tokens / _RECENT_S,
        "tasks": {"asked": decided.num, "admitted": int(decided.admitted)},
        "policies": {
            policy.name: _policy(transaction, policy, now, options)
            | {"tokens": accounts[policy.name].metrics()}
            for policy in policy_rows(transaction)
        },
        "nodes": {
            row.name: _node(row, pushed.get(row.name), now) for row in _node_rows(transaction)
        },
        "evaluations": _evaluations(transaction),
    }


def _evaluations(transaction: Transaction) -> list[dict[str, Any]]:
    """Those that are open, in the order in which they were asked for."""
    rows = transaction.all(
        "SELECT e.policy, e.step, e.name, e.num_questions,"
        " sum(CASE WHEN w.state = 'committed' THEN 1 ELSE 0 END) AS num_done,"
        " sum(CASE WHEN w.state = 'leased' THEN 1 ELSE 0 END) AS num_leased,"
        " sum(CASE WHEN w.state = 'failed' THEN 1 ELSE 0 END) AS num_failed"
        " FROM evaluations e JOIN work_items w ON w.evaluation = e.id WHERE e.state = 'open'"
        " GROUP BY e.id, e.policy, e.step, e.name, e.num_questions ORDER BY e.id"
    )
    return [{key: getattr(row, key) for key in row._fields} for row in rows]


def _policy(transaction: Transaction, policy: Any, now: float, options: Dataflow) -> dict[str, Any]:
    lengths = transaction.all(
        "SELECT state, num_tokens, count(*) AS num FROM shares WHERE policy = ?"
        " GROUP BY state, num_tokens ORDER BY num_tokens",
        policy.name,
    )
    trained = transaction.one(
        "SELECT coalesce(sum(num_groups), 0) AS num FROM batches WHERE policy = ? AND made_s >= ?",
        policy.name,
        now - _RECENT_S,
    )
    newest = transaction.one(
        "SELECT stats FROM batches WHERE policy = ? AND step = ?", policy.name, policy.newest
    )
    state = "live" if is_live(policy, now, options) else "silent"
    return {
        "state": "done" if policy.is_done else state,
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
            state: _lengths(lengths, state) for state in dict.fromkeys(row.state for row in lengths)
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
    """Count by node its groups, and the groups and tokens that came after `since`."""
    rows = transaction.all(
        "SELECT node, count(*) AS num,"
        " sum(CASE WHEN pushed_s >= ? THEN 1 ELSE 0 END) AS num_recent,"
        " sum(CASE WHEN pushed_s >= ? THEN num_tokens ELSE 0 END) AS tokens_recent"
        " FROM groups GROUP BY node",
        since,
        since,
    )
    return {row.node: row for row in rows}


def _node_rows(transaction: Transaction) -> list[Any]:
    """The current process of each node, with the seconds of all its processes."""
    return transaction.all(
        "SELECT n.name, n.seen_s, n.joined_s, n.versions, n.busy_s, n.waited_s,"
        " coalesce(l.num, 0) AS num_leased FROM nodes n"
        " LEFT JOIN (SELECT node, count(*) AS num FROM live_leases GROUP BY node) l"
        " ON l.node = n.name WHERE n.is_current = 1 ORDER BY n.name"
    )


def _lengths(rows: list[Any], state: str) -> dict[str, Any]:
    """The number of groups, their mean number of tokens, and a histogram: {"256": 3} are 3 groups
    of 256 to 511 tokens.
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
