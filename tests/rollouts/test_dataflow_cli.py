"""`python -m flowtrain.rollouts`: what a person types, and reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_groups
import pytest
from http_servers import running

from flowtrain.rollouts import __main__ as command
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import BatchRequest, Join, LeaseRequest, Progress
from flowtrain.rollouts.ledger import audit_database
from flowtrain.rollouts.service import Service
from flowtrain.rollouts.show import status_text

TOKEN = "a-token-of-the-tests"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTRAIN_TOKEN", TOKEN)


@pytest.fixture
def used(tmp_path: Path) -> Iterator[Any]:
    """A ledger of which a step is trained, a group stale, one waits, one is under way."""
    clock = fake_groups.Clock()
    ledger = fake_groups.begun(
        tmp_path / "flow.sqlite", clock, trainer=fake_groups.planner(num_groups=2, max_staleness=0)
    )
    first, second = ledger.lease(LeaseRequest("n1", "a", 2, {"planner": 0}, 3.0, 1.0, "k")).leases
    for lease in (first, second):
        fake_groups.push(ledger, lease)
    ledger.batch(BatchRequest("planner", 1))
    ledger.progress(Progress("planner", 1, 1, 9.0, 1.0))
    for lease in ledger.lease(LeaseRequest("n1", "a", 2, {"planner": 1}, key="l")).leases[:1]:
        fake_groups.push(ledger, lease, num_tokens=300)
    ledger.batch(BatchRequest("planner", 2))
    clock.now += 150
    yield ledger
    ledger.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = command.main(arguments)
    except SystemExit as exit:
        code = int(exit.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_table(used: Any) -> None:
    text = status_text(used.status())
    lines = text.splitlines()
    assert lines[0].startswith(f"run {used.run}: 0.00 groups/s produced")
    assert lines[1] == (
        "work items: 1 leased, 0 waiting, 3 committed, 0 failed; 256 of 256 prompts were admitted"
    )
    (planner,) = [
        line.split()
        for line in lines
        if line.startswith("planner") and ("live" in line or "silent" in line)
    ]
    expected = ["planner", "silent", "1", "1", "1", "0.00", "0.0", "0", "0", "10%", "2", "min"]
    assert planner == expected
    states = [line.split() for line in lines if line.startswith("planner")][1:]
    assert states == [["planner", "assigned", "2", "8"], ["planner", "stale", "1", "600"]]
    (node,) = [line.split() for line in lines if line.startswith("n1")]
    assert node == ["n1", "silent", "2", "min", "1", "3", "0.00", "25%", "planner", "1"]


def test_status_asks_a_service(used: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with running(Service(used, used.run, TOKEN)) as url:
        code, out, _ = run(capsys, "status", url, "--json")
        assert code == 0 and json.loads(out) == used.status()
        assert run(capsys, "status", url) == (0, status_text(used.status()), "")
        os.environ["FLOWTRAIN_TOKEN"] = "wrong"
        code, _, err = run(capsys, "status", url)
        assert code == 1 and "the token is missing or wrong; set FLOWTRAIN_TOKEN" in err
    code, _, err = run(capsys, "status", url, "--wait", "0.2")
    assert code == 1 and "did not answer status within 0.2 s: ConnectError" in err


def test_nothing_has_happened_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = fake_groups.ledger(tmp_path / "new.sqlite")
    text = status_text(ledger.status())
    assert "no trainer has registered" in text and "no node has joined" in text
    expected = (0, "the database holds no events yet\nall counts are consistent\n", "")
    assert run(capsys, "audit", "--database", str(tmp_path / "new.sqlite")) == expected


def test_a_terminal_takes_no_commands_from_nodes() -> None:
    node = {
        "state": "live",
        "seen_s_ago": 1.0,
        "num_leased": 0,
        "num_groups": 0,
        "groups_per_s": 0.0,
        "versions": {"\x1b[2J\u202e": 1},
        "busy_s": 0,
        "waited_s": 0,
    }
    status = {
        "run": "r",
        "groups_per_s": 0.0,
        "tokens_per_s": 0.0,
        "work_items": {},
        "tasks": {"asked": 0, "admitted": 0},
        "policies": {},
        "evaluations": [],
        "pool": {"num_nodes": 3, "target": 5, "decided_s": 1.0},
    }
    text = status_text({**status, "lost_leases": {"\x07": 1}, "nodes": {"n\x1b1": node}})
    assert all(letter.isprintable() for letter in text.replace("\n", "")) and r"n\x1b1" in text
    assert "nodes: 3 at work, 5 suffice" in text


def test_the_audit_counts_again(used: Any) -> None:
    assert used.audit().problems == ()
    for change, problem in (
        (
            "num = num + 1 WHERE what = 'groups' AND name = 'stale'",
            "planner groups stale: 2, not 1",
        ),
        ("num = num - 1 WHERE what = 'pushes'", "pushes n1: 2, not 3"),
    ):
        with used.database.write() as transaction:
            assert transaction.run(f"UPDATE counters SET {change}") == 1
        assert f"a counter is wrong ({problem})" in used.audit().problems


def test_the_audit_finds_what_does_not_add_up(
    used: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = str(tmp_path / "flow.sqlite")
    code, out, _ = run(capsys, "audit", "--database", database)
    assert code == 0 and "3 committed" in out and "all counts are consistent" in out
    with used.database.write() as transaction:
        transaction.run("DELETE FROM groups WHERE work_item = 2")
    code, out, _ = run(capsys, "audit", "--database", database, "--json")
    assert code == 1 and "a committed work item has no group (2)" in json.loads(out)["problems"]
    assert (
        "problem: a committed work item has no group (2)"
        in run(capsys, "audit", "--database", database)[1]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "--database", "{tmp}/none"], "there is no database"),
        (["audit", "--database", "{tmp}/file"], "cannot use the database"),
        (["audit", "--database", "mysql://x"], "must be a path or start with postgresql://"),
        (
            ["audit", "--database", "{tmp}/none", "--run.seed", "1"],
            "'--run.seed' is not an argument of this command",
        ),
        (
            ["serve", "--database", "{tmp}/new", "--run.sed", "1"],
            "unknown key run.sed: did you mean run.seed?",
        ),
        (
            ["serve", "--database", "{tmp}/new", "--port", "70000"],
            "'70000' must be a whole number from 0 to 65535",
        ),
        (
            ["serve", "--database", "{tmp}/new", "--host", "203.0.113.1"],
            "cannot listen at 203.0.113.1",
        ),
        (["serve"], "--database"),
        (["status", "nowhere"], "url must be like http://"),
        (["status", "http://127.0.0.1:1", "--every", "-1"], "must be a number of seconds above 0"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text(
        "no database, but a text of some length, which SQLite will not take for one of its own " * 9
    )
    code, _, err = run(capsys, *[argument.format(tmp=tmp_path) for argument in arguments])
    assert code == 2 and words in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["", "serve", "status", "audit"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *([name] if name else []), "--help")
    assert code == 0 and "usage: python -m flowtrain.rollouts" in out
    assert not name or f"example: python -m flowtrain.rollouts {name}" in " ".join(out.split())


def test_a_service_starts_and_ends(tmp_path: Path) -> None:
    """With a token of its own, and gracefully: who waits for a batch is answered."""
    database = tmp_path / "flow.sqlite"
    words = (
        "--rollout.group_size 2 --rollout.num_questions 4 --train.num_minibatches 1 "
        "--tasks.num_train 64 --port 0"
    )
    environment = {key: value for key, value in os.environ.items() if key != "FLOWTRAIN_TOKEN"} | {
        "PYTHONPATH": str(Path(__file__).parents[2])
    }
    start = [
        *(sys.executable, "-m", "flowtrain.rollouts", "serve", "--database"),
        str(database),
        *words.split(),
    ]
    with subprocess.Popen(
        start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().split()[-1]
        token = process.stdout.readline().partition("=")[2].split()[0]
        with Client(url, token, wait_s=60.0) as client:
            joined = client.join(Join("n1", "a"))
            client.register(fake_groups.planner())
            assert joined.group_size == 2
            assert len(client.lease(LeaseRequest("n1", "a", 3)).leases) == 3
        second = subprocess.run(
            start, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 2 and second.stderr.count("\n") == 1
        assert f"{database} is in use by python -m flowtrain.rollouts" in second.stderr
        assert f"process {process.pid}, since" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    assert audit_database(database).counts == {"drawn": 253, "leased": 3}
