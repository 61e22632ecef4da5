"""Databases that cannot be used: one line with the database and the cure, and nothing half done."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from fake_groups import TASKS, Clock, begun, joined, lease, ledger, options, planner, push

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.rollouts.contract import BatchRequest, Join, Progress, Refused, Release, Unavailable
from flowtrain.rollouts.ledger import Ledger, audit_database, open_ledger
from flowtrain.rollouts.ledger.audit import audit
from flowtrain.rollouts.ledger.sql import Database, connect
from flowtrain.tasks.cursor import TaskCursor


def statement(database: str, text: str) -> None:
    with connect(database).write() as transaction:
        transaction.run(text)


def test_another_schema_is_refused_by_name(database: str) -> None:
    ledger(database).close()
    statement(database, "UPDATE meta SET version = 7")
    told = "is a ledger with schema 7, this flowtrain has 8: finish its run with the "
    with pytest.raises(UserError, match=told) as refusal:
        ledger(database)
    with pytest.raises(UserError, match=told):
        audit_database(database)
    assert database.partition("?")[0] in str(refusal.value)


def test_a_table_of_somebody_else_is_left_alone(database: str) -> None:
    statement(database, "CREATE TABLE meta (name TEXT)")
    with pytest.raises(UserError, match="is not a ledger: choose another database"):
        ledger(database)


@pytest.mark.parametrize(
    ("section", "key", "value", "why"),
    [
        ("run", "seed", 1, r"'run.seed = 0' is 'run.seed = 1' now"),
        ("rollout", "group_size", 4, r"rollout.group_size = 2"),
        ("dataflow", "prompt_filter", "greso", r"dataflow.prompt_filter = \"all\""),
    ],
)
def test_what_units_are_may_not_change_while_a_run_goes_on(
    database: str, section: str, key: str, value: object, why: str
) -> None:
    ledger(database).close()
    changed = options().model_dump()
    changed[section][key] = value
    with pytest.raises(UserError, match=why):
        Ledger(database, Config.model_validate(changed), TaskCursor(TASKS, 0))


def test_the_tasks_may_not_change_either_though_their_file_may_move(database: str) -> None:
    flow = begun(database)
    lease(flow, 1)
    moved = options().model_dump()
    moved["tasks"] |= {"name": "file", "path": "elsewhere/questions.json"}
    Ledger(database, Config.model_validate(moved), TaskCursor(TASKS, 0))
    told = r"other tasks \(the task at 0 was 'task-\d+' and is 'task-"
    with pytest.raises(UserError, match=told):
        Ledger(database, options(), TaskCursor(TASKS[1:], 0))


def test_other_options_may_change(database: str) -> None:
    first = ledger(database, lease_s=60)
    second = ledger(database, lease_s=30, max_staleness=9)
    assert first.run == second.run


def _limited(flow: Ledger, pragma: str) -> None:
    """For the connection that the next request of this thread uses."""
    database: Database = flow.database
    with database.read() as transaction:
        transaction.run(f"PRAGMA {pragma}")


@pytest.mark.parametrize(
    ("pragma", "why"),
    [
        ("max_page_count = 1", "database or disk is full; free some space"),
        ("query_only = 1", "readonly database; make it writable"),
    ],
)
def test_a_full_or_readonly_disk_is_named_and_what_was_not_committed_can_be_sent_again(
    tmp_path: Path, pragma: str, why: str
) -> None:
    path = tmp_path / "ledger.db"
    flow = begun(path)
    (each,) = lease(flow)
    _limited(flow, pragma)
    with pytest.raises(UserError, match=why) as refusal:
        push(flow, each, num_tokens=20000)
    assert str(path) in str(refusal.value)
    assert flow.audit().problems == ()
    assert flow.status()["work_items"]["committed"] == 0
    assert push(flow, each, num_tokens=20000) == "committed"


def test_a_server_that_is_read_only_is_named(postgres_database: str) -> None:
    flow = begun(postgres_database)
    (each,) = lease(flow)
    flow.close()
    name = postgres_database.split("/")[3].partition("?")[0]
    statement(postgres_database, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(UserError, match="read-only transaction") as refusal:
        push(flow, each)
    assert postgres_database.partition("?")[0] in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "nowhere/l.db",
            "nowhere/l.db: unable to open database file; check that its folder exists",
        ),
        ("text.db", "file is not a database; choose another file"),
        ("mysql://host/flow", "must be a path or start with postgresql://"),
        ("http://host", "must be a path or start with postgresql://"),
    ],
)
def test_what_is_no_ledger_is_left_alone(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "text.db").write_text("a text, which is not how a database begins" * 20)
    with pytest.raises(UserError, match=told):
        ledger(name if "://" in name else tmp_path / name)


def test_a_server_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"did not answer: .*failed: No such file") as refusal:
        ledger(f"postgresql://me:secret@/flow?host={tmp_path}")
    assert "secret" not in str(refusal.value)
    assert f"postgresql://me@/flow?host={tmp_path}" in str(refusal.value)


def test_a_database_that_is_not_there(postgres_server: Any) -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        ledger(postgres_server.url("missing"))


def test_text_that_the_database_does_not_take_is_the_sender_s_fault(database: str) -> None:
    flow = begun(database)
    (each,) = lease(flow)
    try:
        flow.release(Release("n1", ((each.work_item, 1),), "nul \0 inside"))
    except Refused:
        flow.release(Release("n1", ((each.work_item, 1),), "plain"))
    assert flow.status()["work_items"]["waiting"] == 1


def test_a_node_stores_no_long_text_before_a_trainer_can_compare_it(database: str) -> None:
    flow = ledger(database)
    told = "the layout of its planner has 5000 characters, at most 4096"
    with pytest.raises(Refused, match=told):
        flow.join(Join("n1", "a", {"planner": "x" * 5000}))
    flow.close()


def test_the_audit_finds_what_does_not_add_up(database: str) -> None:
    """Damage by hand; each is found and named with where it is."""
    damages = {
        "DELETE FROM groups WHERE work_item = 2": "a committed work item has no group (2)",
        "DELETE FROM work_items WHERE id = 3": "work items are not numbered without gaps",
        "UPDATE work_items SET state = 'lost' WHERE id = 9": "a work item has no known state (9)",
        "UPDATE work_items SET attempt = 2 WHERE id = 9": "a work item does not have as many "
        "leases as attempts (9)",
        "UPDATE shares SET state = 'fresh', step = NULL WHERE work_item = 1": "a share is in a "
        "batch and was not assigned (1)",
        "DELETE FROM assignments WHERE work_item = 4": "an assigned share is not in the batch of "
        "its step once (4)",
        "UPDATE shares SET min_version = -2 WHERE work_item = 1": "a batch has a group that is too "
        "old, or too new (1)",
        "DELETE FROM payloads WHERE work_item = 6": "a group that is still needed is gone (6)",
        "DELETE FROM decisions WHERE position = 0": "a work item's task was not admitted (1)",
        "UPDATE groups SET event = 99 WHERE work_item = 1": "events are not numbered without gaps",
        "DELETE FROM shares WHERE work_item = 5": "a group has no share (5)",
        "DELETE FROM batches": "a group has no batch (1)",
        "DELETE FROM live_leases WHERE work_item = 8": "a work item is leased and does not end, or "
        "ends and is not leased (8)",
        "UPDATE live_leases SET node = 'n2' WHERE work_item = 8": "a lease is of one node and "
        "lasts for another (8)",
    }
    flow = begun(database, Clock())
    leases = lease(flow, 8)
    for each in leases[:6]:
        push(flow, each)
    push(flow, leases[6], num_tokens=0)
    flow.batch(BatchRequest("planner", 1))
    flow.progress(Progress("planner", 1, 0))
    lease(flow, 1)
    assert flow.audit().problems == ()
    for damage, problem in damages.items():
        with pytest.raises(_Undo), flow.database.write() as transaction:
            transaction.run(damage)
            found = audit(transaction).problems
            raise _Undo
        assert any(problem in each for each in found), f"{damage}: {found}"
    assert flow.audit().problems == ()


class _Undo(Exception):
    pass


def test_the_tables_themselves_refuse_a_second_group_and_a_second_serving(tmp_path: Path) -> None:
    flow = ledger(tmp_path / "l.db")
    with flow.database.write() as transaction:
        transaction.run("INSERT INTO groups VALUES (1, 'n1', 1, 0, '[]', 0, NULL)")
        transaction.run("INSERT INTO assignments VALUES ('planner', 1, 0, 1, 0)")
    for second in (
        "INSERT INTO groups VALUES (1, 'n2', 2, 0, '[]', 0, NULL)",
        "INSERT INTO assignments VALUES ('planner', 2, 0, 1, 0)",
    ):
        with pytest.raises(sqlite3.IntegrityError), flow.database.write() as transaction:
            transaction.run(second)


def test_open_ledger_takes_tasks_and_rules_from_the_config(tmp_path: Path) -> None:
    config = options(prompt_filter="curriculum", group_filter="mixed", selector="arrival")
    flow = open_ledger(config, tmp_path / "l.db")
    joined(flow)
    flow.register(planner())
    assert lease(flow, 1)[0].task.id
    with pytest.raises(UserError, match="prompt_filter='nobody': there is no such prompt filter"):
        open_ledger(options(prompt_filter="nobody"), tmp_path / "m.db")
