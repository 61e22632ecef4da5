"""Servers in place of a dataflow's service: silent, slow, broken, or something else."""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from flowtrain.records import Task
from flowtrain.rollouts.codec import pack
from flowtrain.rollouts.contract import (
    AssignedGroup,
    Batch,
    BatchRequest,
    Disown,
    Done,
    EvalResult,
    EvalSettings,
    Evaluate,
    EvaluationRequest,
    EvaluationState,
    Join,
    Joined,
    LeaseRequest,
    Leases,
    PolicyState,
    Progress,
    Push,
    Pushed,
    Register,
    Registered,
    Release,
    Renewal,
    Renewed,
)
from flowtrain.rollouts.wire import Problem

REQUESTS: dict[str, Any] = {
    "join": Join("n1", "a", {"planner": "L"}),
    "lease": LeaseRequest("n1", "a", 2, {"planner": 3}, 0.5, 0.25, "k"),
    "renew": Renewal("n1", "a", ((1, 1), (2, 1))),
    "push": Push("n1", 1, 1, b"\x00\xff" * 9),
    "release": Release("n1", ((1, 1),), "bye"),
    "disown": Disown("n1", "a"),
    "register": Register("planner", "L", "store", 4, 2, 512, 256, 7),
    "batch": BatchRequest("planner", 8),
    "progress": Progress("planner", 8, 7, 1.0, 2.0, True),
    "evaluate": Evaluate("planner", 8, "texts", EvalSettings(3, 0.5), 1, (Task("t", "q", ("a",)),)),
    "evaluation": EvaluationRequest("planner", 8, "texts", 1, 2),
    "status": None,
}
ANSWERS: dict[str, Any] = {
    "join": Joined("run-1", "[run]\n", 4, 60.0, {"planner": PolicyState(3, "store", "L")}),
    "lease": Leases((), {}, 0.5, "full"),
    "renew": Renewed((2,), {}),
    "push": Pushed("committed"),
    "release": Done(),
    "disown": Done(),
    "register": Registered("run-1", 8),
    "batch": Batch((AssignedGroup(0, 5, b"\x80\x00", True),), 0, {"staleness_mean": 0.5}),
    "progress": Done(),
    "evaluate": Done(),
    "evaluation": EvaluationState(2, 0, (EvalResult(1, b"\x80\x00"),)),
    "status": {"work_items": {"leased": 1}},
}

Answer = Callable[[socket.socket, str], None]
"""Handles a connection that has asked for a method; the connection ends after it."""


@contextlib.contextmanager
def peer(*answers: Answer) -> Iterator[tuple[str, list[str]]]:
    """Its URL and the requests it was sent, which meet the answers in turn, then the last."""
    seen: list[str] = []

    def serve(connection: socket.socket, answer: Answer) -> None:
        with connection, contextlib.suppress(OSError):
            request = _request(connection)
            seen.append(request)
            answer(connection, request.partition(" ")[2].partition(" ")[0].rpartition("/")[2])

    def accept() -> None:
        with contextlib.suppress(OSError):
            for number in range(10**6):
                connection, _ = listener.accept()
                threading.Thread(
                    target=serve,
                    args=(connection, answers[min(number, len(answers) - 1)]),
                    daemon=True,
                ).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        listener.shutdown(socket.SHUT_RDWR)


def _request(connection: socket.socket) -> str:
    """All of it; the head as text."""
    reader = connection.makefile("rb")
    head = ""
    while (line := reader.readline()) != b"\r\n":
        if not line:
            raise ConnectionError("it hung up")
        head += line.decode("latin-1")
    length = re.search(r"(?i)^content-length: (\d+)", head, re.MULTILINE)
    reader.read(int(length[1]) if length else 0)
    return head


def reply(status: int, body: bytes = b"", *headers: str, length: int | None = None) -> Answer:
    """`length`: announced."""
    lines = [
        f"HTTP/1.1 {status} Words",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
        *headers,
        "",
        "",
    ]
    return lambda connection, _: connection.sendall("\r\n".join(lines).encode() + body)


def honest(connection: socket.socket, method: str) -> None:
    reply(200, pack(ANSWERS[method]))(connection, method)


def problem(status: int, words: str, *headers: str) -> Answer:
    return reply(status, pack(Problem(words)), *headers)


def half(connection: socket.socket, method: str) -> None:
    body = pack(ANSWERS[method])
    reply(200, body[: len(body) // 2], length=max(len(body), 2))(connection, method)


def half_of_chunks(connection: socket.socket, method: str) -> None:
    body = pack(ANSWERS[method])
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body)
    )


def silent(connection: socket.socket, _: str) -> None:
    connection.recv(1)


def _dripping(start: bytes) -> Answer:
    def answer(connection: socket.socket, _: str) -> None:
        connection.sendall(start)
        while True:
            time.sleep(0.01)
            connection.sendall(b"x")

    return answer


def endless(connection: socket.socket, _: str) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 65536)


PASSING: dict[str, tuple[Answer, str]] = {
    "silent": (silent, "no answer within|it is silent"),
    "closing": (lambda *_: None, "RemoteProtocolError|ReadError"),
    "slow head": (_dripping(b"HTTP/1.1 200 OK\r\nX: "), "no answer within|it is silent"),
    "slow body": (_dripping(b"HTTP/1.1 200 OK\r\n\r\n"), "no answer within|it is silent"),
    "500": (reply(500, b"Internal Server Error"), "HTTP 500: 'Internal Server Error'"),
    "502 of a proxy": (
        reply(502, b"<html>\n<h1>Bad gateway"),
        "HTTP 502: '<html> <h1>Bad gateway'",
    ),
    "503": (problem(503, "the disk is full"), "HTTP 503: the disk is full"),
    "429": (problem(429, "later", "Retry-After: 1"), "HTTP 429: later"),
    "408": (problem(408, "too slow"), "HTTP 408: too slow"),
    "half": (half, "RemoteProtocolError"),
    "half of chunks": (half_of_chunks, "RemoteProtocolError"),
    "nothing": (reply(200), "an invalid answer"),
    "garbage": (
        reply(200, b"\xc1\x00garbage"),
        "an invalid answer .* is this the address of a dataflow",
    ),
    "a page": (
        reply(200, b"<html>welcome</html>", "Content-Type: text/html"),
        "an invalid answer",
    ),
    "another record": (reply(200, pack([1, 2])), "an invalid answer"),
    "no HTTP": (
        lambda connection, _: connection.sendall(b"220 mail.example ESMTP\r\n"),
        "RemoteProtocolError",
    ),
    "a bomb": (
        reply(200, gzip.compress(bytes(1 << 20)), "Content-Encoding: gzip"),
        "an invalid answer",
    ),
}
"""Peers that may get better, with what a client says in the end."""
REFUSING: dict[str, tuple[Answer, str]] = {
    "moved": (
        reply(307, b"", "Location: http://127.0.0.1:1/"),
        "HTTP 307: .*redirects are not followed",
    ),
    "token": (
        problem(401, "the token is missing or wrong"),
        "HTTP 401: the token is missing or wrong; set FLOWTRAIN_TOKEN",
    ),
    "nowhere": (
        reply(404, b"Not Found"),
        "HTTP 404: 'Not Found'; is this the address of a dataflow?",
    ),
    "refused": (
        problem(422, "policy 'critic': there is none"),
        "HTTP 422: policy 'critic': there is none",
    ),
    "another run": (problem(409, "another run"), "HTTP 409: another run"),
    "endless": (endless, "answers with more than"),
}
"""Peers with which nothing will get better."""
