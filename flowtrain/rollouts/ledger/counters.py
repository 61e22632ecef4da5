"""Counters, so that a report does not read all that ever happened.

Each is kept by the transaction that changes what it counts (`Transaction.count`), which adds to it
last of all: so no transaction holds the row of a counter while it waits for another lock. The audit
counts again and compares.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flowtrain.rollouts.ledger.sql import Transaction

Key = tuple[str, str, str]
"""(policy, what is counted, of which kind): what is one of

- ended: leases that ended without a group, by the reason's first words; of no policy
- pushes: committed groups by node; of no policy
- groups, trainable: groups that no longer wait, and their tokens to train, by state
- fates: tokens of committed groups by what became of them, those that still wait left out
- replayed: tokens of groups that were trained again
- pushed, shared, duplicate: tokens by process of a node, see `ProcessTokens`
"""
FATE_OF = {"": "no_trainer", "assigned": "in_batches"}
"""Fates of tokens by the state of their group's share ("": it has none), where the state is no good
name.
"""


def process(node: str, life: str) -> str:
    return f"{node} {life}"


def kind_of(ending: str) -> str:
    """Return the kind of a lease's ending; what nodes say themselves comes behind a colon."""
    return ending.partition(":")[0]


def close_shares(
    transaction: Transaction, policy: str, state: str, step: int, where: str, *values: object
) -> int:
    """Leave the waiting groups of a policy out for the reason `state`, found with `step`. Returns
    how many they are.
    """
    tokens = (
        "SELECT t.num_tokens FROM groups g JOIN tokens t ON t.work_item = g.work_item"
        " AND t.attempt = g.attempt WHERE g.work_item = shares.work_item"
        " AND t.policy = shares.policy"
    )
    rows = transaction.all(
        "UPDATE shares SET state = ?, step = ? WHERE policy = ? AND state = 'fresh'"
        f" AND {where} RETURNING num_tokens, coalesce(({tokens}), 0) AS num_sampled",
        *(state, step, policy, *values),
    )
    count_groups(
        transaction,
        (policy, state),
        len(rows),
        sum(row.num_tokens for row in rows),
        sum(row.num_sampled for row in rows),
    )
    return len(rows)


def count_groups(
    transaction: Transaction, of: tuple[str, str], num: int, trainable: int, num_tokens: int
) -> None:
    """Count groups `of` (policy, state), their tokens to train and all their tokens."""
    policy, state = of
    transaction.count(policy, "groups", state, num)
    transaction.count(policy, "trainable", state, trainable)
    transaction.count(policy, "fates", FATE_OF.get(state, state), num_tokens)


def count_batch(transaction: Transaction, policy: str, step: int) -> None:
    """Count the groups of a batch that has just been made."""
    totals = batch_tokens(transaction, policy, step)
    count_groups(
        transaction, (policy, "assigned"), totals.num, int(totals.trainable), int(totals.num_tokens)
    )


def batch_tokens(transaction: Transaction, policy: str, step: int) -> Any:
    """Sum the groups of a batch that are new: their number, their tokens to train and all their
    tokens; and the tokens of those that are trained again, `num_replayed`.
    """
    return transaction.one(
        "SELECT coalesce(sum(1 - a.is_replay), 0) AS num,"
        " coalesce(sum(s.num_tokens * (1 - a.is_replay)), 0) AS trainable,"
        " coalesce(sum(t.num_tokens * (1 - a.is_replay)), 0) AS num_tokens,"
        " coalesce(sum(t.num_tokens * a.is_replay), 0) AS num_replayed FROM assignments a"
        " JOIN shares s ON s.work_item = a.work_item AND s.policy = a.policy"
        " JOIN groups g ON g.work_item = a.work_item"
        " LEFT JOIN tokens t ON t.work_item = g.work_item AND t.attempt = g.attempt"
        " AND t.policy = a.policy WHERE a.policy = ? AND a.step = ?",
        *(policy, step),
    )


