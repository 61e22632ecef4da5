"""The tables, the same on SQLite and PostgreSQL (SQLite understands PostgreSQL's names of types),
and the checks that make a database a ledger.

A work item (a task to roll out) is drawn, leased, waiting for another lease, committed or failed.
Its group, once committed, has a row with what rules look at, a payload, and a share per policy. A
share is fresh, assigned to a batch, or left out for a reason that stays on record. Keys and unique
indices alone keep what matters most: one group per work item, and at most one batch of each policy
that has it fresh.

Frequently written data is narrow and separate from history: `meta` has counters under a lock,
`live_leases` the expiry times of running leases.

How many tokens of each policy a group has is in `tokens`, by lease, so that those of a group that
came too late are there as well; `sampled` has what each process of a node says it has sampled, and
`batches.tokens` what its trainer says became of the batch.

`nodes.is_current` is 1 for the process of a node that is at work, 0 for those before it, and -1 for
one that has disowned its groups: they stay out, also those that come late.

A work item with a number below 0 is a question of an evaluation, and its position one in that
(`evaluation` is 0 for all others). Its group is a result, and nothing else that trains knows of it.
An evaluation is open while some of its questions may be left, then complete, and collected once its
trainer no longer needs the groups.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowtrain.records import UserError
from flowtrain.rollouts.ledger.sql import Database, Transaction

VERSION = 8
"""Of the tables: one more with every change of them."""

TABLES = """
CREATE TABLE meta (
    version BIGINT NOT NULL, run TEXT NOT NULL,
    num_positions BIGINT NOT NULL, num_work_items BIGINT NOT NULL, num_events BIGINT NOT NULL,
    num_groups BIGINT NOT NULL);
CREATE TABLE settings (fixed TEXT NOT NULL);

CREATE TABLE nodes (
    name TEXT NOT NULL, life TEXT NOT NULL, is_current BIGINT NOT NULL,
    joined_s DOUBLE PRECISION NOT NULL, seen_s DOUBLE PRECISION NOT NULL,
    layouts TEXT NOT NULL, versions TEXT NOT NULL, last_key TEXT NOT NULL,
    busy_s DOUBLE PRECISION NOT NULL, waited_s DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (name, life));

CREATE TABLE decisions (
    position BIGINT PRIMARY KEY, task_id TEXT NOT NULL, kind TEXT NOT NULL,
    admitted BIGINT NOT NULL);

CREATE TABLE work_items (
    id BIGINT PRIMARY KEY, position BIGINT NOT NULL, task_id TEXT NOT NULL,
    kind TEXT NOT NULL, task BYTEA NOT NULL, state TEXT NOT NULL, attempt BIGINT NOT NULL,
    failures BIGINT NOT NULL, evaluation BIGINT NOT NULL);
CREATE UNIQUE INDEX work_items_position ON work_items (evaluation, position);
CREATE INDEX work_items_waiting ON work_items (evaluation, id) WHERE state = 'waiting';
CREATE INDEX work_items_drawn ON work_items (evaluation, id) WHERE state = 'drawn';
CREATE INDEX work_items_failed ON work_items (evaluation, id) WHERE state = 'failed';
CREATE TABLE live_leases (
    work_item BIGINT PRIMARY KEY, node TEXT NOT NULL, until_s DOUBLE PRECISION NOT NULL);
CREATE INDEX live_leases_until ON live_leases (until_s);
CREATE INDEX live_leases_of_node ON live_leases (node);

CREATE TABLE leases (
    work_item BIGINT NOT NULL, attempt BIGINT NOT NULL, node TEXT NOT NULL, life TEXT NOT NULL,
    key TEXT NOT NULL, start_s DOUBLE PRECISION NOT NULL, ending TEXT NOT NULL,
    PRIMARY KEY (work_item, attempt));
CREATE INDEX leases_of_request ON leases (node, key);

CREATE TABLE groups (
    work_item BIGINT PRIMARY KEY, node TEXT NOT NULL, attempt BIGINT NOT NULL,
    pushed_s DOUBLE PRECISION NOT NULL, rewards TEXT NOT NULL, num_tokens BIGINT NOT NULL,
    event BIGINT UNIQUE);
CREATE INDEX groups_without_event ON groups (work_item) WHERE event IS NULL;
CREATE INDEX groups_pushed ON groups (pushed_s);
CREATE TABLE payloads (work_item BIGINT PRIMARY KEY, payload BYTEA NOT NULL);
CREATE TABLE bumps (event BIGINT PRIMARY KEY, policy TEXT NOT NULL, version BIGINT NOT NULL);

CREATE TABLE shares (
    work_item BIGINT NOT NULL, policy TEXT NOT NULL, state TEXT NOT NULL,
    min_version BIGINT NOT NULL, num_tokens BIGINT NOT NULL, step BIGINT,
    PRIMARY KEY (work_item, policy));
CREATE INDEX shares_fresh ON shares (policy, min_version) WHERE state = 'fresh';
CREATE INDEX shares_of_step ON shares (policy, step) WHERE step IS NOT NULL;

CREATE TABLE tokens (
    work_item BIGINT NOT NULL, attempt BIGINT NOT NULL, policy TEXT NOT NULL,
    num_tokens BIGINT NOT NULL, num_shared BIGINT NOT NULL, num_failed BIGINT NOT NULL,
    PRIMARY KEY (work_item, attempt, policy));
