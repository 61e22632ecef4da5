"""A group comes in: whoever pushes a unit first has it committed, once."""

from __future__ import annotations

import json
from typing import Any

from flowtrain.dataflow.codec import unpack_group
from flowtrain.dataflow.contract import Push, Pushed, Refused
from flowtrain.dataflow.ledger.base import LedgerBase
from flowtrain.dataflow.ledger.sql import Transaction, marks
from flowtrain.dataflow.ledger.summary import Summary, Trained, summarise
from flowtrain.dataflow.rules import Outcome

_NOTHING = Trained(0, 0, 0)


class PushRequests(LedgerBase):
    def push(self, request: Push) -> Pushed:
        """Welcome after the lease has run out, too, as long as no other node was faster."""
        summary = summarise(
            unpack_group(request.payload),
            self._config.rollout.group_size,
            self._config.policy_names,
        )
        with self._database.write() as transaction:
            unit = transaction.one(
                "SELECT u.*, l.node AS leased_to FROM units u LEFT JOIN leases l ON l.unit = u.id "
                "AND l.attempt = ?"
                f" WHERE u.id = ? {transaction.lock('u')}",
                request.attempt,
                request.unit,
            )
            if unit is None or unit.leased_to != request.node:
                raise Refused(
                    f"unit {request.unit} was not leased to {request.node!r} in attempt "
                    f"{request.attempt}"
                )
            if summary.task_id != unit.task_id:
                raise Refused(
                    f"unit {unit.id} is of task {unit.task_id!r}, the group of {summary.task_id!r}"
                )
            if unit.state == "committed":
                return Pushed("duplicate")
            self._commit(transaction, request, unit, summary)
        with self._pushed:
            self._num_pushed += 1
            self._pushed.notify_all()
        return Pushed("committed")

    def _commit(self, transaction: Transaction, request: Push, unit: Any, summary: Summary) -> None:
        row = (
            unit.id,
            request.node,
            request.attempt,
            self._clock(),
            json.dumps(summary.rewards),
            summary.num_tokens,
            None,
        )
        transaction.run(f"INSERT INTO groups VALUES {marks(row)}", *row)
        shares = self._shares(transaction, unit, summary)
        transaction.many(f"INSERT INTO shares VALUES {marks(range(6))}", shares)
        if any(state == "fresh" for _, _, state, *_ in shares):
            transaction.run("INSERT INTO payloads VALUES (?, ?)", unit.id, request.payload)
        transaction.run("UPDATE units SET state = 'committed' WHERE id = ?", unit.id)

    def _shares(
        self, transaction: Transaction, unit: Any, summary: Summary
    ) -> list[tuple[object, ...]]:
        """(unit, policy, state, min_version, num_tokens, step): one per policy that is registered."""
        is_kept = self._filter.keeps(
            Outcome(unit.id, unit.task_id, unit.kind, summary.rewards, summary.num_tokens)
        )
        shares: list[tuple[object, ...]] = []
        for policy in transaction.all("SELECT name, newest, is_done FROM policies"):
            trained = summary.trained.get(policy.name, _NOTHING)
            if trained.max_version > policy.newest:
                raise Refused(
                    f"version {trained.max_version} of {policy.name} has not been made, only "
                    f"{policy.newest} batches have"
                )
            state = (
                "surplus"
                if policy.is_done
                else "empty"
                if not trained.num_tokens
                else "fresh"
                if is_kept
                else "filtered"
            )
            step = None if state == "fresh" else policy.newest + 1
            shares.append(
                (unit.id, policy.name, state, trained.min_version, trained.num_tokens, step)
            )
        return shares
