"""Requests that are not what HTTP, or the servers, expect; all drawn from a generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from flowtrain.rollouts.codec import pack
from flowtrain.rollouts.contract import Join, LeaseRequest, Progress, Release, Renewal
from flowtrain.rollouts.wire import PREFIX

_OURS = PREFIX.encode()
READ_ONLY = (_OURS + b"status", b"/HEAD")
"""What requests with a valid token ask for; their others have a body that no method takes."""
_VALID = {
    _OURS + b"join": pack(Join("intruder", "life")),
    _OURS + b"lease": pack(LeaseRequest("intruder", "life", 1)),
    _OURS + b"renew": pack(Renewal("intruder", "life", ((1, 1),))),
    _OURS + b"release": pack(Release("intruder", ((1, 1),))),
    _OURS + b"progress": pack(Progress("planner", 9, 9)),
}
_METHODS = (
    *(b"GET", b"post", b"CONNECT", b"", b"PRI", b"P\x00ST", b"POST POST", b"\xff", b"X" * 20000),
)
_PATHS = (
    *(b"", b"*", b"/", b"//", b"/v6/../v6/status", b"http://evil/v6/join", b"/%00", b"/\x00"),
    *(_OURS + b"join?x", b"/v00000000/%2e%2e/HEAD", b"/\xff", b"/a b", _OURS + b"join"),
    b"/" + b"x" * 20000,
)
_VERSIONS = (b"HTTP/0.9", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 ", b"HTTP/1.\xb9", b"", b"http/1.1")
_LENGTHS = (
    *(b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 1e3", b"Content-Length:"),
    *(b"Content-Length: 0x5", b"Content-Length: 5, 6", b"Content-Length: 99999999999999999999"),
    *(b"Content-Length: 67108865", b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: 5"),
    *(b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: \x0bchunked"),
    *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked", b"Expect: 100-continue"),
    b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
)
_HEADERS = (
    *(b"no colon", b": no name", b"X : y", b" X: y", b"X: a\r\n folded", b"X: \x00"),
    b"X: \xff\xfe",
    *(b"X: " + b"x" * 17000, b"X: " + b"x" * 70000, b"\r\n".join([b"X: y"] * 3000), b"X\x00: y"),
    *(b"Range: bytes=9-1", b"Range: bytes=" + b"0-1," * 200, b"Upgrade: websocket", b"X: a\rY: b"),
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c",
    *(b"Flowtrain-Run: \xc3\xbc", b"Host: i"),
)
_CHUNKS = (
    *(b"zz\r\n", b"-1\r\nx\r\n", b"ffffffffffffffffff\r\n", b"5\r\nabcdeX0\r\n\r\n", b"5\nabcde\n"),
    *(b"1;" + b"e" * 20000 + b"\r\nx\r\n0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0x1\r\nx\r\n0\r\n\r\n"),
    *(b"5\r\nabc", b"1\r\n\x91\r\n" * 500 + b"0\r\n\r\n", b"00000000000000000000000000000001\r\nx"),
)
_BODIES = (
    *(b"\x91" * 50_000, b"\x81\xa1a" * 20_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffn", b"\xc1", b"\x80", b"\xc0", b"{}", b"\x00"),
    *(b"\xc9\xff\xff\xff\xff\x01", b"\x82\xa4node\x01\xa4life\xc0", b"\x81\xa4node\xa2\xff\xfe"),
)
_TOKENS = (
    *(None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic eDp5", b"Bearer t\xc3\xb6ken"),
    *(b"Bearer \x80\xff", b"Bearer " + b"x" * 15000, b"\x00"),
    b"Bearer a\r\nAuthorization: Bearer b",
)


@dataclass
class Draft:
    """A request whose parts have yet to be put together."""

    method: bytes
    path: bytes
    lines: list[bytes]
    body: bytes = b""
    length: bytes | None = None
    """None: the header that the body asks for."""
    version: bytes = b"HTTP/1.1"
    end: bytes = b"\r\n"
    parts: list[bytes] = field(default_factory=list)
    """What follows in the same stream."""

    def raw(self) -> bytes:
        length = b"Content-Length: %d" % len(self.body) if self.length is None else self.length
        first = b" ".join((self.method, self.path, self.version))
        lines = [first, b"Host: h", *self.lines, *([length] if length else []), b"", b""]
        return self.end.join(lines) + self.body + b"".join(self.parts)


def request(rng: Random, authorization: bytes | None) -> bytes:
    """Draw the bytes of a connection: one request or several, with one to three things wrong.
    `authorization`: value of that header; None: something that is no token.
    """
    draft = _draft(rng, authorization)
    for change in rng.choices(_CHANGES, k=rng.randint(1, 3)):
        change(rng, draft)
    if rng.random() < 0.2:
        draft.parts += [_draft(rng, authorization).raw() for _ in range(rng.randint(1, 5))]
    raw = draft.raw()
    if rng.random() < 0.15:
        raw = raw[: rng.randrange(len(raw) + 1)]
    if rng.random() < 0.15:
        raw = _flipped(rng, raw)
    return raw


def _draft(rng: Random, authorization: bytes | None) -> Draft:
    is_stranger = authorization is None
    token = rng.choice(_TOKENS) if is_stranger else authorization
    lines = [] if token is None else [b"Authorization: " + token]
    if rng.random() < 0.3:
        method = b"GET" if (path := rng.choice(READ_ONLY)) == b"/HEAD" else b"POST"
        return Draft(method, path, lines)
    path, body = rng.choice(list(_VALID.items()))
    if not is_stranger:
        body = _malformed(rng, body)
    return Draft(b"POST", path, lines, body)


def _malformed(rng: Random, body: bytes) -> bytes:
    """A body that no method takes."""
    kind = rng.random()
    if kind < 0.4:
        return body[: rng.randrange(1, len(body))]
    return rng.choice(_BODIES) if kind < 0.8 else b"\xc1" + rng.randbytes(rng.randrange(300))


def _flipped(rng: Random, raw: bytes) -> bytes:
    flipped = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        if flipped:
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return bytes(flipped)


def _one_of(name: str, values: Sequence[bytes]) -> Callable[[Random, Draft], None]:
    def change(rng: Random, draft: Draft) -> None:
        setattr(draft, name, rng.choice(values))

    return change


def _add_header(rng: Random, draft: Draft) -> None:
    draft.lines.insert(rng.randrange(len(draft.lines) + 1), rng.choice(_HEADERS))


def _chunk(rng: Random, draft: Draft) -> None:
    draft.length, draft.body = b"Transfer-Encoding: chunked", rng.choice(_CHUNKS)


def _chunk_well(rng: Random, draft: Draft) -> None:
    draft.length = b"Transfer-Encoding: chunked"
    draft.body = (
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(draft.body), draft.body) if draft.body else b"0\r\n\r\n"
    )


_CHANGES = (
    _one_of("method", _METHODS),
    _one_of("path", _PATHS),
    _one_of("version", _VERSIONS),
    _one_of("length", _LENGTHS),
    _one_of("end", (b"\n", b"\r", b"\n\r")),
    _one_of("body", _BODIES),
    _add_header,
    _add_header,
    _chunk,
    _chunk_well,
)
