"""The tables, the same on SQLite and PostgreSQL (whose names of types SQLite understands), and how
a database becomes a ledger.

A unit (a task to roll out) is leased, waiting, committed or failed. Its group, once committed, is
one row that says what rules look at, a payload, and a share per policy, which is fresh, served, or
was left out for a reason that stays on record. Keys and unique indices keep by themselves what
matters most: one group per unit, and at most one batch of each policy that has it fresh.
"""

from __future__ import annotations

import uuid
from typing import Any

from flowtrain.dataflow.ledger.sql import Database, Transaction
from flowtrain.types import UserError

VERSION = 2

TABLES = """
CREATE TABLE meta (version BIGINT NOT NULL, run TEXT NOT NULL, fixed TEXT NOT NULL,
    num_positions BIGINT NOT NULL, num_units BIGINT NOT NULL, num_events BIGINT NOT NULL);

CREATE TABLE nodes (name TEXT NOT NULL, life TEXT NOT NULL, is_current BIGINT NOT NULL, joined_s DOUBLE PRECISION NOT NULL,
    seen_s DOUBLE PRECISION NOT NULL, layouts TEXT NOT NULL, versions TEXT NOT NULL, last_key TEXT NOT NULL,
    busy_s DOUBLE PRECISION NOT NULL, waited_s DOUBLE PRECISION NOT NULL, PRIMARY KEY (name, life));

CREATE TABLE decisions (position BIGINT PRIMARY KEY, task_id TEXT NOT NULL, kind TEXT NOT NULL, admitted BIGINT NOT NULL,
    draw DOUBLE PRECISION NOT NULL, num_events BIGINT NOT NULL);

CREATE TABLE units (id BIGINT PRIMARY KEY, position BIGINT NOT NULL UNIQUE, task_id TEXT NOT NULL, kind TEXT NOT NULL,
    task BYTEA NOT NULL, state TEXT NOT NULL, attempt BIGINT NOT NULL, node TEXT NOT NULL, until_s DOUBLE PRECISION NOT NULL);
CREATE INDEX units_open ON units (state, id) WHERE state IN ('leased', 'waiting');

CREATE TABLE leases (unit BIGINT NOT NULL, attempt BIGINT NOT NULL, node TEXT NOT NULL, life TEXT NOT NULL, key TEXT NOT NULL,
    start_s DOUBLE PRECISION NOT NULL, ending TEXT NOT NULL, PRIMARY KEY (unit, attempt));
CREATE INDEX leases_of_request ON leases (node, key);

CREATE TABLE groups (unit BIGINT PRIMARY KEY, node TEXT NOT NULL, attempt BIGINT NOT NULL, pushed_s DOUBLE PRECISION NOT NULL,
    rewards TEXT NOT NULL, num_tokens BIGINT NOT NULL, event BIGINT UNIQUE);
CREATE INDEX groups_without_event ON groups (unit) WHERE event IS NULL;
CREATE TABLE payloads (unit BIGINT PRIMARY KEY, payload BYTEA NOT NULL);
CREATE TABLE bumps (event BIGINT PRIMARY KEY, policy TEXT NOT NULL, version BIGINT NOT NULL);

CREATE TABLE shares (unit BIGINT NOT NULL, policy TEXT NOT NULL, state TEXT NOT NULL, min_version BIGINT NOT NULL,
    num_tokens BIGINT NOT NULL, step BIGINT, PRIMARY KEY (unit, policy));
CREATE INDEX shares_fresh ON shares (policy, min_version) WHERE state = 'fresh';
CREATE INDEX shares_of_step ON shares (policy, step);

CREATE TABLE policies (name TEXT PRIMARY KEY, number BIGINT NOT NULL, layout TEXT NOT NULL, store TEXT NOT NULL,
    num_groups BIGINT NOT NULL, max_staleness BIGINT NOT NULL, version BIGINT NOT NULL, top_version BIGINT NOT NULL,
    newest BIGINT NOT NULL, checkpoint BIGINT NOT NULL, is_done BIGINT NOT NULL, seen_s DOUBLE PRECISION NOT NULL,
    busy_s DOUBLE PRECISION NOT NULL, waited_s DOUBLE PRECISION NOT NULL);

CREATE TABLE trainers (policy TEXT NOT NULL, life TEXT NOT NULL, start_s DOUBLE PRECISION NOT NULL, step BIGINT NOT NULL,
    PRIMARY KEY (policy, life));

CREATE TABLE batches (policy TEXT NOT NULL, step BIGINT NOT NULL, made_s DOUBLE PRECISION NOT NULL, num_groups BIGINT NOT NULL,
    max_staleness BIGINT NOT NULL, num_events BIGINT NOT NULL, stats TEXT NOT NULL, PRIMARY KEY (policy, step));
CREATE TABLE places (policy TEXT NOT NULL, step BIGINT NOT NULL, place BIGINT NOT NULL, unit BIGINT NOT NULL,
    is_replay BIGINT NOT NULL, PRIMARY KEY (policy, step, place));
CREATE UNIQUE INDEX places_fresh_once ON places (policy, unit) WHERE is_replay = 0;
CREATE INDEX places_of_unit ON places (unit)
"""


def prepare(database: Database, fixed: str) -> Any:
    """Makes the tables where there are none, and returns the row of `meta`.

    `fixed` are the options that may not change while a run goes on, as TOML. UserError when the
    database has other ones, or another schema.
    """
    with database.write() as transaction:
        if transaction.lock("meta"):  # of two that begin at once, one waits here for the other
            transaction.run("SELECT pg_advisory_xact_lock(?)", 0x666C6F77)
        if not _is_made(transaction):
            for statement in TABLES.split(";"):
                transaction.run(statement)
            transaction.run(
                "INSERT INTO meta VALUES (?, ?, ?, 0, 0, 0)", VERSION, uuid.uuid4().hex, fixed
            )
        found = ledger_row(transaction, database.name)
    if found.fixed != fixed:
        old, new = found.fixed.splitlines(), fixed.splitlines()
        changed = next(
            (f"{a!r} is {b!r} now" for a, b in zip(old, new, strict=False) if a != b),
            "options were added or removed",
        )
        raise UserError(
            f"{database.name} belongs to a run with other options ({changed}): give them as they "
            "were, or name another database"
        )
    return found


def ledger_row(transaction: Transaction, name: str) -> Any:
    """The row of `meta`. UserError, which names the database, unless it is a ledger with this
    schema.
    """
    found: Any = transaction.one("SELECT * FROM meta") if _is_made(transaction) else None
    if not hasattr(found, "version"):
        raise UserError(f"{name} is no ledger: name another database")
    if found.version != VERSION:
        raise UserError(
            f"{name} is a ledger with schema {found.version}, this flowtrain has {VERSION}: use "
            "the one it was made with"
        )
    return found


def _is_made(transaction: Transaction) -> bool:
    if transaction.lock("meta"):
        return transaction.one("SELECT to_regclass('meta') AS name").name is not None
    return transaction.one("SELECT name FROM sqlite_master WHERE name = 'meta'") is not None
