"""Batches: the groups of a training step, chosen once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.config import Config, Dataflow
from flowtrain.rollouts.contract import AssignedGroup, Batch, BatchRequest, Refused
from flowtrain.rollouts.ledger.counters import close_shares, count_batch
from flowtrain.rollouts.ledger.prompts import candidate, num_leased, number_groups
from flowtrain.rollouts.ledger.schema import locked
from flowtrain.rollouts.ledger.sql import Database, Transaction, marks
from flowtrain.rollouts.ledger.trainers import MAX_RANKS, heard_policy, policy_rows
from flowtrain.rollouts.rules import Candidate, Selector
from flowtrain.utils.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Batches:
    database: Database
    config: Config
    selector: Selector
    replay_selector: Selector

    def batch(self, request: BatchRequest) -> Batch:
        """Look once; who serves the ledger waits for its clients."""
        if not 0 <= request.rank < request.num_ranks <= MAX_RANKS:
            raise Refused(
                f"rank={request.rank} must be at least 0 and below num_ranks={request.num_ranks}, "
                f"which is at most {MAX_RANKS}"
            )
        step = request.step
        with locked(self.database) as (transaction, meta):
            timeout_s = self.config.dataflow.trainer_timeout_s
            policy = heard_policy(transaction, request.policy, timeout_s, request.life)
            if not policy.checkpoint < step <= policy.newest + 1:
                raise Refused(
                    f"step {step} of {policy.name}: its checkpoint is of step "
                    f"{policy.checkpoint}, so only batches of steps {policy.checkpoint + 1} to "
                    f"{policy.newest + 1} are available"
                )
            # An older step is served again, to a trainer that resumes, as it was put together.
            if step == policy.newest + 1 and (
                num_missing := self._put_together(transaction, meta, policy, step)
            ):
                now, lease_s = transaction.now(), self.config.dataflow.lease_s
                return Batch((), num_missing, waiting=_waiting_text(transaction, now, lease_s))
        # Megabytes are read without the lock that every lease waits for.
        with self.database.read() as transaction:
            return _read(transaction, request)

    def _put_together(self, transaction: Transaction, meta: Any, policy: Any, step: int) -> int:
        """Make the batch, or return how many groups it lacks."""
        # What is pushed from here on has no number, and is for a later batch.
        number_groups(transaction, meta.num_events)
        oldest = step - 1 - policy.max_staleness
        close_shares(transaction, policy.name, "stale", step, "min_version < ?", oldest)
        other_policies = [row for row in policy_rows(transaction) if row.name != policy.name]
        _drop_surplus(transaction, other_policies, self.config.dataflow)
        waiting = _fresh(transaction, policy)
        replays: list[int] = []
        if num := self.config.dataflow.num_replays(policy.num_groups):
            candidates = _replayable(transaction, policy, step)
            seed = self._seed("replay", policy, step)
            replays = _select(self.replay_selector, candidates, num, seed)
        num = policy.num_groups - len(replays)
        if len(waiting) < num:
            return num - len(waiting)
        fresh = _select(self.selector, waiting, num, self._seed("select", policy, step))
        if len(fresh) < num:
            return num - len(fresh)
        assignments = [(work_item, 0) for work_item in fresh] + [
            (work_item, 1) for work_item in replays
        ]
        transaction.many(
            f"INSERT INTO assignments VALUES {marks(range(5))}",
            [(policy.name, step, index, *item) for index, item in enumerate(assignments)],
        )
        transaction.many(
            "UPDATE shares SET state = 'assigned', step = ? WHERE policy = ? AND work_item = ?",
            [(step, policy.name, work_item) for work_item in fresh],
        )
        count_batch(transaction, policy.name, step)
        now = transaction.now()
        transaction.run(
            "UPDATE policies SET newest = ?, seen_s = ? WHERE name = ?", step, now, policy.name
        )
        stats = json.dumps(_stats(transaction, policy.name, step))
        row = (policy.name, step, now, policy.num_groups, policy.max_staleness, stats, "{}")
        transaction.run(f"INSERT INTO batches VALUES {marks(row)}", *row)
        return 0

    def _seed(self, name: str, policy: Any, step: int) -> int:
        return derive_seed(self.config.run.seed, name, policy.name, step)


def _select(selector: Selector, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
    work_items = selector.select(candidates, num, seed)
    assert len(work_items) == len(set(work_items)) <= num and set(work_items) <= {
        candidate.outcome.work_item for candidate in candidates
    }, "a selector returns work items of its candidates"
    return work_items


def _drop_surplus(transaction: Transaction, policies: Sequence[Any], options: Dataflow) -> None:
    """Drop the groups that would go stale first, where a trainer cannot keep up with the one that
    begins a batch and shares its groups.
    """
    for policy in policies:
        bound = options.max_waiting or policy.num_groups * (policy.max_staleness + 1)
        if policy.num_fresh > bound:
            close_shares(
                transaction,
                policy.name,
                "surplus",
                policy.newest + 1,
                "work_item IN (SELECT work_item FROM shares WHERE policy = ? AND state = 'fresh'"
                " AND min_version >= ? ORDER BY min_version, work_item LIMIT ?)",
                *(policy.name, policy.newest - policy.max_staleness, policy.num_fresh - bound),
            )


_CANDIDATES = (
    "SELECT s.work_item, s.min_version, g.event, g.rewards, g.num_tokens, g.pushed_s, w.task_id,"
    " w.kind"
    " FROM shares s JOIN groups g ON g.work_item = s.work_item"
    " JOIN work_items w ON w.id = s.work_item"
)


def _fresh(transaction: Transaction, policy: Any) -> list[Candidate]:
    """Return the groups that no batch has had, in the order of their commits."""
    rows = transaction.all(
        f"{_CANDIDATES} WHERE s.policy = ? AND s.state = 'fresh' AND g.event IS NOT NULL"
        " ORDER BY g.event",
        policy.name,
    )
    return [candidate(row, policy.max_staleness) for row in rows]


def _replayable(transaction: Transaction, policy: Any, step: int) -> list[Candidate]:
    """Return the groups of earlier batches that may be trained again in `step`, in the order in
    which they were first assigned; none that its node has disowned.
    """
    rows = transaction.all(
        f"{_CANDIDATES} JOIN assignments a ON a.work_item = s.work_item AND a.policy = s.policy"
        " AND a.is_replay = 0 JOIN payloads d ON d.work_item = s.work_item"
        " JOIN leases l ON l.work_item = g.work_item AND l.attempt = g.attempt"
        " WHERE s.policy = ? AND s.state = 'assigned' AND s.min_version >= ?"
        " AND NOT EXISTS (SELECT 1 FROM nodes n WHERE n.name = l.node AND n.life = l.life"
        " AND n.is_current < 0) ORDER BY a.step, a.position",
        policy.name,
        step - 1 - policy.max_staleness,
    )
    return [candidate(row, policy.max_staleness) for row in rows]


def _waiting_text(transaction: Transaction, now: float, lease_s: float) -> str:
    """Say what is under way, and how many of the nodes that have joined give signs of life."""
    nodes = transaction.one(
        "SELECT count(*) AS num, coalesce(sum(CASE WHEN seen_s <= ? THEN 1 ELSE 0 END), 0) AS"
        " num_silent FROM nodes WHERE is_current = 1",
        now - lease_s,
    )
    silent = f", {nodes.num_silent} silent for {lease_s:g} s or more" if nodes.num_silent else ""
    return f"{num_leased(transaction)} under way; nodes joined: {nodes.num}{silent}"


def _stats(transaction: Transaction, policy: str, step: int) -> dict[str, float]:
    """Return `Batch.stats`; groups count as left out with the first batch after that was found."""
    left_out = {
        row.state: row
        for row in transaction.all(
            "SELECT state, count(*) AS num, avg(num_tokens) AS tokens FROM shares"
            " WHERE policy = ? AND step = ? GROUP BY state",
            policy,
            step,
        )
    }
    assigned = transaction.all(
        "SELECT s.min_version, a.is_replay FROM assignments a"
        " JOIN shares s ON s.work_item = a.work_item AND s.policy = a.policy"
        " WHERE a.policy = ? AND a.step = ?",
        policy,
        step,
    )
    ages = [step - 1 - row.min_version for row in assigned]
    fresh = "SELECT count(*) AS num FROM shares WHERE policy = ? AND state = 'fresh'"
    return {
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": max(ages),
        "num_buffered": transaction.one(fresh, policy).num,
        "num_leased": num_leased(transaction),
        "num_replayed": sum(row.is_replay for row in assigned),
        **{
            f"num_{state}": left_out[state].num if state in left_out else 0
            for state in ("stale", "filtered", "surplus", "empty", "disowned")
        },
        **{
            f"{state}_tokens_mean": float(left_out[state].tokens) if state in left_out else 0.0
            for state in ("stale", "assigned")
        },
    }


def _read(transaction: Transaction, request: BatchRequest) -> Batch:
    """Read the part of a batch that a rank trains. Raises Refused when a checkpoint of its step has
    been reported meanwhile.
    """
    batch = transaction.one(
        "SELECT stats FROM batches WHERE policy = ? AND step = ?", request.policy, request.step
    )
    rows = transaction.all(
        "SELECT a.position, a.work_item, a.is_replay, d.payload FROM assignments a"
        " LEFT JOIN payloads d ON d.work_item = a.work_item"
        " WHERE a.policy = ? AND a.step = ? AND a.position % ? = ? ORDER BY a.position",
        request.policy,
        request.step,
        request.num_ranks,
        request.rank,
    )
    if any(row.payload is None for row in rows):
        raise Refused(
            f"step {request.step} of {request.policy}: its groups were deleted, because a "
            "checkpoint of that step or a later one has been reported"
        )
    return Batch(tuple(map(_assigned, rows)), 0, json.loads(batch.stats))


def _assigned(row: Any) -> AssignedGroup:
    return AssignedGroup(row.position, row.work_item, bytes(row.payload), bool(row.is_replay))
