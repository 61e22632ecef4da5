"""JSON services that are slow, refuse, hang up or answer garbage: what is asked again, and told."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from typing import Any

import pytest
from web_servers import (
    Answer,
    Server,
    check_cancelled,
    drip,
    endless,
    hang_up,
    html,
    json_answer,
    serving,
    silent,
    status,
)

from flowtrain.records import UserError
from flowtrain.tools import ToolError
from flowtrain.tools.web import api as api_module
from flowtrain.tools.web.api import Api, Request, key_from_env
from flowtrain.utils.event_loop import run_to_end

GOOD = json_answer({"ok": True})


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_FIRST_PAUSE_S", 0.01)


def ask(server: Server, deadline_s: float = 10.0, **request: Any) -> Any:
    return asyncio.run(Api().ask(Request(f"{server.url}/v1", **request), deadline_s))


def problem(*answers: Answer, deadline_s: float = 10.0) -> tuple[str, int]:
    """Return the planner's text, and the number of requests to the service."""
    with serving(*answers) as server, pytest.raises(ToolError) as caught:
        ask(server, deadline_s)
    return str(caught.value), len(server.seen)


def test_a_get_carries_its_parameters_and_headers() -> None:
    with serving(GOOD) as server:
        assert ask(server, params={"q": "a b&c", "num": 3}, headers={"X-Key": "k"}) == {"ok": True}
    request = server.seen[0]
    expected = ("GET", "/v1?q=a+b%26c&num=3", "k")
    assert (request.command, request.path, request.headers["X-Key"]) == expected
    assert request.headers["User-Agent"].startswith("flowtrain/")


def test_a_body_is_posted_as_json() -> None:
    with serving(GOOD) as server:
        ask(server, body={"q": "ä"})
    request = server.seen[0]
    assert (request.command, request.headers["Content-Type"]) == ("POST", "application/json")
    assert request.body.decode() == '{"q":"ä"}'


@pytest.mark.parametrize("code", [408, 425, 429, 500, 502, 503, 504, 0])
def test_what_may_pass_is_asked_again(code: int) -> None:
    failure = status(code) if code else hang_up
    with serving(failure, failure, GOOD) as server:
        assert ask(server) == {"ok": True}
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            status(400, '{"error": {"message": "bad\n request"}}'),
            '127.0.0.1 refused with HTTP 400: \'{"error": {"message": "bad request"}}\'',
        ),
        (status(401), "refused with HTTP 401: an empty body"),
        (status(403, "x" * 999), f"refused with HTTP 403: '{'x' * 200}'"),
        (status(404), "refused with HTTP 404"),
        (status(302, Location="http://127.0.0.1:1/"), "refused with HTTP 302"),
        (html("<html>"), "sent something that is not JSON: '<html>'"),
        (html(b"\xff\xfe"), "sent something that is not JSON"),
        (html("[" * 100_000), "sent something that is not JSON"),
        (html("9" * 10_000), "sent something that is not JSON"),
        (html(b"not gzip", Content_Encoding="gzip"), "cannot be decompressed"),
    ],
)
def test_what_does_not_pass_is_asked_once_and_says_why(answer: Answer, reason: str) -> None:
    message, num_asked = problem(answer)
    assert reason in message and num_asked == 1


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "MAX_BYTES", 1 << 20)
    for answer in (endless, html(gzip.compress(bytes(8 << 20)), Content_Encoding="gzip")):
        message, num_asked = problem(answer)
        assert message.startswith("127.0.0.1 sent a body of more than 1048576 bytes: ")
        assert num_asked == 1


def test_it_asks_no_more_than_there_is_time_for() -> None:
    message, num_asked = problem(status(503, "busy"), deadline_s=1.5)
    # The time may end between attempts, or within one.
    within = "127.0.0.1: no answer within 1.5 s: HTTP 503: 'busy'"
    between = "127.0.0.1: HTTP 503: 'busy'; the deadline leaves no time for another attempt"
    assert message.startswith((within, between))
    assert num_asked > 1


def test_retry_after_is_respected() -> None:
    with serving(status(429, Retry_After="1"), GOOD) as server:
        start = time.perf_counter()
        assert ask(server) == {"ok": True}
        assert time.perf_counter() - start >= 1.0
    message, num_asked = problem(status(429, "slow down", Retry_After="3600"))
    assert ("429" in message, num_asked) == (True, 1)
    assert problem(status(429, Retry_After="Fri, 20 Nov 2026 00:00:00 GMT"), deadline_s=1.5)[1] > 1


@pytest.mark.parametrize("answer", [silent, drip])
def test_a_silent_service_costs_the_deadline_and_no_more(answer: Answer) -> None:
    assert problem(answer, deadline_s=1.0) == ("127.0.0.1: no answer within 1.0 s: it is silent", 1)


def test_nobody_listens() -> None:
    with serving(GOOD) as server:
        url = server.url
    with pytest.raises(ToolError, match=r"127\.0\.0\.1: .*ConnectError"):
        asyncio.run(Api().ask(Request(url), 1.0))


def test_a_cancelled_question_leaves_nothing_behind() -> None:
    threads = threading.active_count()
    check_cancelled(lambda server: Api().ask(Request(server.url), 60.0))
    while threading.active_count() > threads:  # those of the server end too
        time.sleep(0.01)


def test_a_key_is_in_its_variable_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", " k-1 ")
    assert key_from_env("SOME_KEY", "a.b", "It") == "k-1"
    for value in ("", "  ", "ä", "a\nb"):
        monkeypatch.setenv("SOME_KEY", value)
        with pytest.raises(
            UserError,
            match=r"a\.b='SOME_KEY': this environment variable holds no valid key for It; "
            r"export SOME_KEY=",
        ):
            key_from_env("SOME_KEY", "a.b", "It")


def test_connections_are_kept_from_step_to_step() -> None:
    """HTTP/1.1 kept alive: as many sockets as questions at once."""
    ports: set[int] = set()

    def note(handler: Any) -> None:
        ports.add(handler.client_address[1])
        handler.reply(200, b"{}", Connection="keep-alive")

    with serving(note) as server:
        server.keeps_alive = True
        api = Api()
        for _ in range(6):
            run_to_end(api.ask(Request(server.url), 10.0))
    assert len(ports) == 1
