"""The service answers who has the token, in bounded time and memory, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_groups
import pytest
from http_servers import running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowtrain.records import UserError
from flowtrain.rollouts import codec
from flowtrain.rollouts import service as service_module
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.codec import pack, unpack
from flowtrain.rollouts.contract import (
    Batch,
    BatchRequest,
    Join,
    Joined,
    LeaseRequest,
    Push,
    Pushed,
    Unavailable,
)
from flowtrain.rollouts.service import Service
from flowtrain.rollouts.wire import METHODS, Problem
from flowtrain.utils.net import serving

TOKEN = "a-token-of-the-tests"
JOIN = pack(Join("n1", "a"))


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fake_groups.ledger(tmp_path_factory.mktemp("service") / "flow.sqlite")


@pytest.fixture(scope="module")
def url(ledger: Any) -> Iterator[str]:
    with service_of(ledger) as url:
        yield url


def ask(
    url: str,
    path: str,
    body: bytes = b"",
    token: str | None = TOKEN,
    method: str = "POST",
    **headers: str,
) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection.request(
        method, path, body, {key.replace("_", "-"): value for key, value in headers.items()}
    )
    response = connection.getresponse()
    with contextlib.closing(connection):
        return response.status, response.read(), response.headers


def service_of(ledger: Any) -> contextlib.AbstractContextManager[str]:
    """The URL of a service of a ledger, or of what answers like one."""
    return running(Service(ledger, getattr(ledger, "run", "r"), TOKEN))


def raw(url: str, *parts: bytes) -> tuple[int, bytes]:
    """Status and body of the first answer; stops sending once the server has had enough."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.read()


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join(
        (f"POST {path} HTTP/1.1", "Host: h", f"Authorization: Bearer {TOKEN}", *lines, "", "")
    ).encode("latin-1")


def words(body: bytes) -> str:
    return unpack(body, Problem).error


# ---- who is let in


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "t\xf6k\xe9n"])
@pytest.mark.parametrize("path", ["/v6/join", "/v6/status", "/nothing", "/v6/../etc/passwd"])
def test_without_the_token_everything_looks_alike(
    url: str, ledger: Any, token: str | None, path: str
) -> None:
    for method in ("GET", "POST", "DELETE"):
        status, body, headers = ask(url, path, JOIN, token, method)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert words(body) == "the token is missing or wrong" and "server" not in headers
    assert ledger.status()["nodes"] == {}


def test_the_scheme_must_be_bearer(url: str) -> None:
    for scheme, status in (("Bearer", 200), ("bearer", 200), ("Basic", 401), ("", 401)):
        assert ask(url, "/v6/status", token=None, Authorization=f"{scheme} {TOKEN}")[0] == status
    assert ask(url, f"/v6/status?token={TOKEN}", token=None)[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/v2", "/v6/", "/v6/nothing", "/v6/join/", "//v6/join", "/v6//join", "/V2/join"),
        *("/v6/Join", "/join", "/v6/close", "/v6/_ask", "/v6/__init__", "/v6/audit", "/v6/run"),
        *("/v6/join%00", "/v6/join%0a", "/v6/%2e%2e/v6/join", "/v6/../v6/join"),
        *(
            "/v6/./join",
            "/etc/passwd",
            "/v6/join;x",
            "/v6/%ff",
            "/v6/\u0458oin".encode().decode("latin-1"),
        ),
    ],
)
def test_there_is_nothing_at_other_paths(url: str, path: str) -> None:
    status, answer = raw(url, head(path, "Content-Length: 0"))
    assert status in (400, 404)
    assert b"Traceback" not in answer and b"root" not in answer


@pytest.mark.parametrize("version", [5, 7])
def test_another_protocol_version_is_refused(url: str, version: int) -> None:
    status, body, _ = ask(url, f"/v{version}/join", JOIN)
    assert status == 410
    assert words(body) == (
        f"the request is of protocol {version}, this service speaks 6: install the same flowtrain "
        "on both"
    )


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"])
def test_methods_are_asked_by_post(url: str, method: str) -> None:
    status, _, headers = ask(url, "/v6/status", method=method)
    assert (status, headers["allow"]) == (405, "POST")


def test_a_request_of_another_run_is_refused(url: str, ledger: Any) -> None:
    assert ask(url, "/v6/status", Flowtrain_Run=ledger.run)[0] == 200
    for run in ("another", "", "r\xfcn", ledger.run + "x"):
        status, body, _ = ask(url, "/v6/status", Flowtrain_Run=run)
        assert status == 409 and ledger.run not in words(body)


