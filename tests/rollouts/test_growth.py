"""What a request costs does not grow with the leases, nor with the groups that were trained."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_groups as fake
import pytest
from grown_ledger import GROUP_SIZE, NUM_GROUPS, PER_LEASE, Size, grown

from flowtrain.rollouts.codec import pack_group
from flowtrain.rollouts.contract import (
    BatchRequest,
    Lease,
    LeaseRequest,
    Progress,
    Push,
    Release,
    Renewal,
)
from flowtrain.rollouts.ledger import Ledger, prompts
from flowtrain.rollouts.ledger.prompts import num_leased
from flowtrain.rollouts.ledger.report import report
from flowtrain.rollouts.ledger.sql import SqliteDatabase, Transaction

_STEPS = 10
"""Instructions of SQLite's machine between two calls of a progress handler."""
_SMALL = Size(10, 100)


def _packed(lease: Lease) -> bytes:
    return pack_group(fake.group(lease.task, GROUP_SIZE))


class Counter:
    """Counts what SQLite executes on the connections of a ledger."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._num = 0
        connect: Callable[[Any], sqlite3.Connection] = SqliteDatabase._connect

        def watched(database: SqliteDatabase) -> sqlite3.Connection:
            connection = connect(database)
            connection.set_progress_handler(self._tick, _STEPS)
            return connection

        patch.setattr(SqliteDatabase, "_connect", watched)

    def _tick(self) -> int:
        self._num += 1
        return 0

    def __call__(self, run: Callable[[], Any]) -> tuple[int, Any]:
        before = self._num
        answer = run()
        return self._num - before, answer


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(prompts, "_AHEAD", PER_LEASE)  # or only some leases would draw
    return Counter(monkeypatch)


def _costs(ledger: Ledger, count: Counter, size: Size) -> dict[str, int]:
    """What each request takes, the second one where the first reads what it then remembers."""
    costs, held = {}, []
    for number in range(NUM_GROUPS // PER_LEASE + 1):
        request = LeaseRequest("node-1", "a", PER_LEASE, key=f"{number}")
        costs["lease"], answer = count(lambda request=request: ledger.lease(request))
        held += answer.leases
    renewal = Renewal("node-1", "a", tuple((lease.work_item, 1) for lease in held))
    costs["renew"], _ = count(lambda: ledger.renew(renewal))
    for lease in held[:NUM_GROUPS]:
        request = Push("node-1", lease.work_item, 1, _packed(lease))
        costs["push"], _ = count(lambda request=request: ledger.push(request))
    step = size.num_committed // NUM_GROUPS + 1
    costs["batch"], batch = count(lambda: ledger.batch(BatchRequest("planner", step)))
    assert len(batch.groups) == NUM_GROUPS
    ledger.close()
    return costs


@pytest.mark.parametrize(
    "size", [Size(10, 1000), Size(10, 100, 1600)], ids=["leases", "trained groups"]
)
def test_requests_take_as_many_steps_in_a_large_ledger(
    tmp_path: Path, count: Counter, size: Size
) -> None:
    small = _costs(grown(str(tmp_path / "small.db"), _SMALL), count, _SMALL)
    large = _costs(grown(str(tmp_path / "large.db"), size), count, size)
    assert set(small) == {"lease", "renew", "push", "batch"} and all(small.values())
    for name, steps in large.items():
        assert steps <= 1.2 * small[name] + 10, (name, small, large)


def _used(database: str, num_committed: int) -> Ledger:
    """A ledger that has trained so many groups, of which some wait, are under way and are lost."""
    ledger = grown(database, Size(10, 40, num_committed))
    held = ledger.lease(LeaseRequest("node-1", "a", 8)).leases
    for lease in held[:4]:
        ledger.push(Push("node-1", lease.work_item, 1, _packed(lease)))
    ledger.release(Release("node-1", ((held[4].work_item, 1),), "ends"))
    return ledger


def test_reports_and_signs_of_life_read_no_history(tmp_path: Path, count: Counter) -> None:
    small, large = (_used(str(tmp_path / f"{num}.db"), num) for num in (320, 6400))
    for ledger in (small, large):
        assert ledger.status()["policies"]["planner"]["groups"]["fresh"]["num"] == 4
        assert ledger.audit().problems == ()

    def lacks(ledger: Ledger) -> int:
        step = ledger.status()["policies"]["planner"]["step"] + 1
        return ledger.batch(BatchRequest("planner", step)).num_missing

    for ask in (Ledger.status, Ledger.answers, Ledger.openings, lacks):
        (few, _), (many, answer) = (count(lambda ask=ask, of=of: ask(of)) for of in (small, large))
        assert answer and many <= 1.1 * few + 10, (ask, few, many)


def test_reports_read_as_many_rows_of_a_large_database(postgres: str) -> None:
    """As PostgreSQL counts them. It reads tables of a few pages as a whole, so neither is small."""

    def num_read(num_committed: int) -> int:
        ledger = _used(postgres, num_committed)
        with ledger.database.write() as transaction:
            transaction.run("ANALYZE")
        read = "sum(seq_tup_read + coalesce(idx_tup_fetch, 0))"
        with ledger.database.read() as transaction:
            before, after = (
                report(transaction, ledger.run, ledger.config.dataflow)
                and transaction.one(f"SELECT {read} AS num FROM pg_stat_xact_user_tables").num
                for _ in range(2)
            )
        with ledger.database.write() as transaction:
            schema = transaction.one("SELECT current_schema() AS name").name
            transaction.run(f"DROP SCHEMA {schema} CASCADE")
            transaction.run(f"CREATE SCHEMA {schema}")
        ledger.close()
        return int(after - before)

    few, many = num_read(3200), num_read(12800)
    # Its plans differ with the rows that ANALYZE draws; history is 9,600 groups longer.
    assert 0 < many < few + 2400, (few, many)


def test_a_checkpoint_looks_at_the_groups_that_are_there_and_not_at_all_that_were(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_trained = 3200
    ledger = grown(postgres, Size(10, 100, num_trained))
    for lease in ledger.lease(LeaseRequest("node-1", "a", NUM_GROUPS)).leases:
        ledger.push(Push("node-1", lease.work_item, 1, _packed(lease)))
    step = num_trained // NUM_GROUPS + 1
    ledger.batch(BatchRequest("planner", step))
    plans: list[str] = []
    real = Transaction.run

    def explained(self: Transaction, statement: str, *values: object) -> int:
        if "FROM payloads" in statement:
            real(self, f"EXPLAIN {statement}", *values)
            plans.extend(row[0] for row in self._cursor.fetchall())
        return real(self, statement, *values)

    monkeypatch.setattr(Transaction, "run", explained)
    ledger.progress(Progress("planner", step, step))
    ledger.close()
    read = {line.strip() for line in plans if " on shares" in line or " on assignments" in line}
    assert plans and not [line for line in read if "Seq Scan" in line], "\n".join(plans)


def test_a_report_asks_for_the_leases_of_all_nodes_at_once(tmp_path: Path, count: Counter) -> None:
    few = grown(str(tmp_path / "few.db"), Size(10, 300))
    many = grown(str(tmp_path / "many.db"), Size(60, 300))
    (small, _), (large, found) = count(few.status), count(many.status)
    assert [node["num_leased"] for node in found["nodes"].values()] == [5] * 60
    assert large < 3 * small


def test_leases_are_what_is_nothing_else(database: str) -> None:
    ledger = fake.begun(database, max_waiting=100, max_attempts=1)

    def check(num: int) -> None:
        with ledger.database.read() as transaction:
            assert num_leased(transaction) == num
        assert ledger.status()["work_items"]["leased"] == num
        assert not ledger.audit().problems

    check(0)
    leases = fake.lease(ledger, 12)
    check(12)
    for lease in leases[:5]:
        fake.push(ledger, lease)
    check(7)
    given_back = tuple((lease.work_item, lease.attempt) for lease in leases[5:8])
    ledger.release(Release("n1", given_back[:1], "ends"))
    ledger.release(Release("n1", given_back[1:], "cannot", is_failure=True))
    check(4)
    assert ledger.status()["work_items"] == {"leased": 4, "waiting": 1, "committed": 5, "failed": 2}
    assert len(ledger.batch(BatchRequest("planner", 1)).groups) == 4
    assert len(fake.lease(ledger, 2)) == 2
    check(6)
    fake.push(ledger, leases[6])  # it had failed
    check(6)
    ledger.close()
