"""A token opens what its owner does, in its own name, until it is revoked."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_groups
import pytest
from http_servers import running

from flowtrain.records import UserError
from flowtrain.rollouts.__main__ import main
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.codec import pack, pack_group, unpack
from flowtrain.rollouts.contract import (
    BatchRequest,
    Disown,
    EvalSettings,
    Evaluate,
    EvaluationRequest,
    Join,
    LeaseRequest,
    NotAllowed,
    Progress,
    Push,
    Register,
    Release,
    Renewal,
    Unavailable,
)
from flowtrain.rollouts.service import Service
from flowtrain.rollouts.wire import METHODS, Problem
from flowtrain.utils.net.credentials import Access, Role, TokenFile, issue, read, revoke
from flowtrain.utils.net.serving import Rejected

SHARED = "a-token-of-the-tests"
REQUESTS: dict[str, Any] = {
    "join": Join("n1", "a"),
    "lease": LeaseRequest("n1", "a", 1),
    "renew": Renewal("n1", "a", ((1, 1),)),
    "push": Push("n1", 1, 1, b""),
    "release": Release("n1", ((1, 1),)),
    "disown": Disown("n1", "a"),
    "register": fake_groups.planner(),
    "batch": BatchRequest("planner", 1),
    "progress": Progress("planner", 0, 0),
    "evaluate": Evaluate("planner", 0, "texts", EvalSettings(3), 1, (fake_groups.TASKS[0],)),
    "evaluation": EvaluationRequest("planner", 0, "texts"),
    "status": None,
}
"""By method, a request of the node n1 or the planner's trainer."""
NODE = ("join", "lease", "renew", "push", "release", "disown", "status")
TRAINER = ("register", "batch", "progress", "evaluate", "evaluation", "status")
ALLOWED = {
    "shared": tuple(REQUESTS),
    "n1": NODE,
    "n2": ("status",),
    "planner": TRAINER,
    "verifier": ("status",),
    "node planner": ("status",),
    "trainer n1": ("status",),
    "monitor n1": ("status",),
}
"""By owner of a token, the methods that answer the requests above."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One in which n1 has a lease of work item 1."""
    made = fake_groups.ledger(tmp_path / "flow.sqlite")
    made.register(fake_groups.planner())
    made.join(Join("n1", "a"))
    lease, other = made.lease(LeaseRequest("n1", "a", 2)).leases
    made.push(Push("n1", 2, 1, pack_group(fake_groups.group(other.task))))
    group = pack_group(fake_groups.group(lease.task))
    monkeypatch.setitem(REQUESTS, "push", Push("n1", 1, 1, group))
    yield made
    assert made.audit().problems == ()
    made.close()


