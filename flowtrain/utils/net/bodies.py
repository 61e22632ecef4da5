"""Bodies of HTTP requests and answers, any of which may be hostile: they are read here under a
limit, decompressed in bounded pieces, and no cookie is kept.

httpx2 would decompress by itself, but undoes up to five compressions one in the other: a few
hundred bytes then keep its loop busy for hours without yielding a byte that a limit could count,
and bytes after the end of a compressed body pile up in memory unseen.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy

SLOWEST = 16 << 10
"""Bytes per second; what comes or is read slower counts as cut, so that no peer can hold another
for ever."""
ACCEPT_ENCODING = "gzip, deflate"
"""The encodings that `read_body` undoes, as a request header."""
_PLAIN = ("", "identity")
_COMPRESSED = ("gzip", "x-gzip", "deflate")


class BadBody(Exception):
    """A body that cannot be read; the message goes on from "the server sent"."""


class TooLong(BadBody):
    """A body longer than its limit."""


async def read_body(stream: AsyncIterator[bytes], encoding: str, max_bytes: int) -> bytes:
    """Return a body, decompressed if it is.

    Args:
        stream: the body as it comes over the wire.
        encoding: Content-Encoding, "" where there is none; only one compression is undone.
        max_bytes: the limit, both on the wire and after decompression.

    Raises:
        BadBody: another encoding, or damage.
        TooLong: more than `max_bytes`; little more than that is ever in memory.
    """
    encoding = encoding.strip().lower()
    if encoding not in _PLAIN + _COMPRESSED:
        raise BadBody(f"the encoding {encoding[:40]!r}, which was not asked for")
    # gzip and zlib, told apart by their headers
    inflate = zlib.decompressobj(wbits=47) if encoding in _COMPRESSED else None
    body = bytearray()
    num_received = 0
    async for chunk in stream:
        num_received += len(chunk)
        try:
            # At most one byte beyond the limit, however far a chunk would inflate.
            num_left = max_bytes - len(body) + 1
            body += chunk if inflate is None else inflate.decompress(chunk, num_left)
        except zlib.error as error:
            raise BadBody(f"a body that cannot be decompressed: {error}") from None
        if max(len(body), num_received) > max_bytes:
            raise TooLong(f"a body of more than {max_bytes} bytes: {shown(bytes(body[:200]))}")
        if inflate is not None and inflate.eof:  # what may follow is no part of the body
            break
    return bytes(body)


def shown(content: bytes) -> str:
    """Return the beginning of a body on one line, for an error."""
    text = " ".join(content[:400].decode(errors="replace").split())
    return repr(text[:200]) if text else "an empty body"


def no_cookies() -> CookieJar:
    """Return a jar that stays empty: a server could fill it, request by request, for ever."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))
