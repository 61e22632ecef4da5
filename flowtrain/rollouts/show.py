"""`Dataflow.status` as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowtrain.logging.tables import aligned
from flowtrain.records import account_of
from flowtrain.utils.text import printable

_LEFT_OUT = ("stale", "filtered", "surplus", "empty", "disowned")
"""Why a group is not trained, in the ledger's words: too old, rejected by the group filter, more
than the trainer can use, without a token to train, sampled by damaged weights."""


def status_text(status: Mapping[str, Any]) -> str:
    work_items, tasks = status["work_items"], status["tasks"]
    head = [
        f"run {status['run']}: {status['groups_per_s']:.2f} groups/s produced, "
        f"{status['tokens_per_s']:,.0f} tokens/s sampled",
        f"work items: {', '.join(f'{num:,} {state}' for state, num in work_items.items())}"
        f"; {tasks['admitted']:,} of {tasks['asked']:,} prompts were admitted",
    ]
    pool = status["pool"]
    if pool["decided_s"]:
        head.append(f"nodes: {pool['num_nodes']} at work, {pool['target']} suffice")
    if lost := status["lost_leases"]:
        reasons = ", ".join(f"{num:,} {why}" for why, num in lost.items())
        head.append(printable(f"leases that ended without a group: {reasons}", keep=""))
    if under_way := status["evaluations"]:
        head.append(printable(f"evaluations: {'; '.join(map(_evaluation, under_way))}", keep=""))
    parts = [
        "\n".join(head) + "\n",
        _policies(status["policies"]),
        _groups(status["policies"]),
        _tokens(status["policies"]),
        _nodes(status["nodes"]),
    ]
    return "\n".join(part for part in parts if part)


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    failed = f", {evaluation['num_failed']} failed" if evaluation["num_failed"] else ""
    return (
        f"{evaluation['policy']} step {evaluation['step']}, {evaluation['name']}: "
        f"{evaluation['num_done']} of {evaluation['num_questions']}{failed}, "
        f"{evaluation['num_leased']} under way"
    )


def _policies(policies: Mapping[str, Any]) -> str:
    if not policies:
        return "no trainer has registered a policy yet\n"
    rows: list[tuple[str, ...]] = [
        (
            *("policy", "trainer", "version", "step", "checkpoint"),
            *("groups/s", "staleness", "oldest", "bound", "idle", "seen"),
        )
    ]
    for name, policy in policies.items():
        batch = policy["batch"]
        ages = (
            [f"{batch['staleness_mean']:.1f}", f"{batch['staleness_max']:g}"]
            if batch
            else ["-", "-"]
        )
        counts = [str(policy[key]) for key in ("version", "step", "checkpoint")]
        columns = [*ages, str(policy["max_staleness"]), _idle(policy), _ago(policy["seen_s_ago"])]
        rows.append((name, policy["state"], *counts, f"{policy['groups_per_s']:.2f}", *columns))
    return aligned(rows)


def _groups(policies: Mapping[str, Any]) -> str:
    """Write a row per policy and state: the number of groups, and their mean length."""
    rows: list[tuple[str, ...]] = [("groups of", "state", "groups", "tokens each")]
    for name, policy in policies.items():
        for state in ("fresh", "assigned", *_LEFT_OUT):
            if group := policy["groups"].get(state):
                counts = (f"{group['num']:,}", f"{group['tokens_mean']:,.0f}")
                rows.append((name, state, *counts))
    return aligned(rows) if len(rows) > 1 else ""


def _tokens(policies: Mapping[str, Any]) -> str:
    """Write a line per policy: what was sampled, and where it went."""
    accounts = {name: account_of(policy["tokens"]) for name, policy in policies.items()}
    return "".join(f"tokens of {name}: {account.text()}\n" for name, account in accounts.items())


def _nodes(nodes: Mapping[str, Any]) -> str:
    if not nodes:
        return "no node has joined yet\n"
    rows: list[tuple[str, ...]] = [
        ("node", "state", "seen", "leases", "groups", "groups/s", "idle", "weights")
    ]
    for name, node in nodes.items():
        versions = (
            ", ".join(f"{policy} {version}" for policy, version in node["versions"].items()) or "-"
        )
        counts = [str(node["num_leased"]), f"{node['num_groups']:,}", f"{node['groups_per_s']:.2f}"]
        status = (node["state"], _ago(node["seen_s_ago"]))
        rows.append((name, *status, *counts, _idle(node), versions))
    return aligned(rows)


def _idle(member: Mapping[str, float]) -> str:
    """Return the share of its time that a node or trainer waited."""
    total = member["busy_s"] + member["waited_s"]
    return f"{member['waited_s'] / total:.0%}" if total else "-"


def _ago(seconds: float) -> str:
    for unit, num in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * num:
            return f"{seconds / num:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
