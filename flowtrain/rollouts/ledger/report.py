"""The report for people and programs: rates, buffers, trainers and nodes."""

from __future__ import annotations

import json
from typing import Any

from flowtrain.config import Dataflow
from flowtrain.rollouts.ledger.counters import read_counters
from flowtrain.rollouts.ledger.prompts import num_leased
from flowtrain.rollouts.ledger.sql import Transaction
from flowtrain.rollouts.ledger.token_accounts import token_account
from flowtrain.rollouts.ledger.trainers import is_live, policy_rows

_RECENT_S = 60.0
"""Seconds that rates are averaged over."""


def report(transaction: Transaction, run: str, options: Dataflow) -> dict[str, Any]:
    now = transaction.now()
    meta = transaction.one("SELECT num_positions, num_work_items FROM meta")
    recent = {
        row.node: row
        for row in transaction.all(
            "SELECT node, count(*) AS num, sum(num_tokens) AS num_tokens FROM groups"
            " WHERE pushed_s >= ? GROUP BY node",
            now - _RECENT_S,
        )
    }
    pushes = read_counters(transaction, "", "pushes")
    return {
        "run": run,
        "time_s": now,
        "work_items": _work_items(transaction, meta.num_work_items),
        "lost_leases": read_counters(transaction, "", "ended"),
        "groups_per_s": sum(row.num for row in recent.values()) / _RECENT_S,
        "tokens_per_s": float(sum(row.num_tokens for row in recent.values())) / _RECENT_S,
        "tasks": {"asked": meta.num_positions, "admitted": meta.num_work_items},
        "policies": {
            policy.name: _policy(transaction, policy, now, options)
            for policy in policy_rows(transaction)
        },
        "nodes": {
            row.name: _node(
                row, pushes.get(row.name, 0), recent.get(row.name), now, options.lease_s
            )
            for row in _node_rows(transaction)
        },
        "evaluations": _evaluations(transaction),
    }


def _work_items(transaction: Transaction, num: int) -> dict[str, int]:
    waiting, drawn, failed = (
        transaction.one(
            # Without the plus SQLite would read all that there ever were, by another index.
            f"SELECT count(*) AS num FROM work_items WHERE state = '{state}' AND +evaluation = 0"
        ).num
        for state in ("waiting", "drawn", "failed")
    )
    leased = num_leased(transaction)
    committed = num - leased - waiting - drawn - failed
    return {"leased": leased, "waiting": waiting, "committed": committed, "failed": failed}


def _evaluations(transaction: Transaction) -> list[dict[str, Any]]:
    """Report the open evaluations in the order in which they were asked for."""
    evaluations = []
    for row in transaction.all("SELECT * FROM evaluations WHERE state = 'open' ORDER BY id"):
        # One by one, or PostgreSQL would look for their questions among all work items.
        states = transaction.all(
            "SELECT state, count(*) AS num FROM work_items WHERE evaluation = ? GROUP BY state",
            row.id,
        )
        counts = {entry.state: entry.num for entry in states}
        evaluations.append(
            {
                **{key: getattr(row, key) for key in ("policy", "step", "name", "num_questions")},
                "num_done": counts.get("committed", 0),
                "num_leased": counts.get("leased", 0),
                "num_failed": counts.get("failed", 0),
            }
        )
    return evaluations


def _policy(transaction: Transaction, policy: Any, now: float, options: Dataflow) -> dict[str, Any]:
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
        "groups": _groups(transaction, policy.name),
        "tokens": token_account(transaction, policy.name).metrics(),
    }


def _groups(transaction: Transaction, policy: str) -> dict[str, dict[str, float]]:
    """Report the number of groups by state, and the mean number of their tokens to train."""
    fresh = transaction.one(
        "SELECT count(*) AS num, coalesce(sum(num_tokens), 0) AS trainable FROM shares"
        " WHERE policy = ? AND state = 'fresh'",
        policy,
    )
    num = {"fresh": fresh.num} | read_counters(transaction, policy, "groups")
    trainable = {"fresh": int(fresh.trainable)} | read_counters(transaction, policy, "trainable")
    return {
        state: {"num": count, "tokens_mean": trainable.get(state, 0) / count}
        for state, count in num.items()
        if count
    }


def _node(node: Any, num_groups: int, recent: Any, now: float, lease_s: float) -> dict[str, Any]:
    is_silent = now - node.seen_s > lease_s
    state = ("silent" if is_silent else "live") if node.is_current == 1 else "ended"
    return {
        "state": state,
        "seen_s_ago": now - node.seen_s,
        "joined_s_ago": now - node.joined_s,
        "num_leased": node.num_leased,
        "num_groups": num_groups,
        "groups_per_s": recent.num / _RECENT_S if recent and state == "live" else 0.0,
        "versions": json.loads(node.versions),
        "busy_s": node.busy_s,
        "waited_s": node.waited_s,
    }


def _node_rows(transaction: Transaction) -> list[Any]:
    """Read the newest process of each node, with the seconds of all its processes."""
    return transaction.all(
        "SELECT n.name, n.seen_s, n.joined_s, n.versions, n.busy_s, n.waited_s, n.is_current,"
        " coalesce(l.num, 0) AS num_leased FROM nodes n"
        " LEFT JOIN (SELECT node, count(*) AS num FROM live_leases GROUP BY node) l"
        " ON l.node = n.name WHERE n.is_current = 1 OR NOT EXISTS (SELECT 1 FROM nodes m"
        " WHERE m.name = n.name AND (m.is_current = 1 OR m.joined_s > n.joined_s))"
        " ORDER BY n.name"
    )