CREATE TABLE sampled (
    node TEXT NOT NULL, life TEXT NOT NULL, policy TEXT NOT NULL, num_tokens BIGINT NOT NULL,
    PRIMARY KEY (node, life, policy));

CREATE TABLE evaluations (
    id BIGINT PRIMARY KEY, policy TEXT NOT NULL, step BIGINT NOT NULL, name TEXT NOT NULL,
    settings BYTEA NOT NULL, seed BIGINT NOT NULL, num_questions BIGINT NOT NULL,
    state TEXT NOT NULL, UNIQUE (policy, step, name));
CREATE INDEX evaluations_open ON evaluations (id) WHERE state = 'open';
CREATE TABLE results (
    work_item BIGINT PRIMARY KEY, node TEXT NOT NULL, attempt BIGINT NOT NULL,
    pushed_s DOUBLE PRECISION NOT NULL, versions TEXT NOT NULL, payload BYTEA);

CREATE TABLE policies (
    name TEXT PRIMARY KEY, number BIGINT NOT NULL, layout TEXT NOT NULL, store TEXT NOT NULL,
    num_groups BIGINT NOT NULL, max_staleness BIGINT NOT NULL, vocab_size BIGINT NOT NULL,
    max_positions BIGINT NOT NULL, version BIGINT NOT NULL,
    top_version BIGINT NOT NULL, newest BIGINT NOT NULL, checkpoint BIGINT NOT NULL,
    is_done BIGINT NOT NULL, seen_s DOUBLE PRECISION NOT NULL,
    busy_s DOUBLE PRECISION NOT NULL, waited_s DOUBLE PRECISION NOT NULL, life TEXT NOT NULL);

CREATE TABLE trainers (
    policy TEXT NOT NULL, life TEXT NOT NULL, start_s DOUBLE PRECISION NOT NULL,
    step BIGINT NOT NULL, PRIMARY KEY (policy, life));

CREATE TABLE batches (
    policy TEXT NOT NULL, step BIGINT NOT NULL, made_s DOUBLE PRECISION NOT NULL,
    num_groups BIGINT NOT NULL, max_staleness BIGINT NOT NULL,
    stats TEXT NOT NULL, tokens TEXT NOT NULL, PRIMARY KEY (policy, step));
CREATE INDEX batches_made ON batches (policy, made_s);
CREATE TABLE assignments (
    policy TEXT NOT NULL, step BIGINT NOT NULL, position BIGINT NOT NULL,
    work_item BIGINT NOT NULL, is_replay BIGINT NOT NULL, PRIMARY KEY (policy, step, position));
CREATE UNIQUE INDEX assignments_fresh_once ON assignments (policy, work_item) WHERE is_replay = 0;
CREATE INDEX assignments_of_work_item ON assignments (work_item);

CREATE TABLE counters (
    policy TEXT NOT NULL, what TEXT NOT NULL, name TEXT NOT NULL, num BIGINT NOT NULL,
    PRIMARY KEY (policy, what, name))
"""


def prepare(database: Database, fixed: str) -> str:
    """Make the tables if there are none, and return the identity of the run.

    `fixed` are the options that may not change during a run, as TOML. UserError when the database
    has other ones, or another schema.
    """
    with database.write() as transaction:
        is_postgres = bool(transaction.lock("meta"))
        if is_postgres:  # of two processes that begin at once, one waits here
            transaction.run("SELECT pg_advisory_xact_lock(?)", 0x666C6F77)
        if not _is_made(transaction):
            for statement in TABLES.split(";"):
                transaction.run(statement)
            if is_postgres:  # rows that every renewal rewrites find room on their page
                transaction.run("ALTER TABLE nodes SET (fillfactor = 70)")
            run = uuid.uuid4().hex
            transaction.run("INSERT INTO meta VALUES (?, ?, 0, 0, 0, 0)", VERSION, run)
            transaction.run("INSERT INTO settings VALUES (?)", fixed)
        meta = meta_row(transaction, database.name)
        stored = transaction.one("SELECT fixed FROM settings").fixed
        if stored != fixed:
            pairs = zip(stored.splitlines(), fixed.splitlines(), strict=True)
            changed = next(f"{old!r} is {new!r} now" for old, new in pairs if old != new)
            raise UserError(
                f"{database.name} belongs to a run with other options ({changed}): use the "
                "original options, or another database"
            )
    return str(meta.run)


def meta_row(transaction: Transaction, name: str) -> Any:
    """Read the row of `meta`. UserError, which names the database, unless it is a ledger with this
    schema.
    """
    meta: Any = transaction.one("SELECT * FROM meta") if _is_made(transaction) else None
    if not hasattr(meta, "version"):
        raise UserError(f"{name} is not a ledger: choose another database")
    if meta.version != VERSION:
        raise UserError(
            f"{name} is a ledger with schema {meta.version}, this flowtrain has {VERSION}: finish "
            "its run with the flowtrain version that started it, or choose another database"
        )
    return meta


@contextmanager
def locked(database: Database) -> Iterator[tuple[Transaction, Any]]:
    """Begin a transaction that holds the lock of `meta`; yield it and the row of `meta`; one at a
    time over all processes.
    """
    with database.write() as transaction:
        yield transaction, transaction.one(f"SELECT * FROM meta {transaction.lock('meta')}")


def _is_made(transaction: Transaction) -> bool:
    if transaction.lock("meta"):
        return transaction.one("SELECT to_regclass('meta') AS name").name is not None
    return transaction.one("SELECT name FROM sqlite_master WHERE name = 'meta'") is not None
