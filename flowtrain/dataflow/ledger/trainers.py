"""What trainers ask: to begin or resume, the batch of a step, and to hear how far they are."""

from __future__ import annotations

import json
import time
from typing import Any

from flowtrain.dataflow.contract import (
    Batch,
    BatchRequest,
    Done,
    Progress,
    Refused,
    Register,
    Registered,
    Served,
    check_protocol,
)
from flowtrain.dataflow.ledger.base import LedgerBase, seconds
from flowtrain.dataflow.ledger.candidates import batch_stats, consumed, forget_payloads, waiting
from flowtrain.dataflow.ledger.curation import number_groups
from flowtrain.dataflow.ledger.sql import Transaction, marks
from flowtrain.dataflow.rules import reused
from flowtrain.utils.seeds import derive_seed

MAX_WAIT_S = 30.0
_POLL_S = 0.25
"""Groups that were pushed through another process are found so late at most."""


class TrainerRequests(LedgerBase):
    def register(self, request: Register) -> Registered:
        self._check(request)
        with self._alone() as (transaction, meta):
            if not self._is_known(transaction, request):
                self._begin_training(transaction, request)
            newest = transaction.one(
                "SELECT newest FROM policies WHERE name = ?", request.policy
            ).newest
        return Registered(meta.run, newest)

    def _is_known(self, transaction: Transaction, request: Register) -> bool:
        """This life has been registered before. A trainer that has no name for its life begins anew
        each time.
        """
        old = transaction.one(
            "SELECT life FROM trainers WHERE policy = ? AND life = ?", request.policy, request.life
        )
        if not old:
            transaction.run(
                "INSERT INTO trainers VALUES (?, ?, ?, ?)",
                request.policy,
                request.life,
                self._clock(),
                request.step,
            )
        return bool(old and request.life)

    def _begin_training(self, transaction: Transaction, request: Register) -> None:
        now = self._clock()
        old = transaction.one("SELECT * FROM policies WHERE name = ?", request.policy)
        described = (request.layout, request.store, request.num_groups, request.max_staleness)
        if old is None:
            number = transaction.one("SELECT count(*) AS num FROM policies").num + 1
            row = (
                request.policy,
                number,
                *described,
                request.step,
                request.step,
                request.step,
                request.step,
                0,
                now,
                0.0,
                0.0,
            )
            transaction.run(f"INSERT INTO policies VALUES {marks(row)}", *row)
            return
        if old.newest:
            _check_resumed(transaction, request, old)
        transaction.run(
            "UPDATE policies SET layout = ?, store = ?, num_groups = ?, max_staleness = ?, version "
            "= ?, newest = ?, checkpoint = ?,"
            " is_done = 0, seen_s = ? WHERE name = ?",
            *described,
            request.step,
            max(old.newest, request.step),
            request.step,
            now,
            request.policy,
        )

    def _check(self, request: Register) -> None:
        check_protocol("trainer", request.protocol)
        if request.policy not in self._config.policy_names:
            raise Refused(
                f"policy {request.policy!r}: this run's flow has "
                f"{' and '.join(self._config.policy_names)}"
            )
        if request.num_groups < 1 or request.max_staleness < 0 or request.step < 0:
            raise Refused(
                f"{request}: num_groups is at least 1, max_staleness and step are at least 0"
            )
        if 0 < self._options.max_waiting < request.num_groups:
            raise Refused(
                f"dataflow.max_waiting={self._options.max_waiting} must be at least the "
                f"{request.num_groups} groups of a batch"
            )

    def batch(self, request: BatchRequest) -> Batch:
        if not 0 <= request.rank < request.num_ranks:
            raise Refused(
                f"rank={request.rank} must be at least 0 and below num_ranks={request.num_ranks}"
            )
        end = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        while True:
            num_before = self._num_pushed
            answer = self._batch(request)
            left = end - time.monotonic()
            if not answer.num_missing or left <= 0:
                return answer
            num_enough = num_before + answer.num_missing
            with self._pushed:
                self._pushed.wait_for(lambda: self._num_pushed >= num_enough, min(_POLL_S, left))  # noqa: B023

    def _batch(self, request: BatchRequest) -> Batch:
        with self._alone() as (transaction, meta):
            policy = self._trainer(transaction, request.policy)
            if request.step <= policy.checkpoint or request.step > policy.newest + 1:
                raise Refused(
                    f"step {request.step} of {policy.name}: its checkpoint is of step "
                    f"{policy.checkpoint},"
                    f" so a batch of steps {policy.checkpoint + 1} to {policy.newest + 1} can be "
                    "had"
                )
            if request.step == policy.newest + 1 and (
                num_missing := self._put_together(transaction, meta, policy, request.step)
            ):
                return Batch((), num_missing)
            return _answer(transaction, request)

    def _trainer(self, transaction: Transaction, name: str) -> Any:
        """The policy's row; notes the sign of life."""
        now = self._clock()
        policy = transaction.one("SELECT * FROM policies WHERE name = ?", name)
        if policy is None:
            raise Refused(f"policy {name!r} has not been registered")
        if now - policy.seen_s > self._options.trainer_timeout_s / 8:
            transaction.run("UPDATE policies SET seen_s = ? WHERE name = ?", now, name)
        return policy

    def _put_together(self, transaction: Transaction, meta: Any, policy: Any, step: int) -> int:
        """Makes the batch, or returns how many groups it lacks."""
        transaction.run(
            "UPDATE shares SET state = 'stale', step = ? WHERE policy = ? AND state = 'fresh' AND "
            "min_version < ?",
            step,
            policy.name,
            step - 1 - policy.max_staleness,
        )
        num_events = number_groups(transaction, meta.num_events)
        fresh = waiting(transaction, policy)
        share = self._options.replay_share
        again = (
            reused(consumed(transaction, policy, step), policy.num_groups, share, step - 1)
            if share
            else []
        )
        num = policy.num_groups - len(again)
        if len(fresh) < num:
            return num - len(fresh)
        chosen = self._selector.select(
            fresh, num, derive_seed(self._config.run.seed, "select", policy.name, step)
        )
        assert len(chosen) == len(set(chosen)) <= num and set(chosen) <= {
            each.outcome.unit for each in fresh
        }, "the selector's units"
        if len(chosen) < num:
            return num - len(chosen)
        self._write(transaction, policy, step, num_events, chosen, again)
        return 0

    def _write(
        self,
        transaction: Transaction,
        policy: Any,
        step: int,
        num_events: int,
        chosen: list[int],
        again: list[int],
    ) -> None:
        places = [
            (policy.name, step, place, unit, int(place >= len(chosen)))
            for place, unit in enumerate([*chosen, *again])
        ]
        transaction.many(f"INSERT INTO places VALUES {marks(range(5))}", places)
        transaction.many(
            "UPDATE shares SET state = 'served', step = ? WHERE policy = ? AND unit = ?",
            [(step, policy.name, unit) for unit in chosen],
        )
        transaction.run(
            "UPDATE policies SET newest = ?, seen_s = ? WHERE name = ?",
            step,
            self._clock(),
            policy.name,
        )
        stats = json.dumps(batch_stats(transaction, policy.name, step))
        row = (
            policy.name,
            step,
            self._clock(),
            policy.num_groups,
            policy.max_staleness,
            num_events,
            stats,
        )
        transaction.run(f"INSERT INTO batches VALUES {marks(row)}", *row)

    def progress(self, request: Progress) -> Done:
        """Seconds count once, with the first report of a version or that the trainer is done."""
        with self._alone() as (transaction, meta):
            policy = self._trainer(transaction, request.policy)
            if not 0 <= request.checkpoint <= request.version <= policy.newest:
                raise Refused(
                    f"{policy.name} cannot have version {request.version} and a checkpoint of step "
                    f"{request.checkpoint}:"
                    f" {policy.newest} batches have been put together"
                )
            busy_s, waited_s = seconds(request.busy_s), seconds(request.waited_s)
            is_news = request.version > policy.version or (request.is_done and not policy.is_done)
            transaction.run(
                "UPDATE policies SET version = ?, top_version = ?, checkpoint = ?, is_done = ?, "
                "seen_s = ?, busy_s = busy_s + ?,"
                " waited_s = waited_s + ? WHERE name = ?",
                max(request.version, policy.version),
                max(request.version, policy.top_version),
                max(request.checkpoint, policy.checkpoint),
                int(request.is_done or policy.is_done),
                self._clock(),
                busy_s if is_news else 0.0,
                waited_s if is_news else 0.0,
                policy.name,
            )
            if request.version > policy.top_version and policy.number == 1:
                event = number_groups(transaction, meta.num_events) + 1
                transaction.run(
                    "INSERT INTO bumps VALUES (?, ?, ?)", event, policy.name, request.version
                )
                transaction.run("UPDATE meta SET num_events = ?", event)
            if request.checkpoint > policy.checkpoint:
                forget_payloads(transaction, keep_for_replay=self._options.replay_share > 0)
        return Done()