# ---- what is too much


@pytest.mark.parametrize(("method", "most"), [("join", 1 << 20), ("push", 64 << 20)])
def test_a_body_that_is_announced_too_long_is_not_read(url: str, method: str, most: int) -> None:
    for announced in (most + 1, 1 << 40):
        assert raw(url, head(f"/v6/{method}", f"Content-Length: {announced}"))[0] == 413


def test_a_body_of_unknown_length_is_read_up_to_the_limit(url: str) -> None:
    """It has no end: only a server that stops reading answers."""
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    status, body = raw(url, head("/v6/join", "Transfer-Encoding: chunked"), *[chunk] * 17)
    assert status == 413 and "more than 1048576 bytes" in words(body)


def test_long_headers_are_refused(url: str) -> None:
    """Before their end has come."""
    for headers in (
        b"X: " + b"x" * (17 << 10),
        b"\r\n".join(b"X%d: %s" % (number, b"x" * 100) for number in range(160)),
    ):
        assert raw(url, b"POST /v6/status HTTP/1.1\r\nHost: h\r\n" + headers)[0] == 400


def test_a_body_that_comes_too_slowly_is_not_waited_for(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "BODY_S", 0.1)
    status, body = raw(url, head("/v6/join", "Content-Length: 1000"), b"x")
    assert status == 408 and "at less than 16 KiB per second" in words(body)


def test_a_long_body_has_the_time_that_its_length_takes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "BODY_S", 0.5)
    monkeypatch.setattr(serving, "SLOWEST", 1)

    def parts() -> Iterator[bytes]:
        yield JOIN[:10]
        time.sleep(0.8)
        yield JOIN[10:]

    assert ask(url, "/v6/join", parts())[0] == 200


def test_a_body_that_is_cut_is_not_taken() -> None:
    scripted = Scripted(lambda: Joined("r", "", 1, 1.0, {}))
    with service_of(scripted) as url:
        host, port = url.removeprefix("http://").split(":")
        for length in range(0, len(JOIN), 2):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(head("/v6/join", f"Content-Length: {len(JOIN)}") + JOIN[:length])
        assert ask(url, "/v6/join", JOIN)[0] == 200
    assert scripted.num_joins == 1


def test_a_bomb_of_a_group_is_refused(url: str, ledger: Any) -> None:
    """By what two rollouts of three turns of this run's models can have, before it is decoded."""
    most = 2 * 3 * ((1 << 20) + fake_groups.MAX_POSITIONS * 40)
    with Client(url, TOKEN, wait_s=20) as client:
        client.join(Join("bomber", "a"))
        client.register(fake_groups.planner())
        (lease,) = client.lease(LeaseRequest("bomber", "a", 1)).leases
        for payload, why in (
            (zlib.compress(bytes(most + 1)), f"may have {most} bytes"),
            (zlib.compress(b"\x91" * (1 << 19)), "malformed Group|malformed group"),
            (b"PK\x03\x04", "malformed group"),
            (b"", "malformed group"),
        ):
            status, body, _ = ask(
                url, "/v6/push", pack(Push("bomber", lease.work_item, 1, payload))
            )
            assert status == 422 and any(each in words(body) for each in why.split("|"))
        good = Push("bomber", lease.work_item, 1, codec.pack_group(fake_groups.group(lease.task)))
        expected = ["committed", "duplicate", "duplicate"]
        assert [client.push(good).status for _ in range(3)] == expected, "replayed"
        other = Push(
            "bomber",
            lease.work_item,
            1,
            codec.pack_group(fake_groups.group(lease.task, rewards=(1.0, 1.0))),
        )
        assert client.push(other).status == "duplicate"
    assert ledger.audit().problems == ()


@pytest.mark.parametrize(
    "node", ["../../etc/passwd", "a/b", "", "a" * 101, "n\xf6de", "a\x00b", "a\nb", "\u202e"]
)
def test_names_that_are_paths_or_worse_are_refused(url: str, ledger: Any, node: str) -> None:
    assert ask(url, "/v6/join", pack(Join(node, "a")))[0] == 422
    assert node not in ledger.status()["nodes"]