def ask(url: str, token: str, method: str, request: Any) -> tuple[int, str]:
    """The status, and what is wrong."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    body = b"" if request is None else pack(request)
    connection.request("POST", f"/v6/{method}", body, {"Authorization": f"Bearer {token}"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, "" if response.status == 200 else unpack(content, Problem).error


def facts(path: Path) -> list[str]:
    """All that is in the database beside the file."""
    with contextlib.closing(sqlite3.connect(path.with_name("flow.sqlite"))) as database:
        return list(database.iterdump())


def make_token(path: Path, owner: str) -> str:
    """The token of an owner in `ALLOWED`."""
    if owner == "shared":
        return SHARED
    role, _, name = owner.rpartition(" ")
    if not role:
        role = Role.TRAINER if owner in ("planner", "verifier") else Role.NODE
    return issue(path, name, Role(role))


# ---- who may do what


def test_every_method_is_in_the_table() -> None:
    assert set(REQUESTS) == set(METHODS) == {*NODE, *TRAINER}


@pytest.mark.parametrize("owner", ALLOWED)
def test_an_owner_asks_what_it_may_and_the_rest_changes_nothing(
    path: Path, ledger: Any, owner: str
) -> None:
    issue(path, "other", Role.NODE)
    token = make_token(path, owner)
    before = facts(path)
    with running(Service(ledger, ledger.run, SHARED, TokenFile(path))) as url:
        for method in REQUESTS:
            assert ask(url, token + "x", method, REQUESTS[method])[0] == 401
            if method not in ALLOWED[owner]:
                status, problem = ask(url, token, method, REQUESTS[method])
                assert status == 403 and token not in problem, method
                assert repr(owner.rpartition(" ")[2]) in problem, "it says whose token it is"
        assert facts(path) == before
        for method in ALLOWED[owner]:
            assert ask(url, token, method, REQUESTS[method]) == (200, ""), method


def test_a_node_cannot_end_or_take_the_leases_of_another(path: Path, ledger: Any) -> None:
    token = issue(path, "n2", Role.NODE)
    before = facts(path)
    group = REQUESTS["push"].payload
    with running(Service(ledger, ledger.run, "", TokenFile(path))) as url:
        for method, request in (
            ("join", Join("n1", "a")),  # the same process
            ("join", Join("n1", "new")),  # one that would end the leases
            ("join", Join("N2", "a")),
            ("join", Join("n2 ", "a")),
            ("lease", LeaseRequest("n1", "a", 1)),
            ("renew", Renewal("n1", "a", ((1, 1),))),
            ("push", Push("n1", 1, 1, group)),
            ("release", Release("n1", ((1, 1),))),
            ("register", Register("n2", "layout", "store", 1, 1, 512, 256)),
            ("progress", Progress("n2", 1, 1, is_done=True)),
        ):
            assert ask(url, token, method, request)[0] == 403, method
        assert facts(path) == before
        assert ask(url, token, "release", Release("n2", ((1, 1),)))[0] == 200
        assert ask(url, token, "renew", Renewal("n2", "a", ((1, 1),)))[0] == 200
        assert ask(url, token, "push", Push("n2", 1, 1, group))[0] == 422
    assert facts(path) == before, "in its own name it has no lease"


def test_a_malformed_request_is_no_way_around(path: Path, ledger: Any) -> None:
    token = issue(path, "n2", Role.NODE)
    with running(Service(ledger, ledger.run, "", TokenFile(path))) as url:
        for body in ({"node": ["n2"]}, {"life": "a"}, {"node": None}, {}):
            assert ask(url, token, "join", body)[0] == 400
        twice = b"\x83\xa4node\xa2n2\xa4node\xa2n1\xa4life\xa1b"  # the field comes twice
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("POST", "/v6/join", twice, headers)
        assert connection.getresponse().status in (400, 403)
        connection.close()


def test_clients_are_told_that_they_may_not(path: Path, ledger: Any) -> None:
    token = issue(path, "n1", Role.NODE)
    with (
        running(Service(ledger, ledger.run, "", TokenFile(path))) as url,
        Client(url, token, wait_s=60.0) as client,
    ):
        assert client.join(Join("n1", "a")).run == ledger.run
        with pytest.raises(NotAllowed, match="HTTP 403: the token is that of the node 'n1'"):
            client.join(Join("n3", "a"))
        revoke(path, "n1")
        client.wait_s = 0.5  # for so long it may have been a mistake
        with pytest.raises(Unavailable, match="HTTP 401: the token is missing or wrong"):
            client.lease(LeaseRequest("n1", "a", 1))
        with (
            Client(url, token, wait_s=60.0) as other,
            pytest.raises(NotAllowed, match="HTTP 401: the token is missing or wrong"),
        ):
            other.join(Join("n1", "a"))


@pytest.mark.parametrize("status", [401, 410])
def test_in_the_middle_of_a_run_a_client_waits_until_it_is_let_in_again(
    status: int, ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, is_mended = Service(ledger, ledger.run, SHARED), threading.Event()
    num_refused, real = 0, service._caller

    def caller(request: Any) -> Any:
        nonlocal num_refused
        if not is_mended.is_set():
            num_refused += 1
            raise Rejected(status, "not now")
        return real(request)

    with running(service) as url, Client(url, SHARED, wait_s=60.0) as client:
        client.join(Join("n1", "a"))
        monkeypatch.setattr(service, "_caller", caller)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.renew, Renewal("n1", "a", ()))
            while num_refused < 3:
                time.sleep(0.01)
            is_mended.set()
            assert asked.result(30).lost == ()


# ---- the file


def test_a_token_is_valid_from_its_issue_until_it_is_revoked(path: Path) -> None:
    issue(path, "n0", Role.NODE)
    access = Access("", TokenFile(path))
    tokens = [issue(path, f"n{number}", Role.NODE) for number in range(1, 20)]
    assert len(set(tokens)) == 19 and all(len(token) >= 43 for token in tokens)
    for number, token in enumerate(tokens, 1):
        caller = access.caller(f"Bearer {token}")
        assert caller is not None and (caller.name, caller.role) == (f"n{number}", Role.NODE)
        revoke(path, f"n{number}")
        assert access.caller(f"Bearer {token}") is None
    again = issue(path, "n1", Role.NODE)
    assert again != tokens[0] and access.caller(f"Bearer {again}") is not None
    assert access.caller(f"Bearer {tokens[0]}") is None


def test_nothing_but_a_bearer_of_a_token_is_let_in(path: Path) -> None:
    token = issue(path, "n1", Role.NODE)
    without, both = Access("", TokenFile(path)), Access(SHARED, TokenFile(path))
    hashed = read(path)[0].sha256
    for header in (
        *("", "Bearer", "Bearer ", "Bearer  ", f"Basic {token}", token, f"Bearer {token}x"),
        *(f"Bearer {token[:-1]}", f"Bearer {hashed}", "Bearer n1", "Bearer t\xf6k\xe9n"),
    ):
        assert without.caller(header) is None and both.caller(header) is None, header
    assert without.caller(f"Bearer {SHARED}") is None
    assert both.caller(f"bearer {SHARED}").role == Role.ALL
    assert without.caller(f"bearer  {token} ").name == both.caller(f"Bearer {token}").name == "n1"
    for shared, file in (("", None), ("two words", None), ("two words", TokenFile(path))):
        with pytest.raises(UserError, match="token must be"):
            Access(shared, file)


def test_the_file_holds_hashes_that_its_owner_alone_may_read(path: Path) -> None:
    os.umask(os.umask(0))
    token = issue(path, "n1", Role.NODE)
    assert token not in path.read_text() and len(json.loads(path.read_text())["tokens"]) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    for mode in (0o644, 0o640, 0o604, 0o620):
        path.chmod(mode)
        for use in (read, TokenFile):
            with pytest.raises(UserError, match=f"other users can read .*chmod 600 {path}"):
                use(path)
        with pytest.raises(UserError, match="other users can read"):
            issue(path, "n2", Role.NODE)


def test_a_file_that_breaks_changes_nothing_until_it_is_mended(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad second of it, as while it is copied, ends no node."""
    token = issue(path, "n1", Role.NODE)
    access = Access(SHARED, TokenFile(path))
    good = path.read_text()
    row = json.loads(good)["tokens"][0]
    broken = [
        *("", "{", "[]", "{}", '{"tokens": 1}', '{"tokens": [1]}', '{"tokens": [{}]}', "\x00"),
        json.dumps({"tokens": [{**row, "role": "all"}]}),
        json.dumps({"tokens": [{**row, "role": "king"}]}),
        json.dumps({"tokens": [{**row, "sha256": ""}]}),
        json.dumps({"tokens": [{**row, "sha256": 5}]}),
        json.dumps({"tokens": [{**row, "more": 5}]}),
    ]
    with caplog.at_level(logging.ERROR):
        for number, text in enumerate(broken, 1):
            path.write_text(text)
            for _ in range(3):
                assert access.caller(f"Bearer {token}") is not None, text
                assert access.caller(f"Bearer {token}x") is None, text
            assert len(caplog.records) == number, "it is said once"
            assert access.caller(f"Bearer {SHARED}") is not None
            with pytest.raises(UserError, match="holds no tokens"):
                TokenFile(path)
            os.utime(path, ns=(number, number))
    path.unlink()
    assert access.caller(f"Bearer {token}") is not None
    path.write_text(good)
    path.chmod(0o644)
    assert access.caller(f"Bearer {token}") is not None
    path.chmod(0o600)
    assert access.caller(f"Bearer {token}") is not None
    revoke(path, "n1")
    assert access.caller(f"Bearer {token}") is None
    assert token not in caplog.text