def _check_resumed(transaction: Transaction, request: Register, old: Any) -> None:
    """Raises Refused unless training can go on from that checkpoint with the batches that are
    there.
    """
    if request.layout != old.layout:
        raise Refused(
            f"{old.name} has layout {request.layout}, this run has trained one of {old.layout}: "
            "give the model it began with"
        )
    if request.step > old.newest:
        raise Refused(
            f"a checkpoint of step {request.step} is of another run: this one has put together "
            f"{old.newest} batches"
        )
    num_made = transaction.one(
        "SELECT count(*) AS num FROM batches WHERE policy = ? AND step > ?", old.name, request.step
    ).num
    lost = transaction.one(
        "SELECT count(*) AS num FROM places l LEFT JOIN payloads d ON d.unit = l.unit WHERE "
        "l.policy = ? AND l.step > ? AND d.unit IS NULL",
        old.name,
        request.step,
    ).num
    if lost or num_made < old.newest - request.step:
        raise Refused(
            f"the batches after step {request.step} are gone; {old.name} had a checkpoint of step "
            f"{old.checkpoint}, resume from it"
        )


def _answer(transaction: Transaction, request: BatchRequest) -> Batch:
    """A batch that has been put together."""
    stats = transaction.one(
        "SELECT stats FROM batches WHERE policy = ? AND step = ?", request.policy, request.step
    ).stats
    rows = transaction.all(
        "SELECT l.place, l.unit, l.is_replay, d.payload FROM places l JOIN payloads d ON d.unit = "
        "l.unit"
        " WHERE l.policy = ? AND l.step = ? AND l.place % ? = ? ORDER BY l.place",
        request.policy,
        request.step,
        request.num_ranks,
        request.rank,
    )
    groups = tuple(
        Served(row.place, row.unit, bytes(row.payload), bool(row.is_replay)) for row in rows
    )
    return Batch(groups, 0, json.loads(stats))
