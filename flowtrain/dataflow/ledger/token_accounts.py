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
from flowtrain.dataflow.contract import Refused
from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.types import TokenAccount
from flowtrain.types.token_account import LOST

_MOST = 1 << 53
_MAX_REASONS = 32
_FATE_OF = {
    "fresh": "waiting",
    "": "no_trainer",
    "assigned": "in_batches",
}
"""Fates of the tokens of a group by the state of its share, where the state is no good name: it may
have none, and a batch that its trainer has told about has better ones."""


def note_sampled(
    transaction: Transaction, config: Config, node: str, life: str, sampled: Mapping[str, int]
) -> None:
    """Note how many tokens a process of a node has sampled; an older number changes nothing."""
    for policy in config.policy_names:
        if policy not in sampled:
            continue
        if not 0 <= (num_tokens := sampled[policy]) <= _MOST:
            raise Refused(f"{num_tokens} is no number of sampled tokens")
        transaction.run(
            "INSERT INTO sampled VALUES (?, ?, ?, ?)"
            " ON CONFLICT (node, life, policy) DO UPDATE SET num_tokens = excluded.num_tokens"
            " WHERE excluded.num_tokens > sampled.num_tokens",
            *(node, life, policy, num_tokens),
        )


def note_batch(transaction: Transaction, policy: str, step: int, tokens: Mapping[str, int]) -> None:
    """Note what a trainer says became of the tokens of a batch."""
    if not tokens:
        return
    is_sound = all(len(name) <= 100 and 0 <= num <= _MOST for name, num in tokens.items())
    if len(tokens) > _MAX_REASONS or not is_sound:
        raise Refused(f"the tokens of step {step} are no account of a batch")
    transaction.run(
        "UPDATE batches SET tokens = ? WHERE policy = ? AND step = ?",
        *(json.dumps(dict(tokens)), policy, step),
    )


def token_accounts(transaction: Transaction) -> dict[str, TokenAccount]:
    """Return the account of each policy that has a trainer, over all that has happened so far."""
    accounts = {}
    for row in transaction.all("SELECT name FROM policies ORDER BY number"):
        fates: Counter[str] = Counter()
        sampled = 0
        for life in _lives(transaction, row.name):
            sampled += life.num_sampled
            fates["under_way" if life.num_leased else LOST] += life.num_sampled - life.num_pushed
            fates["duplicate"] += life.num_duplicate
        shared = 0
        for group in _groups(transaction, row.name):
            shared += group.num_shared
            if group.state != "assigned" or not group.is_told:
                fates[_FATE_OF.get(group.state, group.state)] += group.num_tokens
        told = _told(transaction, row.name)
        for batch in told:
            fates.update(json.loads(batch.tokens))
        replayed = sum(int(batch.num_replayed) for batch in told)
        known = {name: num for name, num in fates.items() if num}
        accounts[row.name] = TokenAccount(sampled, shared, replayed, known)
    return accounts


def token_problems(transaction: Transaction) -> Iterator[str]:
    """Yield what does not add up."""
    for row in transaction.all("SELECT name FROM policies ORDER BY number"):
        for life in _lives(transaction, row.name):
            if life.num_sampled < life.num_pushed:
                yield (
                    f"node {life.node!r} says that it has sampled {life.num_sampled:,} tokens of "
                    f"{row.name}, and has pushed {life.num_pushed:,}"
                )
        for batch in _told(transaction, row.name):
            num_told = sum(json.loads(batch.tokens).values())
            if num_told != batch.num_tokens:
                yield (
                    f"the trainer of {row.name} accounts for {num_told:,} tokens of step "
                    f"{batch.step}, its batch has {batch.num_tokens:,}"
                )


def _lives(transaction: Transaction, policy: str) -> list[Any]:
    """Processes of nodes, each with what it says it has sampled (what it has pushed, if it does not
    say), what it has pushed (tokens that no other rollout had sampled), what of that came too late,
    and how many leases it has.
    """
    return transaction.all(
        "SELECT n.node, coalesce(s.num_tokens, p.num, 0) AS num_sampled,"
        " coalesce(p.num, 0) AS num_pushed, coalesce(p.num_duplicate, 0) AS num_duplicate,"
        " coalesce(p.num_leased, 0) AS num_leased"
        " FROM (SELECT node, life FROM sampled UNION SELECT node, life FROM leases) n"
        " LEFT JOIN sampled s ON s.node = n.node AND s.life = n.life AND s.policy = ?"
        " LEFT JOIN (SELECT l.node, l.life, sum(coalesce(t.num_tokens - t.num_shared, 0)) AS num,"
        " sum(CASE WHEN g.work_item IS NULL THEN coalesce(t.num_tokens - t.num_shared, 0)"
        " ELSE 0 END) AS num_duplicate,"
        " sum(CASE WHEN w.state = 'leased' AND w.attempt = l.attempt THEN 1 ELSE 0 END)"
        " AS num_leased"
        " FROM leases l JOIN work_items w ON w.id = l.work_item AND w.id > 0"
        " LEFT JOIN tokens t ON t.work_item = l.work_item AND t.attempt = l.attempt"
        " AND t.policy = ?"
        " LEFT JOIN groups g ON g.work_item = l.work_item AND g.attempt = l.attempt"
        " GROUP BY l.node, l.life) p ON p.node = n.node AND p.life = n.life"
        " ORDER BY n.node, n.life",
        *(policy, policy),
    )


def _groups(transaction: Transaction, policy: str) -> list[Any]:
    """Tokens of committed groups, by the state of their shares ("": there is none) and whether the
    trainer has told what became of their batch.
    """
    return transaction.all(
        "SELECT coalesce(s.state, '') AS state,"
        " CASE WHEN coalesce(b.tokens, '{}') = '{}' THEN 0 ELSE 1 END AS is_told,"
        " sum(t.num_tokens) AS num_tokens, sum(t.num_shared) AS num_shared FROM groups g"
        " JOIN tokens t ON t.work_item = g.work_item AND t.attempt = g.attempt AND t.policy = ?"
        " LEFT JOIN shares s ON s.work_item = g.work_item AND s.policy = t.policy"
        " LEFT JOIN batches b ON b.policy = s.policy AND b.step = s.step AND s.state = 'assigned'"
        " GROUP BY 1, 2",
        policy,
    )


def _told(transaction: Transaction, policy: str) -> list[Any]:
    """Batches that their trainer has told about, each with the tokens of its groups and of those
    among them that were trained again.
    """
    return transaction.all(
        "SELECT b.step, b.tokens, coalesce(sum(t.num_tokens), 0) AS num_tokens,"
        " coalesce(sum(t.num_tokens * a.is_replay), 0) AS num_replayed FROM batches b"
        " JOIN assignments a ON a.policy = b.policy AND a.step = b.step"
        " JOIN groups g ON g.work_item = a.work_item"
        " LEFT JOIN tokens t ON t.work_item = g.work_item AND t.attempt = g.attempt"
        " AND t.policy = b.policy"
        " WHERE b.policy = ? AND b.tokens <> '{}' GROUP BY b.step, b.tokens ORDER BY b.step",
        policy,
    )
