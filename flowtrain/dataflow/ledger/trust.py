"""Which groups are audited, and which nodes are not trusted any more."""

from __future__ import annotations

from random import SystemRandom
from typing import Any

from flowtrain.config import Config
from flowtrain.dataflow.contract import NotAllowed
from flowtrain.dataflow.ledger.sql import Transaction, marks

_random = SystemRandom()


def draw_audit(
    transaction: Transaction, config: Config, node: str, work_item: int, attempt: int
) -> None:
    """Decide whether a committed group is to be audited. Its node cannot know: the seed of the run,
    which nodes have, has no part in it.
    """
    if _random.random() < config.dataflow.audit_share:
        row = (work_item, attempt, node, "open", "", "", 0.0)
        transaction.run(f"INSERT INTO audits VALUES {marks(row)}", *row)


def check_trusted(transaction: Transaction, node: str) -> None:
    """Raise NotAllowed for a node that lied."""
    row = transaction.one("SELECT work_item, problem FROM distrusted WHERE node = ?", node)
    if row is not None:
        raise NotAllowed(
            f"node {node!r} is shut out: its group of work item {row.work_item} is not what it "
            f"says ({row.problem})"
        )


def drop_distrusted(transaction: Transaction, policy: Any) -> None:
    """Drop the waiting groups of nodes that lied. A push may be committed while its node is shut
    out, so batches ask for this too.
    """
    if transaction.one("SELECT node FROM distrusted LIMIT 1") is None:
        return  # or every batch would look at all groups
    transaction.run(
        "UPDATE shares SET state = 'distrusted', step = ? WHERE policy = ? AND state = 'fresh'"
        " AND work_item IN (SELECT g.work_item FROM groups g"
        " JOIN distrusted d ON d.node = g.node)",
        *(policy.newest + 1, policy.name),
    )
