"""Backpressure: a bound on the groups that wait or are under way, so that what is sampled can still
be trained in time; and what that leaves to lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from flowtrain.config import Dataflow
from flowtrain.rollouts.contract import LeaseRequest
from flowtrain.rollouts.ledger.evaluations import is_any_left
from flowtrain.rollouts.ledger.prompts import num_leased
from flowtrain.rollouts.ledger.sql import Transaction
from flowtrain.rollouts.ledger.trainers import is_live, policy_rows


@dataclass(slots=True)
class Openings:
    """The openings for requests at a moment. Whoever takes one leaves less for others."""

    policies: Sequence[Any]
    num_under_way: int
    now: float
    options: Dataflow
    questions: dict[tuple[str, int], int] = field(default_factory=dict)
    """Number of questions that wait, by policy and the oldest version that may answer."""
    is_evaluating: bool = False
    """Questions wait or are under way."""

    def room(self, versions: Mapping[str, int], num_wanted: int) -> tuple[int, str]:
        """Return how many groups to train a node that samples with `versions` may begin, and why
        they are fewer than it wants.
        """
        if not num_wanted:
            return 0, ""
        if self.policies and all(policy.is_done for policy in self.policies):
            return 0, "done"
        trainers = [policy for policy in self.policies if is_live(policy, self.now, self.options)]
        if not trainers:
            return 0, "no trainer"
        room = max(
            _max_groups(policy, self.options, versions) - policy.num_fresh - self.num_under_way
            for policy in trainers
        )
        return max(0, min(num_wanted, room)), "full" if room < num_wanted else ""

    def take(self, request: LeaseRequest) -> bool:
        """Return whether a request need wait no longer: there is something, which it takes, or
        there are news of the policies, or all is done.
        """
        if dict(request.heard) != {policy.name: policy.version for policy in self.policies}:
            return True
        for (policy, step), num in self.questions.items():
            if num > 0 and request.versions.get(policy, -1) >= step:
                self.questions[policy, step] -= request.num
                return True
        num, reason = self.room(request.versions, request.num)
        self.num_under_way += num
        return num > 0 or (reason == "done" and not self.is_evaluating)


def read_openings(
    transaction: Transaction, options: Dataflow, ends_overdue: Callable[[float], bool]
) -> Openings:
    """Read what there is to lease; leases that have run out are not under way any more, if the next
    request ends them.
    """
    now = transaction.now()
    due_s = now if ends_overdue(now) else -inf
    overdue = transaction.one(
        "SELECT count(*) AS num FROM live_leases WHERE until_s < ? AND work_item > 0", due_s
    )
    rows = transaction.all(
        "SELECT e.policy, e.step, count(*) AS num FROM evaluations e"
        " JOIN work_items w ON w.evaluation = e.id AND w.state = 'waiting'"
        " WHERE e.state = 'open' GROUP BY e.policy, e.step"
        " UNION ALL SELECT e.policy, e.step, count(*) AS num FROM live_leases v"
        " JOIN work_items w ON w.id = v.work_item JOIN evaluations e ON e.id = w.evaluation"
        " WHERE v.until_s < ? AND e.state = 'open' GROUP BY e.policy, e.step",
        due_s,
    )
    questions: Counter[tuple[str, int]] = Counter()
    for row in rows:
        questions[row.policy, row.step] += row.num
    under_way = num_leased(transaction) - overdue.num
    policies = policy_rows(transaction)
    is_evaluating = all(policy.is_done for policy in policies) and is_any_left(transaction)
    return Openings(policies, under_way, now, options, questions, is_evaluating)


def _max_groups(policy: Any, options: Dataflow, versions: Mapping[str, int]) -> int:
    """Return how many groups of a policy may wait or be under way for a node that samples with
    `versions`.

    A group of weights v can be trained by steps up to v + 1 + max_staleness. Each step from the
    next one (`newest` + 1) to that one takes num_groups of them, less its replays. While a whole
    batch waits none begins: the trainer lacks nothing, and what is sampled later is less stale.
    """
    if options.max_waiting:
        return options.max_waiting
    if policy.num_fresh >= policy.num_groups:
        return 0
    version = min(policy.version, versions.get(policy.name, policy.version))
    num_steps = version + 1 + policy.max_staleness - policy.newest
    num_fresh = policy.num_groups - options.num_replays(policy.num_groups)
    return policy.num_groups + num_fresh * (num_steps - 1) if num_steps > 0 else 0
