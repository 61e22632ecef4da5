"""The dataflow of a run as the page shows it: the service's own status, or why there is none."""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Refused, Unavailable
from flowtrain.net.serving import TOKEN_VARIABLE
from flowtrain.types import UserError, account_of

_EVERY_S = 1.0
"""Least time between two questions to a service, however many browsers look."""
_WAIT_S = 2.0
"""Time that a service has to answer."""
_SILENT_S = 15.0
"""A node that has not been heard of for so long is called silent: it asks every few seconds."""


class DataflowWatch:
    """Asks a service for its status. Threads may share it."""

    def __init__(self, url: str) -> None:
        """UserError where the address or the token cannot be used."""
        self.url = url
        self._client = Client(url, os.environ.get(TOKEN_VARIABLE, ""), _WAIT_S, _WAIT_S)
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._answer: dict[str, Any] = {}

    def answer(self) -> dict[str, Any]:
        """Return the status as tables; "problem" says why there is none."""
        with self._lock:
            if time.monotonic() - self._asked_s > _EVERY_S:
                self._answer = self._ask()
                self._asked_s = time.monotonic()
            return self._answer

    def close(self) -> None:
        self._client.close()

    def _ask(self) -> dict[str, Any]:
        try:
            return {"url": self.url, **status_tables(self._client.status())}
        except (Refused, Unavailable) as error:
            return {"url": self.url, "problem": f"The dataflow cannot be reached: {error}"}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"The dataflow answers in another form than this version reads: {error!r}"
            return {"url": self.url, "problem": text[:500]}


def check_own(url: str) -> None:
    """Raise UserError unless the address, which stands in a run folder, is of this machine: the
    token of the dataflow is not sent wherever a folder says.
    """
    host = urlsplit(url).hostname or ""
    try:
        is_own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if not is_own:
        raise UserError(
            f"The run's dataflow is at {url}: start this page with --dataflow {url} to ask it."
        )


def status_tables(status: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `Dataflow.status` into {"tables": [{"title", "head", "rows"}], "text": ...}; cells are
    texts, and a row is marked where somebody is silent.
    """
    items, tasks, policies = status["work_items"], status["tasks"], status["policies"]
    lines = [
        f"{status['groups_per_s']:.2f} groups/s produced, {status['tokens_per_s']:,.0f} tokens/s "
        "sampled",
        f"leases: {items['leased']:,} under way, {items['waiting']:,} waiting to be taken, "
        f"{items['committed']:,} done, {items['failed']:,} failed",
        f"{tasks['admitted']:,} of {tasks['asked']:,} prompts were admitted",
    ]
    if lost := status["lost_leases"]:
        lines.append(
            f"ended without a group: {', '.join(f'{num:,} {why}' for why, num in lost.items())}"
        )
    lines += [
        f"tokens of {name}: {account_of(policy['tokens']).text()}"
        for name, policy in policies.items()
    ]
    lines += [
        f"{node} is shut out: {problem}" for node, problem in status["audits"]["distrusted"].items()
    ]
    return {"lines": lines, "tables": [_nodes(status["nodes"]), _policies(policies)]}


def _nodes(nodes: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for name, node in nodes.items():
        is_silent = node["seen_s_ago"] > _SILENT_S
        versions = ", ".join(f"{policy} {version}" for policy, version in node["versions"].items())
        rows.append(
            {
                "is_silent": is_silent,
                "cells": [
                    name,
                    "silent" if is_silent else "alive",
                    _ago(node["seen_s_ago"]),
                    f"{node['num_leased']:,}",
                    f"{node['num_groups']:,}",
                    f"{node['groups_per_s']:.2f}",
                    _idle(node),
                    versions or "-",
                ],
            }
        )
    head = ["node", "state", "seen", "leases", "groups", "groups/s", "idle", "weights"]
    return {"title": "Nodes", "head": head, "rows": rows, "empty": "No node has joined yet."}


def _policies(policies: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for name, policy in policies.items():
        batch, groups = policy["batch"], policy["groups"]
        ages = f"{batch['staleness_mean']:.1f}, {batch['staleness_max']:g}" if batch else "-"
        waiting = groups.get("fresh", {}).get("num", 0)
        stale = groups.get("stale", {}).get("num", 0)
        rows.append(
            {
                "is_silent": policy["state"] == "silent",
                "cells": [
                    name,
                    policy["state"],
                    _ago(policy["seen_s_ago"]),
                    f"{policy['step']:,}",
                    f"{policy['version']:,}",
                    f"{waiting:,}",
                    f"{stale:,}",
                    ages,
                    f"{policy['max_staleness']}",
                    _idle(policy),
                ],
            }
        )
    head = ["policy", "trainer", "seen", "step", "version", "groups waiting", "dropped as stale"]
    head += ["staleness, mean and most", "bound", "idle"]
    empty = "No trainer has registered a policy yet."
    return {"title": "Policies", "head": head, "rows": rows, "empty": empty}


def _idle(member: Mapping[str, float]) -> str:
    """The share of its time that a node or trainer waited."""
    total = member["busy_s"] + member["waited_s"]
    return f"{member['waited_s'] / total:.0%}" if total else "-"


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0):.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
