"""Extracts the main text of a page; a text that `extract.py` runs in the sandbox."""

from __future__ import annotations

import contextlib
import sys

import trafilatura


def write(page: bytes, content_type: str, charset: str, max_chars: int) -> None:
    """Write the text to stdout, nothing when there is none."""
    sys.stdout.write(main_text(page, content_type, charset)[:max_chars])


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
