"""A run that an older version began goes on, with nothing lost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fake_groups import Clock, group, lease, ledger, planner

from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import BatchRequest, LeaseRequest, Progress, Push, Renewal
from flowtrain.dataflow.ledger import audit_database, recheck
from flowtrain.dataflow.ledger.schema import TABLES
from flowtrain.dataflow.ledger.sql import connect
from flowtrain.types import UserError

_OLD = Path(__file__).with_name("ledger_of_schema_6.sql")
"""Made by the version that had schema 6: four groups trained, one waiting; work item 7 is leased to
n2, 6 was given back; one of two questions is leased to n1."""


@pytest.fixture
def old(database: str) -> str:
    with connect(database).write() as transaction:
        for statement in _OLD.read_text().split(";\n"):
            if transaction.lock("meta"):
                statement = re.sub(r"X'([0-9A-F]*)'", r"'\\x\1'", statement)
            if statement.strip():
                transaction.run(statement)
    return database


def test_a_ledger_of_the_version_before_goes_on(old: str) -> None:
    with pytest.raises(UserError, match="schema 6, this flowtrain has 7: start its service once"):
        audit_database(old)
    flow = ledger(old, Clock(), max_waiting=64)
    assert flow.run == "2704a4b98dbc4f14b9c6ca402a9c30a4"
    assert flow.audit().problems == () and recheck(flow.history()).differences == ()
    counts = {"leased": 1, "waiting": 1, "committed": 5, "failed": 0}
    assert flow.status()["work_items"] == counts
    assert flow.audit().tokens["planner"].fates == {"waiting": 8, "trained": 32}
    assert not flow.renew(Renewal("n2", "c", ((7, 1),))).lost
    assert not flow.renew(Renewal("n1", "b", ((-1, 1),))).lost
    again = flow.lease(LeaseRequest("n2", "c", 3, key="k")).leases
    assert [each.work_item for each in again] == [5, 6, 7]
    leases = lease(flow, 3, "n1", "b")
    assert [each.work_item for each in leases] == [6, 8, 9]
    for num, (node, each) in enumerate([*(("n1", each) for each in leases), ("n2", again[2])], 1):
        told = {"planner": 32 + 8 * num if node == "n1" else 16}
        payload = pack_group(group(each.task, version=1))
        pushed = flow.push(Push(node, each.work_item, each.attempt, payload, sampled=told))
        assert pushed.status == "committed"
    assert len(flow.batch(BatchRequest("planner", 2)).groups) == 4, "by a trainer that goes on"
    flow.progress(Progress("planner", 2, 2))
    flow.register(replace(planner(step=2), life="t2", is_fenced=True))
    assert flow.batch(BatchRequest("planner", 3, life="t2")).num_missing == 3
    assert flow.audit().problems == () and recheck(flow.history()).differences == ()


def test_it_has_the_tables_of_a_new_one(old: str, tmp_path: Path) -> None:
    ledger(old, Clock()).close()
    new = str(tmp_path / "new.db")
    ledger(new, Clock()).close()
    tables = re.findall(r"CREATE TABLE (\w+)", TABLES)
    for table in tables:
        columns = []
        for database in (old, new):
            with connect(database).read() as transaction:
                transaction.run(f"SELECT * FROM {table}")
                columns.append([column[0] for column in transaction._cursor.description])
        assert columns[0] == columns[1], table


def test_an_upgrade_keeps_what_may_not_change(old: str) -> None:
    with pytest.raises(UserError, match=r"'dataflow.prompt_filter = \"all\"' is "):
        ledger(old, Clock(), prompt_filter="greso")
    with pytest.raises(UserError, match="schema 6"):
        audit_database(old)
    assert ledger(old, Clock()).audit().problems == (), "and what was refused changed nothing"