@pytest.mark.parametrize("num", [0, -1, 1025, 2**31, 2**63 - 1, 2**64 - 1])
def test_counts_that_make_no_sense_are_refused(url: str, num: int) -> None:
    assert ask(url, "/v6/join", JOIN)[0] == 200
    for method, request in (
        ("lease", LeaseRequest("n1", "a", num)),
        ("batch", BatchRequest("planner", 1, num, num)),
        ("batch", BatchRequest("planner", 2**63 + num % 9, 0, 1)),
        ("batch", BatchRequest("planner", 1, 0, 2**20)),
        ("register", replace(fake_groups.planner(num), step=2**64 - 1)),
    ):
        assert ask(url, f"/v6/{method}", pack(request))[0] == 422, method


# ---- what goes wrong behind it


class Scripted:
    """A ledger that answers joins as told, and counts how often it was asked for a batch."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.num_joins, self.num_batches, self.num_missing = answer, 0, 0, 1

    def join(self, request: Join) -> Joined:
        self.num_joins += 1
        return self.answer()

    def push(self, request: Push) -> Pushed:
        return Pushed("committed")

    def batch(self, request: BatchRequest) -> Batch:
        assert request.wait_s == 0
        self.num_batches += 1
        return Batch((), self.num_missing)


def raising(error: Exception) -> Any:
    def answer() -> Joined:
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (Unavailable("the database is busy"), 503, "the database is busy"),
        (UserError("cannot use the database: free some space"), 503, "free some space"),
        (RuntimeError("secret"), 500, "Internal Server Error"),
        (KeyError("secret"), 500, "Internal Server Error"),
    ],
)
def test_what_passes_may_be_asked_again_and_what_is_ours_is_not_told(
    error: Exception, status: int, told: str
) -> None:
    with service_of(Scripted(raising(error))) as url:
        found, body, _ = ask(url, "/v6/join", JOIN)
    assert found == status and told.encode() in body and b"secret" not in body


def test_more_at_a_time_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_OVERHEAD", 12 << 20)
    is_asked, is_over = threading.Semaphore(0), threading.Event()

    def answer() -> Joined:
        is_asked.release()
        assert is_over.wait(20)
        return Joined("r", "", 1, 1.0, {})

    with service_of(Scripted(answer)) as url, ThreadPoolExecutor(2) as threads:
        busy = [threads.submit(ask, url, "/v6/join", JOIN) for _ in range(2)]
        for _ in range(2):
            assert is_asked.acquire(timeout=20)
        status, _, headers = ask(url, "/v6/join", JOIN)
        assert (status, headers["retry-after"]) == (503, "1")
        is_over.set()
        assert [each.result()[0] for each in busy] == [200, 200]
        assert ask(url, "/v6/join", JOIN)[0] == 200


# ---- waiting for a batch


def test_waiting_for_a_batch_holds_no_thread_and_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_OVERHEAD", 12 << 20)
    scripted = Scripted()
    with (
        service_of(scripted) as url,
        Client(url, TOKEN, wait_s=60) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        waiting = [
            threads.submit(client.batch, BatchRequest("planner", 1, wait_s=30.0)) for _ in range(6)
        ]
        while scripted.num_batches < 18:
            assert client.push(Push("n1", 1, 1, b"")).status == "committed"
        scripted.num_missing = 0
        assert all(each.result(timeout=20).num_missing == 0 for each in waiting)


@pytest.mark.parametrize("wait_s", [0.0, -1.0, float("nan"), float("-inf")])
def test_who_does_not_wait_is_answered_at_once(wait_s: float) -> None:
    scripted = Scripted()
    with service_of(scripted) as url:
        status, body, _ = ask(url, "/v6/batch", pack(BatchRequest("planner", 1, wait_s=wait_s)))
    assert (status, unpack(body, Batch).num_missing, scripted.num_batches) == (200, 1, 1)


def test_an_answer_waits_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_WAIT_S", 0.3)
    with service_of(Scripted()) as url:
        for wait_s, least_s in ((0.1, 0.1), (float("inf"), 0.3), (1e9, 0.3)):
            began = time.monotonic()
            assert ask(url, "/v6/batch", pack(BatchRequest("planner", 1, wait_s=wait_s)))[0] == 200
            assert time.monotonic() - began >= least_s


def test_nobody_is_waited_for_who_has_hung_up() -> None:
    scripted = Scripted()
    body = pack(BatchRequest("planner", 1, wait_s=30.0))
    with service_of(scripted) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head("/v6/batch", f"Content-Length: {len(body)}") + body)
            while scripted.num_batches < 3:
                time.sleep(0.005)
        for _ in range(8):
            before = scripted.num_batches
            time.sleep(0.7)  # longer than the longest pause between two looks
            if scripted.num_batches == before:
                return
    raise AssertionError("it goes on looking")


def test_a_server_that_ends_does_not_wait_for_batches() -> None:
    scripted = Scripted()
    with ThreadPoolExecutor(1) as threads, service_of(scripted) as url:
        waiting = threads.submit(
            ask, url, "/v6/batch", pack(BatchRequest("planner", 1, wait_s=30.0))
        )
        while not scripted.num_batches:
            time.sleep(0.005)
    status, body, _ = waiting.result(timeout=20)
    assert (status, unpack(body, Batch).num_missing) == (200, 1)


# ---- whatever comes


async def _asgi(service: Service, method: str, body: bytes) -> int:
    """The status, without HTTP between."""
    found: list[int] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.sleep(3600)
        return messages.pop()

    async def send(message: Any) -> None:
        found.append(message.get("status", 0))

    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v6/{method}",
        "headers": headers,
        "query_string": b"",
        "is_ending": lambda: True,
    }
    await service(scope, receive, send)
    return found[0]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Service:
    ledger = fake_groups.ledger(tmp_path_factory.mktemp("fuzzed") / "flow.sqlite")
    ledger.join(Join("n", "a"))
    ledger.register(fake_groups.planner())
    return Service(ledger, ledger.run, TOKEN)


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 5)
NAMES = st.sampled_from(["n", "a", "planner", "verifier", fake_groups.LAYOUT]) | st.text(
    max_size=20
)
FLOATS = st.floats()


def fields(kind: Any) -> st.SearchStrategy[Any]:
    """Records of the right shape with anything in them."""
    texts = {"node", "life", "key", "policy", "layout", "store", "reason"}
    shapes: dict[str, st.SearchStrategy[Any]] = {
        "layouts": st.dictionaries(NAMES, NAMES, max_size=3),
        "versions": st.dictionaries(NAMES, NUMBERS, max_size=3),
        "work_items": st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4).map(tuple),
        "payload": st.binary(max_size=50)
        | st.just(codec.pack_group(fake_groups.group(fake_groups.TASKS[0]))),
        "is_done": st.booleans(),
    }
    names = kind.__dataclass_fields__
    found = {
        name: NAMES
        if name in texts
        else FLOATS
        if name.endswith("_s")
        else shapes.get(name, NUMBERS)
        for name in names
    }
    return st.builds(kind, **found)


@pytest.mark.parametrize("method", METHODS)
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_bytes_and_no_numbers_make_it_stumble(
    method: str, fuzzed: Service, data: st.DataObject
) -> None:
    kind = METHODS[method].request
    messages = (
        st.binary(max_size=200)
        if kind is None
        else st.binary(max_size=200) | fields(kind).map(pack)
    )
    assert asyncio.run(_asgi(fuzzed, method, data.draw(messages))) in (200, 400, 422)


def test_deeply_nested_bytes(url: str) -> None:
    for body in (
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc1",
    ):
        assert ask(url, "/v6/join", body)[0] == 400


# ---- starting it


def test_there_is_no_service_without_a_token(ledger: Any) -> None:
    for token in ("", "two words"):
        with pytest.raises(UserError, match="token must be"):
            Service(ledger, ledger.run, token)


def test_the_extra_is_named_when_it_is_missing(
    ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "starlette.requests", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[serve\]'"):
        Service(ledger, ledger.run, TOKEN)


def test_one_ledger_behind_two_services(tmp_path: Path) -> None:
    """Each of which has a connection of its own: what one was told the other one knows."""
    first, second = (fake_groups.ledger(tmp_path / "flow.sqlite") for _ in range(2))
    with (
        service_of(first) as one,
        service_of(second) as other,
        Client(one, TOKEN, wait_s=20) as left,
        Client(other, TOKEN, wait_s=20) as right,
        ThreadPoolExecutor(1) as threads,
    ):
        assert (
            left.join(Join("n1", "a")).run == right.register(fake_groups.planner(num_groups=1)).run
        )
        (lease,) = right.lease(LeaseRequest("n1", "a", 1)).leases
        waiting = threads.submit(right.batch, BatchRequest("planner", 1, wait_s=30))
        assert fake_groups.push(left, lease) == "committed"
        assert fake_groups.push(right, lease) == "duplicate"
        found = [served.work_item for served in waiting.result(timeout=20).groups]
        assert found == [lease.work_item]
    assert first.audit().problems == ()