def test_tokens_issued_at_once_are_all_there(path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: issue(path, f"n{number}", Role.NODE), range(40)))
    assert {entry.name for entry in read(path)} == {f"n{number}" for number in range(40)}


# ---- the command


def test_issue_list_revoke(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def token(*words: str) -> tuple[int, str, str]:
        code = main(["token", *words, "--tokens", str(path)])
        return code, *capsys.readouterr()

    code, printed, _ = token("issue", "eu-1")
    assert code == 0 and Access("", TokenFile(path)).caller(f"Bearer {printed}").name == "eu-1"
    assert token("issue", "planner", "--role", "trainer")[0] == 0
    code, listed, _ = token("list")
    assert code == 0 and printed.strip() not in listed
    expected = [["node", "eu-1"], ["trainer", "planner"]]
    assert [line.split()[:2] for line in listed.splitlines()] == expected
    for words, why in (
        (("issue", "eu-1"), "'eu-1' has a token in"),
        (("revoke", "eu-2"), "has no token named 'eu-2'"),
        (("issue", "a b"), "name 'a b'"),
        (("issue",), "take a NAME"),
        (("list", "x"), "take a NAME"),
    ):
        code, _, problem = token(*words)
        assert code == 2 and why in problem and len(problem.splitlines()) == 1
    assert token("revoke", "eu-1")[0] == 0 and [each.name for each in read(path)] == ["planner"]
    path.unlink()
    code, _, problem = token("list")
    assert code == 2 and f"cannot read the tokens in {path}" in problem
