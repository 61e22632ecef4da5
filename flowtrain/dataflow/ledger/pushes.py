"""Pushes: the first group that comes for a work item is committed, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from flowtrain.config import Config
from flowtrain.dataflow.codec import unpack_group
from flowtrain.dataflow.contract import Push, Pushed, Refused
from flowtrain.dataflow.ledger.sql import Database, Transaction, marks
from flowtrain.dataflow.rules import GroupFilter, Outcome
from flowtrain.types import Call, Group, PolicyName, Trajectory


@dataclass(frozen=True, slots=True)
class Pushes:
    database: Database
    config: Config
    clock: Callable[[], float]
    group_filter: GroupFilter

    def push(self, request: Push) -> Pushed:
        """Commit a group. A lease that has run out still counts if no other node was faster."""
        summary = summarise(
            unpack_group(request.payload), self.config.rollout.group_size, self.config.policy_names
        )
        with self.database.write() as transaction:
            work_item = transaction.one(
                "SELECT w.*, l.node AS leased_to FROM work_items w"
                " LEFT JOIN leases l ON l.work_item = w.id AND l.attempt = ?"
                f" WHERE w.id = ? {transaction.lock('w')}",
                request.attempt,
                request.work_item,
            )
            if work_item is None or work_item.leased_to != request.node:
                raise Refused(
                    f"work item {request.work_item} was not leased to {request.node!r} in attempt "
                    f"{request.attempt}"
                )
            if summary.task_id != work_item.task_id:
                raise Refused(
                    f"work item {work_item.id} is of task {work_item.task_id!r}, the group of "
                    f"{summary.task_id!r}"
                )
            if work_item.state == "committed":
                return Pushed("duplicate")
            self._commit(transaction, request, work_item, summary)
        return Pushed("committed")

    def _commit(
        self, transaction: Transaction, request: Push, work_item: Any, summary: Summary
    ) -> None:
        rewards = json.dumps(summary.rewards)
        committed = (self.clock(), rewards, summary.num_tokens, None)
        row = (work_item.id, request.node, request.attempt, *committed)
        transaction.run(f"INSERT INTO groups VALUES {marks(row)}", *row)
        shares = self._shares(transaction, work_item, summary)
        transaction.many(f"INSERT INTO shares VALUES {marks(range(6))}", shares)
        if any(state == "fresh" for _, _, state, *_ in shares):
            transaction.run("INSERT INTO payloads VALUES (?, ?)", work_item.id, request.payload)
        transaction.run("UPDATE work_items SET state = 'committed' WHERE id = ?", work_item.id)

    def _shares(
        self, transaction: Transaction, work_item: Any, summary: Summary
    ) -> list[tuple[object, ...]]:
        """(work item, policy, state, min_version, num_tokens, step) for each registered policy."""
        kind, num_tokens = work_item.kind, summary.num_tokens
        outcome = Outcome(work_item.id, work_item.task_id, kind, summary.rewards, num_tokens)
        is_kept = self.group_filter.keeps(outcome)
        shares: list[tuple[object, ...]] = []
        for policy in transaction.all("SELECT name, newest, is_done FROM policies"):
            trained = summary.trained.get(policy.name, _NO_TOKENS)
            if trained.max_version > policy.newest:
                raise Refused(
                    f"version {trained.max_version} of {policy.name} has not been made, only "
                    f"{policy.newest} batches have"
                )
            if policy.is_done:
                state = "surplus"
            elif not trained.num_tokens:
                state = "empty"
            else:
                state = "fresh" if is_kept else "filtered"
            step = None if state == "fresh" else policy.newest + 1
            counts = (trained.min_version, trained.num_tokens, step)
            shares.append((work_item.id, policy.name, state, *counts))
        return shares


# ---- checks: the ledger computes versions, rewards and lengths itself and trusts no node


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Tokens of one policy in a group."""

    num_tokens: int
    min_version: int
    max_version: int


_NO_TOKENS = TrainedTokens(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Summary:
    task_id: str
    rewards: tuple[float, ...]
    """Rewards of the rollouts that finished."""
    num_tokens: int
    """Number of sampled tokens."""
    trained: dict[PolicyName, TrainedTokens]
    """By policy; without the policies that have no token to train."""


def summarise(group: Group, group_size: int, policies: Sequence[PolicyName]) -> Summary:
    """Raises Refused unless this is a group of `group_size` rollouts of one task, scored or failed,
    that can be trained.
    """
    if len(group.trajectories) != group_size:
        raise Refused(
            f"the group has {len(group.trajectories)} rollouts, this run's have {group_size}"
        )
    task = group.trajectories[0].task
    for trajectory in group.trajectories:
        if trajectory.task != task:
            raise Refused(f"rollouts of one group are of {task.id!r} and of {trajectory.task.id!r}")
        if any("planner" not in turn.calls for turn in trajectory.turns):
            raise Refused("a turn has no call of the planner")
        if not trajectory.error and (trajectory.reward is None or not isfinite(trajectory.reward)):
            raise Refused(
                f"a rollout has the reward {trajectory.reward}: it must be scored, or say why it "
                "failed"
            )
    trained: dict[PolicyName, TrainedTokens] = {}
    for trajectory in group.finished:
        for policy, found in _trained(trajectory, policies):
            trained[policy] = _sum(trained[policy], found) if policy in trained else found
    return Summary(
        task_id=task.id,
        rewards=tuple(float(trajectory.reward or 0) for trajectory in group.finished),
        num_tokens=sum(trajectory.num_sampled_tokens for trajectory in group.trajectories),
        trained=trained,
    )


def _trained(
    trajectory: Trajectory, policies: Sequence[PolicyName]
) -> Iterator[tuple[PolicyName, TrainedTokens]]:
    """The tokens of each turn and policy that sampled in it."""
    for turn in trajectory.turns:
        for policy in policies:
            call = turn.calls.get(policy)
            if call is None or not call.response_ids:
                continue
            _check(policy, call)
            versions = [span.version for span in call.spans]
            yield policy, TrainedTokens(len(call.response_ids), min(versions), max(versions))


def _check(policy: str, call: Call) -> None:
    """Raises Refused unless there is a log-prob per token and spans cover each token once."""
    num_tokens = len(call.response_ids)
    if len(call.logprobs) != num_tokens or not all(map(isfinite, call.logprobs)):
        raise Refused(
            f"a response of {policy} has {num_tokens} tokens and needs as many finite log-probs"
        )
    end = 0
    for span in call.spans:
        if span.start != end or span.end <= span.start or span.version < 0:
            break
        end = span.end
    if end != num_tokens:
        raise Refused(
            f"a response of {policy} has {num_tokens} tokens, its version spans must cover each of "
            "them once"
        )


def _sum(a: TrainedTokens, b: TrainedTokens) -> TrainedTokens:
    return TrainedTokens(
        a.num_tokens + b.num_tokens,
        min(a.min_version, b.min_version),
        max(a.max_version, b.max_version),
    )
