"""Answers that no server should give: bodies, values and what is composed of them."""

from __future__ import annotations

import gzip
import random
import zlib

from tests.attacks import raw_server as raw
from tests.attacks.raw_server import forever, head, whole

CHUNKED = "Transfer-Encoding: chunked"
BOMB = raw.zeros(64)
SMALL_BOMB = raw.zeros(16)
BODIES = {
    "a body without end": forever(head(), b"word " * 10_000),
    "a body of a byte now and then": forever(head(), b"<", 0.05),
    "an announced gigabyte": forever(head("Content-Length: 1000000000"), b"x" * 65536),
    "chunks without end": forever(head(CHUNKED), b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "chunks of a byte": forever(head(CHUNKED), b"1\r\nx\r\n" * 5000),
    "the size of a chunk, digit by digit": forever(head(CHUNKED), b"0" * 4096),
    "an extension of a chunk without end": forever(head(CHUNKED) + b"1;", b"x" * 65536),
    "a chunk of 16^300 bytes": forever(head(CHUNKED) + b"f" * 300 + b"\r\n", b"x" * 65536),
    "trailers without end": forever(head(CHUNKED) + b"0\r\n", b"X-T: y\r\n" * 1000),
    "headers without end": forever(b"HTTP/1.1 200 OK\r\n", b"X-H: y\r\n" * 1000),
    "a header without end": forever(b"HTTP/1.1 200 OK\r\nX-H: ", b"y" * 65536),
    "a header of a byte now and then": forever(b"HTTP/1.1 200 OK\r\nX-H: ", b"y", 0.05),
    "a status line without end": forever(b"HTTP/1.1 200 ", b"y" * 65536),
    "to be continued": forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "early hints": forever(b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 1000),
    "silence": forever(b"", 0.1),
    "nothing": lambda: (),
    "another protocol": lambda: (b"SSH-2.0-OpenSSH_9.6\r\n",),
    "another version": whole(b"x"),
    "a switch of protocols": lambda: (head("Upgrade: x", status="101 Switching Protocols"),),
    "a length that lies, too long": lambda: (head("Content-Length: 1000"), b"{}"),
    "a length that lies, too short": lambda: (head("Content-Length: 1"), b"{}" * 1000),
    "a negative length": lambda: (head("Content-Length: -5"), b"{}"),
    "a length of many digits": lambda: (head("Content-Length: " + "9" * 5000), b"{}"),
    "two lengths": lambda: (head("Content-Length: 2", "Content-Length: 3"), b"{}"),
    "a length and chunks": lambda: (head("Content-Length: 2", CHUNKED), b"2\r\n{}\r\n0\r\n\r\n"),
    "control characters": whole(bytes(range(256)) * 100, "X-\x01: \x1b[31m"),
    "control characters in a reason": whole(b"\x1b[2J\x9b31m", status="500 \x1b[31mred"),
    "a charset that is none": whole(b"{}", kind="text/html; charset*=idna'';charset*1=;;"),
    "cookies": whole(b"{}", *(f"Set-Cookie: a{n}={'x' * 400}" for n in range(100))),
    "a redirect to itself": whole(b"", "Location: /", status="302 Found"),
    "a redirect to a file": whole(b"", "Location: file:///etc/passwd", status="302 Found"),
    "a redirect of 60 KB": whole(b"", "Location: /" + "x" * 60_000, status="302 Found"),
    "a long wait": whole(b"{}", "Retry-After: " + "9" * 300, status="503 Busy"),
    "a wait that is no time": whole(b"{}", "Retry-After: Fri, 99 Zzz", status="503 Busy"),
    "a gzip bomb": whole(BOMB, "Content-Encoding: gzip"),
    "a gzip bomb in small pieces": lambda: (
        head("Content-Encoding: gzip"),
        *(BOMB[start : start + 1000] for start in range(0, len(BOMB), 1000)),
    ),
    "a deflate bomb": whole(raw.zeros(64, 15), "Content-Encoding: deflate"),
    "a raw deflate bomb": whole(raw.zeros(64, -15), "Content-Encoding: deflate"),
    "a bomb under another name": whole(BOMB, "Content-Encoding: X-GZIP "),
    "a bomb of brotli": whole(b"\xcf" * 5000, "Content-Encoding: br"),
    "a bomb of zstd": whole(b"\x28\xb5\x2f\xfd" * 5000, "Content-Encoding: zstd"),
    "a bomb in a bomb": whole(gzip.compress(BOMB), "Content-Encoding: gzip, gzip"),
    "a bomb in five bombs": whole(BOMB, "Content-Encoding: " + ", ".join(["gzip"] * 5)),
    "a bomb in a thousand bombs": whole(BOMB, "Content-Encoding: " + ",".join(["gzip"] * 1000)),
    "a bomb of two headers": whole(BOMB, "Content-Encoding: gzip", "Content-Encoding: deflate"),
    "gzip that is nothing, without end": forever(
        head("Content-Encoding: gzip") + raw.GZIP_HEAD, raw.EMPTY_BLOCK * 10_000
    ),
    "100 MB of nothing in gzip": whole(raw.nothings(1), "Content-Encoding: gzip"),
    "100 MB of nothing in gzip twice": whole(raw.nothings(2), "Content-Encoding: gzip, gzip"),
    "gzip and something else without end": forever(
        head("Content-Encoding: gzip") + gzip.compress(b"{}"), b"y" * 65536
    ),
    "gzip with a name without end": forever(
        head("Content-Encoding: gzip") + b"\x1f\x8b\x08\x08\0\0\0\0\0\xff", b"y" * 65536
    ),
    "gzip cut off": whole(SMALL_BOMB[:-9], "Content-Encoding: gzip"),
    "gzip of garbage": whole(b"\x1f\x8b" + b"\xff" * 999, "Content-Encoding: gzip"),
}


# ---- values

HUGE = "9" * 4000
KEYS = ",".join(f'"k{n}":0' for n in range(20_000))
VALUES = (
    *("", "null", "true", "0", '"x"', "[]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "-0.0"),
    *(HUGE, "9" * 5000, "1." + HUGE, "[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900),
    *('{"a":' * 900 + "1" + "}" * 900, f"{{{KEYS}}}", "[" + "{}," * 30_000 + "{}]"),
    *("[" + "[]," * 30_000 + "[]]", '{"a":1,"a":2}', '"\\ud800"', '"\x1b"', "\ufeff{}", "{} {}"),
)
_REPLY = '{"choices": [{"message": {"content": "x"}}], "usage": %s}'
FIELDS = {
    "search": ['{"organic": %s}', '{"organic": [%s]}', '{"organic": [{"link": %s, "title": %s}]}'],
    "wiki": [
        '{"query": {"pages": %s}}',
        '{"query": {"pages": [%s]}}',
        '{"query": {"pages": [{"title": "t", "index": %s, "extract": %s}]}}',
        '{"query": {"pages": [{"title": %s, "fullurl": %s}]}}',
        '{"error": {"info": %s}}',
    ],
    "embeddings": [
        '{"data": %s}',
        '{"data": [{"index": %s, "embedding": [1]}]}',
        '{"data": [{"index": 0, "embedding": [%s]}, {"index": 1, "embedding": [%s]}]}',
        '{"data": [{"index": 0, "embedding": %s}, {"index": 1, "embedding": [1]}]}',
    ],
    "model": [
        '{"choices": %s}',
        '{"choices": [{"message": %s}]}',
        '{"choices": [{"message": {"content": %s}}]}',
        _REPLY,
        _REPLY.replace("%s", '{"prompt_tokens": %s, "completion_tokens": %s}'),
    ],
}
"""Forms of answers, with places for a value."""


# ---- composed


def composed(rng: random.Random) -> raw.Pieces:
    """An answer of hostile parts; it ends."""
    body = rng.choice((_json, _json, _noise))(rng)
    headers = [rng.choice(_HEADERS) for _ in range(rng.randint(0, 4))]
    encoding = rng.choice(
        ("", "", "", "gzip", "deflate", "gzip, deflate", "identity", "br", "\xe9")
    )
    if encoding:
        headers.append(f"Content-Encoding: {encoding}")
        body = rng.choice((gzip.compress, zlib.compress, bytes))(body)
    if rng.random() < 0.7:
        headers.append(f"Content-Length: {len(body) + rng.choice((0, 0, 0, 1, -1, 10**6, 10**20))}")
    else:
        headers.append(CHUNKED)
        size = rng.choice((b"%x" % len(body), b"%x" % (len(body) + 3), b"zz", b"-1", b"%x;a=b" % 5))
        body = size + b"\r\n" + body + rng.choice((b"\r\n0\r\n\r\n", b"\r\n0\r\nX: y\r\n\r\n", b""))
    status = rng.choice(
        ("200 OK", "200 OK", "200 OK", "302 Found", "404 x", "401 x", "503 x", "999 x")
    )
    kind = rng.choice(("text/html", "application/json", "text/plain; charset*0*=x''%ff", "", "a/b"))
    data = head(*headers, status=status, kind=kind) + body
    for _ in range(rng.choice((0, 0, 0, 1, 5))):
        place = rng.randrange(len(data))
        data = data[:place] + rng.randbytes(rng.randint(0, 3)) + data[place + rng.randint(0, 3) :]
    cut = rng.choice((len(data), len(data), rng.randrange(len(data) + 1)))
    middle = rng.randrange(cut + 1)
    return lambda: (data[:middle], data[middle:cut])


_HEADERS = (
    *(
        "Location: /",
        "Location: //[::1",
        "Location: http://127.0.0.1:22/",
        "Location: \x1b]0;x\x07",
    ),
    *("Retry-After: 1e999", "Retry-After: -1", "Retry-After: nan", "Retry-After: Mon, 99 Foo 0000"),
    *(
        "Set-Cookie: a=b; Max-Age=9999999999999999999",
        "Set-Cookie: =",
        "Connection: upgrade, close",
    ),
    *("Content-Type: text/html", "Content-Length: 5", CHUNKED, "Trailer: X", "X" * 5000 + ": y"),
    *("Upgrade: h2c", "Keep-Alive: timeout=99999999999", "X-\xff: \xfe", "Expect: 100-continue"),
)


def _json(rng: random.Random) -> bytes:
    form = rng.choice([form for forms in FIELDS.values() for form in forms])
    values = [value for value in VALUES if len(value) < 5000]
    while "%s" in form:
        form = form.replace("%s", rng.choice((*values, '{"x": %s}', "[%s, %s]", '"x"', "1")), 1)
    return form.encode(errors="surrogatepass")


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 100, 10_000)))
