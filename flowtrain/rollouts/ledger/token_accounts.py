"""The account of all tokens: what nodes say they have sampled, and what became of it.

    sampled + shared + replayed = trained + left out by reason + stale + ... + lost

Nodes tell the left side, the ledger counts the groups that they push, and trainers tell what became
of each batch. So the sides come from different hands, and the audit compares them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from flowtrain.config import Config
from flowtrain.records import TokenAccount
from flowtrain.records.token_account import LOST
from flowtrain.rollouts.contract import Refused
from flowtrain.rollouts.ledger.counters import FATE_OF, batch_tokens, process, read_counters
from flowtrain.rollouts.ledger.group_checks import GroupTokens
from flowtrain.rollouts.ledger.sql import Transaction, marks

_MOST = 1 << 53
_MAX_REASONS = 32


def note_sampled(
    transaction: Transaction, config: Config, node: str, life: str, sampled: Mapping[str, int]
) -> None:
    """Note how many tokens a process of a node has sampled; an older number changes nothing."""
    for policy in config.policy_names:
        if policy not in sampled:
            continue
        if not 0 <= (num_tokens := sampled[policy]) <= _MOST:
            raise Refused(f"{num_tokens} is not a valid number of sampled tokens")
        transaction.run(
            "INSERT INTO sampled VALUES (?, ?, ?, ?)"
            " ON CONFLICT (node, life, policy) DO UPDATE SET num_tokens = excluded.num_tokens"
            " WHERE excluded.num_tokens > sampled.num_tokens",
            *(node, life, policy, num_tokens),
        )


def note_group(
    transaction: Transaction,
    lease: Any,
    tokens: Mapping[str, GroupTokens],
    sampled: Mapping[str, int],
    *,
    is_duplicate: bool,
) -> None:
    """Note the tokens of a lease's group, once. Where its node does not say what it samples, it has
    sampled what it pushes.
    """
    key = (lease.work_item, lease.attempt)
    if transaction.one("SELECT policy FROM tokens WHERE work_item = ? AND attempt = ?", *key):
        return
    name = process(lease.node, lease.life)
    for policy, counts in tokens.items():
        if not counts.num_tokens:
            continue
        row = (*key, policy, counts.num_tokens, counts.num_shared, counts.num_failed)
        transaction.run(f"INSERT INTO tokens VALUES {marks(row)}", *row)
        num_own = counts.num_tokens - counts.num_shared
        transaction.count(policy, "pushed", name, num_own)
        if is_duplicate:
            transaction.count(policy, "duplicate", name, num_own)
        else:
            transaction.count(policy, "shared", name, counts.num_shared)
        if policy not in sampled:
            transaction.run(
                f"INSERT INTO sampled VALUES {marks(range(4))} ON CONFLICT (node, life, policy)"
                " DO UPDATE SET num_tokens = sampled.num_tokens + excluded.num_tokens",
                *(lease.node, lease.life, policy, num_own),
            )


def note_batch(transaction: Transaction, policy: str, step: int, tokens: Mapping[str, int]) -> None:
    """Note what a trainer says became of the tokens of a batch."""
    if not tokens:
        return
    is_sound = all(len(name) <= 100 and 0 <= num <= _MOST for name, num in tokens.items())
    if len(tokens) > _MAX_REASONS or not is_sound:
        raise Refused(f"the tokens of step {step} are not a valid token account")
    batch_key = (policy, step)
    batch = transaction.one("SELECT tokens FROM batches WHERE policy = ? AND step = ?", *batch_key)
    if batch is None:
        return
    transaction.run(
        "UPDATE batches SET tokens = ? WHERE policy = ? AND step = ?",
        *(json.dumps(dict(tokens)), policy, step),
    )
    # A trainer that resumes tells of a batch again, so what it told first is taken back.
    earlier_tokens = json.loads(batch.tokens)
    for fate, num in earlier_tokens.items():
        transaction.count(policy, "fates", fate, -num)
    for fate, num in tokens.items():
        transaction.count(policy, "fates", fate, num)
    if not earlier_tokens:
        groups = batch_tokens(transaction, *batch_key)
        transaction.count(policy, "fates", FATE_OF["assigned"], -int(groups.num_tokens))
        transaction.count(policy, "replayed", "", int(groups.num_replayed))


def token_account(transaction: Transaction, policy: str) -> TokenAccount:
    """Return the account of a policy over all that has happened so far."""
    fates = Counter(read_counters(transaction, policy, "fates"))
    pushed, shared, duplicate, replayed = (
        sum(read_counters(transaction, policy, what).values())
        for what in ("pushed", "shared", "duplicate", "replayed")
    )
    waiting = transaction.one(
        "SELECT coalesce(sum(t.num_tokens), 0) AS num FROM shares s"
        " JOIN groups g ON g.work_item = s.work_item"
        " JOIN tokens t ON t.work_item = g.work_item AND t.attempt = g.attempt"
        " AND t.policy = s.policy WHERE s.policy = ? AND s.state = 'fresh'",
        policy,
    )
    total = "SELECT coalesce(sum(num_tokens), 0) AS num FROM sampled WHERE policy = ?"
    sampled = int(transaction.one(total, policy).num)
    under_way = _tokens_under_way(transaction, policy)
    fates["waiting"] += int(waiting.num)
    fates["duplicate"] += duplicate
    fates["under_way"] += under_way
    fates[LOST] += sampled - pushed - under_way
    nonzero = {name: num for name, num in fates.items() if num}
    return TokenAccount(sampled, shared, replayed, nonzero)


def token_problems(transaction: Transaction) -> Iterator[str]:
    """Yield what does not add up."""
    for row in transaction.all(
        "SELECT s.policy, s.node, s.num_tokens, c.num FROM sampled s JOIN counters c"
        " ON c.policy = s.policy AND c.what = 'pushed' AND c.name = s.node || ' ' || s.life"
        " WHERE s.num_tokens < c.num ORDER BY s.policy, s.node"
    ):
        yield (
            f"node {row.node!r} says that it has sampled {row.num_tokens:,} tokens of "
            f"{row.policy}, and has pushed {row.num:,}"
        )
    for batch in transaction.all(
        "SELECT policy, step, tokens FROM batches WHERE tokens <> '{}' ORDER BY policy, step"
    ):
        groups = batch_tokens(transaction, batch.policy, batch.step)
        num_told = sum(json.loads(batch.tokens).values())
        if num_told != (num := int(groups.num_tokens + groups.num_replayed)):
            yield (
                f"the trainer of {batch.policy} accounts for {num_told:,} tokens of step "
                f"{batch.step}, its batch has {num:,}"
            )


def _tokens_under_way(transaction: Transaction, policy: str) -> int:
    """Sum what the processes that have leases now have sampled and not pushed."""
    row = transaction.one(
        "SELECT coalesce(sum(s.num_tokens - coalesce(c.num, 0)), 0) AS num FROM"
        " (SELECT DISTINCT node FROM live_leases WHERE work_item > 0) h"
        " JOIN nodes n ON n.name = h.node AND n.is_current = 1"
        " JOIN sampled s ON s.node = n.name AND s.life = n.life AND s.policy = ?"
        " LEFT JOIN counters c ON c.policy = s.policy AND c.what = 'pushed'"
        " AND c.name = s.node || ' ' || s.life",
        policy,
    )
    return int(row.num)