def read_counters(transaction: Transaction, policy: str, what: str) -> dict[str, int]:
    """Return the counters by their kind, without those that are 0."""
    rows = transaction.all(
        "SELECT name, num FROM counters WHERE policy = ? AND what = ? AND num <> 0 ORDER BY name",
        *(policy, what),
    )
    return {row.name: row.num for row in rows}


def counter_problems(transaction: Transaction) -> Iterator[str]:
    """Yield the counters that do not say what the tables do."""
    rows = transaction.all("SELECT * FROM counters WHERE num <> 0")
    stored = {(row.policy, row.what, row.name): int(row.num) for row in rows}
    recounted = {key: num for key, num in recount(transaction).items() if num}
    for key in sorted(stored.keys() | recounted.keys()):
        if stored.get(key, 0) != recounted.get(key, 0):
            name = " ".join(filter(None, key))
            yield f"a counter is wrong ({name}: {stored.get(key, 0)}, not {recounted.get(key, 0)})"


def recount(transaction: Transaction) -> Counter[Key]:
    """Count everything again, from the tables that have it."""
    counts: Counter[Key] = Counter()
    for row in transaction.all(
        "SELECT ending, count(*) AS num FROM leases WHERE ending <> '' GROUP BY ending"
    ):
        counts["", "ended", kind_of(row.ending)] += row.num
    for row in transaction.all("SELECT node, count(*) AS num FROM groups GROUP BY node"):
        counts["", "pushes", row.node] = row.num
    for row in transaction.all(
        "SELECT policy, state, count(*) AS num, sum(num_tokens) AS trainable FROM shares"
        " WHERE state <> 'fresh' GROUP BY policy, state"
    ):
        counts[row.policy, "groups", row.state] = row.num
        counts[row.policy, "trainable", row.state] = int(row.trainable)
    for row in transaction.all(_PROCESSES):
        name = process(row.node, row.life)
        for what in ("pushed", "shared", "duplicate"):
            counts[row.policy, what, name] = int(getattr(row, what))
    for row in transaction.all(_FATES):
        counts[row.policy, "fates", FATE_OF.get(row.state, row.state)] += int(row.num)
    for batch in transaction.all("SELECT policy, step, tokens FROM batches WHERE tokens <> '{}'"):
        key = (batch.policy, batch.step)
        counts[batch.policy, "replayed", ""] += int(batch_tokens(transaction, *key).num_replayed)
        for fate, num in json.loads(batch.tokens).items():
            counts[batch.policy, "fates", fate] += num
    return counts


_PROCESSES = """
    SELECT t.policy, l.node, l.life, sum(t.num_tokens - t.num_shared) AS pushed,
    sum(CASE WHEN g.work_item IS NULL THEN 0 ELSE t.num_shared END) AS shared,
    sum(CASE WHEN g.work_item IS NULL THEN t.num_tokens - t.num_shared ELSE 0 END) AS duplicate
    FROM tokens t JOIN leases l ON l.work_item = t.work_item AND l.attempt = t.attempt
    LEFT JOIN groups g ON g.work_item = t.work_item AND g.attempt = t.attempt
    GROUP BY t.policy, l.node, l.life"""
"""Tokens that processes of nodes have pushed and no other rollout had sampled, those that branches
in committed groups share with others, and those that came too late."""
_FATES = """
    SELECT t.policy, coalesce(s.state, '') AS state, sum(t.num_tokens) AS num FROM groups g
    JOIN tokens t ON t.work_item = g.work_item AND t.attempt = g.attempt
    LEFT JOIN shares s ON s.work_item = t.work_item AND s.policy = t.policy
    LEFT JOIN batches b ON b.policy = s.policy AND b.step = s.step AND s.state = 'assigned'
    WHERE coalesce(s.state, '') <> 'fresh' AND coalesce(b.tokens, '{}') = '{}'
    GROUP BY t.policy, coalesce(s.state, '')"""
"""Tokens of committed groups by the state of their share, without those of batches that a trainer
has told about."""
