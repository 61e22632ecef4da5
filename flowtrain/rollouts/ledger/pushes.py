"""Pushes: the first group that comes for a work item is committed, once; that of a question is a
result of its evaluation.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowtrain.config import Config
from flowtrain.records import Task
from flowtrain.rollouts.codec import decoded, inflated, unpack
from flowtrain.rollouts.contract import Disown, Done, Push, Pushed, Refused, Unavailable
from flowtrain.rollouts.ledger.counters import close_shares, count_groups
from flowtrain.rollouts.ledger.evaluations import evaluation_of, settings_of
from flowtrain.rollouts.ledger.group_checks import NO_TOKENS, GroupLimits, Summary, TrainedTokens
from flowtrain.rollouts.ledger.leases import end_leases_of
from flowtrain.rollouts.ledger.schema import locked
from flowtrain.rollouts.ledger.sql import Database, Transaction, marks
from flowtrain.rollouts.ledger.token_accounts import note_group, note_sampled
from flowtrain.rollouts.rules import GroupFilter, Outcome

_log = logging.getLogger(__name__)
_DISOWNED = "disowned"
"""How leases end whose node has damaged weights, and the state of its groups."""
_LARGE = threading.Lock()
_LARGE_BYTES = 8 << 20
"""Groups of more bytes are decoded one at a time: as objects they take up to 17 times as much."""


class _Share(NamedTuple):
    """A row of `shares`: what a group is to one policy."""

    work_item: int
    policy: str
    state: str
    min_version: int
    num_tokens: int
    step: int | None
    """The step with which it was left out; None: it is fresh."""


@dataclass(frozen=True, slots=True)
class Pushes:
    database: Database
    config: Config
    group_filter: GroupFilter

    def push(self, request: Push) -> Pushed:
        """Commit a group. A lease that has run out still counts if no other node was faster."""
        with self.database.read() as transaction:
            policies = transaction.all("SELECT name, vocab_size, max_positions FROM policies")
            lease = transaction.one(
                "SELECT * FROM leases WHERE work_item = ? AND attempt = ?",
                *(request.work_item, request.attempt),
            )
            evaluation = evaluation_of(transaction, request.work_item)
        if lease is None or lease.node != request.node:
            raise Refused(
                f"work item {request.work_item} was not leased to {request.node!r} in attempt "
                f"{request.attempt}"
            )
        limits = GroupLimits(
            self.config,
            {row.name: (row.vocab_size, row.max_positions) for row in policies},
            None if evaluation is None else settings_of(evaluation),
        )
        # Before any row is locked, because to decode and check a large group takes long.
        plain = inflated(request.payload, limits.max_bytes)
        with _LARGE if len(plain) > _LARGE_BYTES else nullcontext():
            summary = limits.check(decoded(plain, limits.max_bytes))
        with self.database.write() as transaction:
            # Locked, so that of two pushes of a work item the second finds it committed.
            work_item = transaction.one(
                f"SELECT * FROM work_items WHERE id = ? {transaction.lock('work_items')}",
                request.work_item,
            )
            if summary.task != unpack(bytes(work_item.task), Task):
                raise Refused(
                    f"work item {work_item.id} is of task {work_item.task_id!r}, the group of "
                    f"another: {summary.task.id[:100]!r}"
                )
            disowned = "SELECT 1 AS is_so FROM nodes WHERE name = ? AND life = ? AND is_current < 0"
            if transaction.one(disowned, lease.node, lease.life):
                raise Refused(f"node {request.node!r} has disowned what it made")
            # Again, for it may have been collected while the group was read.
            evaluation = evaluation_of(transaction, request.work_item, is_locked=True)
            is_over = evaluation is not None and evaluation.state != "open"
            if work_item.state == "committed" or is_over:
                if evaluation is None:
                    self._count(transaction, request, lease, summary, is_duplicate=True)
                return Pushed("duplicate")
            if evaluation is not None:
                self._keep(transaction, request, summary)
            else:
                self._commit(transaction, request, lease, work_item, summary)
            transaction.run(
                "UPDATE work_items SET state = 'committed' WHERE id = ?", request.work_item
            )
            transaction.run("DELETE FROM live_leases WHERE work_item = ?", request.work_item)
        return Pushed("committed")

    def disown(self, request: Disown) -> Done:
        """Leave out the groups of a node's process that no batch has had, and end its leases."""
        key, num = (request.node, request.life), 0
        own = (
            "work_item IN (SELECT g.work_item FROM groups g JOIN leases l"
            " ON l.work_item = g.work_item AND l.attempt = g.attempt"
            " WHERE l.node = ? AND l.life = ?)"
        )
        with locked(self.database) as (transaction, _):
            current = "SELECT 1 AS is_so FROM nodes WHERE name = ? AND life = ? AND is_current = 1"
            is_current = transaction.one(current, *key) is not None
            transaction.run("UPDATE nodes SET is_current = -1 WHERE name = ? AND life = ?", *key)
            if is_current:
                end_leases_of(transaction, request.node, _DISOWNED, self.config.dataflow)
            for policy in transaction.all("SELECT name, newest FROM policies"):
                step = policy.newest + 1
                num_closed = close_shares(transaction, policy.name, _DISOWNED, step, own, *key)
                num = max(num, num_closed)
        text = "node %s had damaged weights and ends: %d of its waiting groups are excluded"
        _log.warning(text, request.node, num)
        return Done()

    def _keep(self, transaction: Transaction, request: Push, summary: Summary) -> None:
        """Keep the result of a question, with the (oldest, newest) version of each policy."""
        for policy in transaction.all("SELECT name, newest FROM policies"):
            _check_version(policy, summary.trained.get(policy.name, NO_TOKENS))
        versions = {
            name: (tokens.min_version, tokens.max_version)
            for name, tokens in summary.trained.items()
        }
        row = (
            *(request.work_item, request.node, request.attempt),
            *(transaction.now(), json.dumps(versions), request.payload),
        )
        transaction.run(f"INSERT INTO results VALUES {marks(row)}", *row)

    def _count(
        self,
        transaction: Transaction,
        request: Push,
        lease: Any,
        summary: Summary,
        *,
        is_duplicate: bool,
    ) -> None:
        """Note the tokens of the lease's group, whatever becomes of it, and what its node has
        sampled until now.
        """
        note_group(transaction, lease, summary.tokens, request.sampled, is_duplicate=is_duplicate)
        note_sampled(transaction, self.config, request.node, lease.life, request.sampled)

    def _commit(
        self, transaction: Transaction, request: Push, lease: Any, work_item: Any, summary: Summary
    ) -> None:
        rewards = json.dumps(summary.rewards)
        now = transaction.now()
        committed = (now, rewards, summary.num_tokens, None)
        row = (work_item.id, request.node, request.attempt, *committed)
        transaction.run(f"INSERT INTO groups VALUES {marks(row)}", *row)
        self._count(transaction, request, lease, summary, is_duplicate=False)
        transaction.count("", "pushes", request.node, 1)
        shares = self._shares(transaction, work_item, summary, now)
        transaction.many(f"INSERT INTO shares VALUES {marks(range(6))}", shares)
        left_out = {share.policy: share for share in shares if share.state != "fresh"}
        for policy, tokens in summary.tokens.items():
            if policy not in summary.checked:
                transaction.count(policy, "fates", "no_trainer", tokens.num_tokens)
            elif policy in left_out:
                share = left_out[policy]
                fate, num_trainable = (policy, share.state), share.num_tokens
                count_groups(transaction, fate, 1, num_trainable, tokens.num_tokens)
        if any(share.state == "fresh" for share in shares):
            values = (work_item.id, request.payload)
            transaction.run("INSERT INTO payloads VALUES (?, ?)", *values)

    def _shares(
        self, transaction: Transaction, work_item: Any, summary: Summary, now: float
    ) -> list[_Share]:
        """Make the share of each registered policy."""
        task_fields = (work_item.id, work_item.task_id, work_item.kind)
        outcome = Outcome(*task_fields, summary.rewards, summary.num_tokens, now)
        is_kept = self.group_filter.keeps(outcome)
        shares: list[_Share] = []
        for policy in transaction.all("SELECT name, newest, is_done FROM policies"):
            # It registered after the group was checked, which did not know its model's bounds.
            if policy.name not in summary.checked:
                raise Unavailable(f"the trainer of {policy.name} has just started; push again")
            trained = summary.trained.get(policy.name, NO_TOKENS)
            _check_version(policy, trained)
            if policy.is_done:
                state = "surplus"
            elif not trained.num_tokens:
                state = "empty"
            else:
                state = "fresh" if is_kept else "filtered"
            step = None if state == "fresh" else policy.newest + 1
            counts = (trained.min_version, trained.num_tokens, step)
            shares.append(_Share(int(work_item.id), policy.name, state, *counts))
        return shares


def _check_version(policy: Any, trained: TrainedTokens) -> None:
    if trained.max_version > policy.newest:
        raise Refused(
            f"version {trained.max_version} of {policy.name} does not exist: the service has "
            f"assembled only {policy.newest} batches"
        )
