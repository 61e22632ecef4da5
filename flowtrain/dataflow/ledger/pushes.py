"""Pushes: the first group that comes for a work item is committed, once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flowtrain.config import Config
from flowtrain.dataflow.codec import unpack, unpack_group
from flowtrain.dataflow.contract import Push, Pushed, Refused, Unavailable
from flowtrain.dataflow.ledger.group_checks import NO_TOKENS, GroupLimits, Summary
from flowtrain.dataflow.ledger.sql import Database, Transaction, marks
from flowtrain.dataflow.rules import GroupFilter, Outcome
from flowtrain.types import Task


@dataclass(frozen=True, slots=True)
class Pushes:
    database: Database
    config: Config
    group_filter: GroupFilter

    def push(self, request: Push) -> Pushed:
        """Commit a group. A lease that has run out still counts if no other node was faster."""
        with self.database.read() as transaction:
            policies = transaction.all("SELECT name, vocab_size, max_positions FROM policies")
        limits = GroupLimits(
            self.config, {row.name: (row.vocab_size, row.max_positions) for row in policies}
        )
        summary = limits.check(unpack_group(request.payload))
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
            if summary.task != unpack(bytes(work_item.task), Task):
                raise Refused(
                    f"work item {work_item.id} is of task {work_item.task_id!r}, the group of "
                    f"another: {summary.task.id[:100]!r}"
                )
            if work_item.state == "committed":
                return Pushed("duplicate")
            self._commit(transaction, request, work_item, summary)
        return Pushed("committed")

    def _commit(
        self, transaction: Transaction, request: Push, work_item: Any, summary: Summary
    ) -> None:
        rewards = json.dumps(summary.rewards)
        committed = (transaction.now(), rewards, summary.num_tokens, None)
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
            if policy.name not in summary.checked:
                raise Unavailable(f"the trainer of {policy.name} has just begun; push again")
            trained = summary.trained.get(policy.name, NO_TOKENS)
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
