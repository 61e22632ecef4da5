"""The process behind `extract.py`: extracts the main text of page after page until its input ends.

It is a script for an interpreter of its own; nothing imports it. Each message is 4 bytes of
big-endian length and that many bytes:

    ->  content type, a space, charset of the HTTP header (may be empty), a line feed, the page
    <-  the text in UTF-8, empty when there is none (an empty one first, when the process is ready)

Some inputs keep a parser busy for minutes in C code that no exception reaches, such as a tag with
100,000 attributes. So the alarm clock ends this process by its default action when a page takes too
long, and memory is limited.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys

START_S = 30
"""A cold disk takes seconds to load the imports below."""
signal.alarm(START_S)

import trafilatura  # noqa: E402

MAX_CHARS = 1_000_000
"""Characters of the text, as many as AgentFlow reads."""


def main(timeout_s: float, memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main_text(b"<p>The first page takes longer than all others.</p>", "text/html", "")
    signal.alarm(0)
    send(b"")
    while header := sys.stdin.buffer.read(4):
        message = sys.stdin.buffer.read(int.from_bytes(header, "big"))
        kind, _, page = message.partition(b"\n")
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        text = main_text(page, *kind.decode("ascii").split(" ", 1))
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(text[:MAX_CHARS].encode("utf-8", "replace"))


def main_text(page: bytes, content_type: str, charset: str) -> str:
    """Return the text of a page without menus and comments; an unknown charset is guessed."""
    html: str | bytes = page
    with contextlib.suppress(LookupError, UnicodeError):
        html = page.decode(charset or "utf-8")
    if content_type == "text/plain":
        return html if isinstance(html, str) else html.decode(errors="replace")
    # The tag may be left out of HTML, but the extractor needs it.
    if "html" not in str(html[:200]).lower():
        html = "<html>" + html if isinstance(html, str) else b"<html>" + html
    # Of a short page trafilatura takes all there is, so what says that it is a menu goes before.
    # The second function is for pages without anything that looks like an article.
    return trafilatura.extract(
        html, include_comments=False, include_tables=True, prune_xpath=["//nav"]
    ) or trafilatura.html2txt(html)


def send(message: bytes) -> None:
    sys.stdout.buffer.write(len(message).to_bytes(4, "big") + message)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
