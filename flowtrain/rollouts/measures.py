"""The metrics of the service: what its ledger says, and how long requests take. docs/metrics.md
lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flowtrain.records import UserError, account_of
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.rollouts.wire import METHODS, PREFIX
from flowtrain.utils.net.credentials import Access
from flowtrain.utils.net.monitoring import OTHER, Cached, Monitor, counter, gauge

if TYPE_CHECKING:
    from prometheus_client import Metric

    from flowtrain.rollouts.ledger import Ledger

_NAME = "flowtrain_dataflow"
_GONE_S = 3600.0
"""Seconds after which a node that is silent counts as gone for good."""
_STATES = {"fresh": "waiting", "assigned": "trained"} | {
    state: state for state in ("stale", "filtered", "surplus", "empty", "disowned")
}
"""States of groups by the ledger's words for them."""
_FATES = {
    *("trained", "waiting", "in_batches", "under_way", "lost", "duplicate", "no_trainer", "failed"),
    *("no_signal", "no_weight", "skipped", "too_long", "token", "advantage", "logprob"),
    *("empty", "stale", "filtered", "surplus", "disowned"),
}
"""Trainers name fates of tokens; what is none of these is `other`."""


class Measures:
    """The metrics of one service, whose ledger is asked for them at most once a second, and whether
    its database answers.
    """

    def __init__(self, ledger: Ledger, access: Access | None) -> None:
        """
        Args:
            ledger: its `status` is read, and whether its database answers.
            access: whom `/metrics` answers; None: everybody.
        """
        self._status = Cached(ledger.status, Unavailable, Refused, UserError)
        self.monitor = Monitor(_NAME, access, value_of=_method, is_healthy=ledger.answers)
        text = "Seconds that the ledger, with its database, worked on a request."
        self.ledger_seconds = self.monitor.seconds(f"{_NAME}_ledger_seconds", text, "method")
        self.monitor.add(self._ledger)

    def _ledger(self) -> Iterator[Metric]:
        status = self._status.get()
        yield gauge(f"{_NAME}_up", "1: the database answers, 0: it does not.", status is not None)
        if status is None:
            return
        yield from _work(status)
        yield from _policies(status["policies"])
        yield from _nodes(status["nodes"])


def _method(path: str) -> str:
    name = path.removeprefix(PREFIX)
    return name if path == PREFIX + name and name in METHODS else OTHER


def _work(status: Mapping[str, Any]) -> Iterator[Metric]:
    text = "Seconds since 1970 on the database's clock when the ledger was read."
    yield gauge(f"{_NAME}_ledger_time_seconds", text, status["time_s"])
    yield gauge(f"{_NAME}_leases", "Leases that nodes hold.", status["work_items"]["leased"])
    text = "Work items by state; failed: given up after dataflow.max_attempts failures."
    yield gauge(f"{_NAME}_work_items", text, status["work_items"], ("state",))
    lost = {ending.replace(" ", "_"): num for ending, num in status["lost_leases"].items()}
    text = "Leases that ended before their group came, by reason; a renewal takes one back."
    yield gauge(f"{_NAME}_lost_leases", text, lost, ("reason",))
    tasks = status["tasks"]
    text = "Questions that the prompt filter was asked about."
    yield counter(f"{_NAME}_prompts_asked", text, tasks["asked"])
    text = "Questions that the prompt filter admitted."
    yield counter(f"{_NAME}_prompts_admitted", text, tasks["admitted"])
    text = "Nodes that there should be for the trainers not to wait (docs/dataflow.md)."
    yield gauge(f"{_NAME}_nodes_target", text, status["pool"]["target"])
    text = "Evaluations that are under way."
    yield gauge(f"{_NAME}_evaluations", text, len(status["evaluations"]))


def _policies(policies: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of policies, whose names are those of `records.PolicyName`."""
    by_policy = ("policy",)

    def by_name(key: str) -> dict[str, float]:
        return {name: policy[key] for name, policy in policies.items()}

    yield gauge(f"{_NAME}_step", "Newest step with a batch.", by_name("step"), by_policy)
    text = "Newest version of the weights."
    yield gauge(f"{_NAME}_weights_version", text, by_name("version"), by_policy)
    states = {name: policy["state"] for name, policy in policies.items()}
    liveness = {name: state == "live" for name, state in states.items() if state != "done"}
    text = (
        "1: the trainer is heard, 0: not for dataflow.trainer_timeout_s; missing once it is done."
    )
    yield gauge(f"{_NAME}_trainer_up", text, liveness, by_policy)
    for key, did in (("busy", "trained"), ("waited", "waited for batches")):
        text = f"Seconds that the trainer {did}, told at the end of each step."
        yield counter(f"{_NAME}_trainer_{key}_seconds", text, by_name(f"{key}_s"), by_policy)
    for statistic in ("mean", "max"):
        text = f"Versions that the groups of the newest batch were behind, {statistic}."
        key = f"staleness_{statistic}"
        ages = {name: p["batch"][key] for name, p in policies.items() if key in p["batch"]}
        yield gauge(f"{_NAME}_batch_staleness_{statistic}_versions", text, ages, by_policy)
    groups: Counter[tuple[str, str]] = Counter()
    fates: Counter[tuple[str, str]] = Counter()
    sampled = {}
    for name, policy in policies.items():
        groups.update({(name, state): 0 for state in _STATES.values()})
        for state, group in policy["groups"].items():
            groups[name, _STATES.get(state, OTHER)] += group["num"]
        account = account_of(policy["tokens"])
        sampled[name] = account.sampled
        for fate, num in account.fates.items():
            fates[name, fate if fate in _FATES else OTHER] += num
    text = "Groups by state; trained: they are in batches."
    yield gauge(f"{_NAME}_groups", text, groups, ("policy", "state"))
    text = "What has become of the sampled tokens so far."
    yield gauge(f"{_NAME}_tokens", text, fates, ("policy", "fate"))
    text = "Tokens that nodes have sampled."
    yield counter(f"{_NAME}_sampled_tokens", text, sampled, by_policy)


def _nodes(nodes: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield counts of nodes, without names: these are chosen by others, and change."""
    states = Counter({"alive": 0, "silent": 0, "gone": 0})
    names = {"live": "alive", "silent": "silent", "ended": "gone"}
    for node in nodes.values():
        is_gone = node["seen_s_ago"] > _GONE_S
        states["gone" if is_gone else names[node["state"]]] += 1
    text = (
        "Nodes by state; silent: not heard for dataflow.lease_s, gone: nor for an hour, or ended."
    )
    yield gauge(f"{_NAME}_nodes", text, states, ("state",))
    busy_s, waited_s = (sum(node[key] for node in nodes.values()) for key in ("busy_s", "waited_s"))
    text = "Seconds that nodes had rollouts under way."
    yield counter(f"{_NAME}_nodes_busy_seconds", text, busy_s)
    text = "Seconds that nodes waited for work."
    yield counter(f"{_NAME}_nodes_waited_seconds", text, waited_s)
