"""The main text of pages, and that no page keeps its process for long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from flowtrain.tools import ToolError
from flowtrain.tools.web.extract import Extractor
from flowtrain.tools.web.extract_child import decoded
from flowtrain.tools.web.fetch import Page

SENTENCE = (
    "The Niger flows through Mali, and the town of Bamako lies upon its banks, as people have "
    "known for long."
)
MENU = "<nav>" + "".join(f'<a href="/{n}">Section {n}</a> ' for n in range(40)) + "</nav>"


@pytest.fixture(scope="module")
def extractor() -> Iterator[Extractor]:
    extractor = Extractor(timeout_s=20.0)
    yield extractor
    extractor.close()


def text_of(extractor: Extractor, page: Page) -> str:
    return asyncio.run(extractor.text(page))


def page(body: str | bytes, charset: str = "", content_type: str = "text/html") -> Page:
    return Page(
        "http://site.example/",
        content_type,
        charset,
        body.encode() if isinstance(body, str) else body,
    )


WORDS = "Das Caf\u00e9 am Platz \u201eAltmarkt\u201c \u2013 seit 1823"


@pytest.mark.parametrize(
    ("body", "charset"),
    [
        (WORDS.encode() + b" \xff", "utf-8"),
        (WORDS.encode() + b" \xff", ""),
        (WORDS.encode()[:-4] + b"1823\xe2\x80", "utf-8"),
        (WORDS.encode("cp1252"), "iso-8859-1"),
        (WORDS.encode("cp1252"), "latin1"),
        (WORDS.encode("cp1252"), "us-ascii"),
        (
            b'<meta http-equiv="x" content="text/html; charset=ISO-8859-1">'
            + WORDS.encode("cp1252"),
            "",
        ),
        (b'<meta charset="utf-8">' + WORDS.encode(), ""),
        (b"\xef\xbb\xbf" + WORDS.encode(), "iso-8859-1"),
        (WORDS.encode("utf-16"), "utf-8"),
    ],
)
@pytest.mark.parametrize("content_type", ["text/html", "text/plain"])
def test_a_page_is_read_in_its_own_charset(
    extractor: Extractor, body: bytes, charset: str, content_type: str
) -> None:
    text = text_of(extractor, page(body, charset, content_type))
    assert WORDS in text and len(text) < len(WORDS) + 80


def test_the_labels_of_browsers_are_read() -> None:
    for label, encoding in (("gb2312", "gb18030"), ("shift_jis", "cp932"), ("euc-kr", "cp949")):
        text = {"gb2312": "\u9555\u57fa", "shift_jis": "\u2460\u30c6", "euc-kr": "\ub620\ud55c"}[
            label
        ]
        assert decoded(text.encode(encoding), label) == text
    russian = "\u0414\u043e\u043c \u043d\u0430 \u043f\u043b\u043e\u0449\u0430\u0434\u0438".encode(
        "cp1251"
    )
    assert decoded(russian, "utf-8") == decoded(russian, "no-such") == russian, "to be guessed"


def test_of_a_short_page_the_menu_goes_too(extractor: Extractor) -> None:
    items = "".join(f"<li><a href='/{number}'>Section {number}</a></li>" for number in range(30))
    menu = f"<nav><ul>{items}</ul></nav>"
    text = text_of(extractor, page(f"<html><body>{menu}<p>The Niger rises here.</p></body></html>"))
    assert text.strip() == "The Niger rises here."
    assert "Section" in text_of(extractor, page(f"<html><body>{menu}</body></html>"))


def test_the_article_stays_and_what_is_around_it_goes(extractor: Extractor) -> None:
    paragraphs = "".join(f"<p>{n}. {SENTENCE}</p>" for n in range(10))
    article = (
        f"<article><h1>Niger River</h1>{paragraphs}<table><tr><td>Length</td><td>4180 "
        "km</td></tr></table></article>"
    )
    text = text_of(
        extractor,
        page(
            f"<html><body>{MENU}{article}<footer>Imprint</footer><script>alert(1)</script></body></html>"
        ),
    )
    assert all(f"{n}. {SENTENCE}" in text for n in range(10))
    assert "Niger River" in text
    assert "4180 km" in text
    assert not any(word in text for word in ("Section", "Imprint", "alert"))


@pytest.mark.parametrize(
    ("body", "charset"),
    [
        (
            "<html><body><p>Café à Bamako, où coule le fleuve.</p></body></html>".encode("latin-1"),
            "iso-8859-1",
        ),
        ("<html><body><p>Café à Bamako, où coule le fleuve.</p></body></html>".encode(), ""),
        (
            "<html><body><p>Café à Bamako, où coule le fleuve.</p></body></html>".encode(),
            "no-such-charset",
        ),
        (
            "<html><body><p>Café à Bamako, où coule le fleuve.</p></body></html>".encode(),
            "zlib_codec",
        ),
        (
            '<html><head><meta charset="latin-1"></head><body><p>Café à Bamako, où coule le '
            "fleuve.</p></body></html>".encode("latin-1"),
            "",
        ),
        ("<p>Café à Bamako, où coule le fleuve.".encode(), "utf-8"),
    ],
)
def test_the_charset_is_that_of_the_header_or_guessed(
    body: bytes, charset: str, extractor: Extractor
) -> None:
    assert "Café à Bamako, où coule le fleuve." in text_of(extractor, page(body, charset))


def test_plain_text_stays_as_it_is(extractor: Extractor) -> None:
    assert text_of(extractor, page("a <b>\n c", content_type="text/plain")) == "a <b>\n c"
    assert text_of(extractor, page(b"caf\xe9", "latin-1", "text/plain")) == "café"


@pytest.mark.parametrize(
    "body", ["", "<html></html>", "<html><body><script>x()</script></body></html>", b"\0" * 100]
)
def test_a_page_without_text_says_so(body: str | bytes, extractor: Extractor) -> None:
    with pytest.raises(ToolError, match="no text that can be read"):
        text_of(extractor, page(body))


def test_a_text_has_a_limit(extractor: Extractor) -> None:
    assert len(text_of(extractor, page("word " * 300_000, content_type="text/plain"))) == 1_000_000


# ---- hostile pages

MANY_ATTRIBUTES = (
    "<html><body><div "
    + " ".join(f"a{n}=b" for n in range(120_000))
    + f"><p>{SENTENCE}</p></div></body></html>"
)
"""A megabyte that keeps libxml2 busy for ten seconds and more."""


@pytest.mark.clock
def test_slow_page_is_killed_and_next_page_is_read() -> None:
    extractor = Extractor(timeout_s=1.5)
    with pytest.raises(ToolError, match=r"cannot be taken apart in 1\.5 s"):
        text_of(extractor, page(MANY_ATTRIBUTES))
    assert SENTENCE in text_of(extractor, page(f"<html><body><p>{SENTENCE}</p></body></html>"))
    extractor.close()


@pytest.mark.parametrize(
    "body",
    [
        *("<div>" * 100_000 + SENTENCE, "<b><i>" * 50_000 + SENTENCE),
        *("<table><tr>" * 20_000 + SENTENCE, "<p>" + "&amp;" * 100_000, "<" * 300_000),
        *("<!--" * 100_000, "<![CDATA[" * 50_000, "<a href='x'>" * 30_000 + SENTENCE),
        "\ufeff<?xml version='1.0' encoding='utf-16'?><html><body><p>" + SENTENCE,
        *("<svg><math>" * 20_000, "<select><option>" * 20_000),
    ],
)
def test_other_pages_that_no_person_writes_end(body: str, extractor: Extractor) -> None:
    with contextlib.suppress(ToolError):
        assert text_of(extractor, page(body)).strip()
    assert SENTENCE in text_of(extractor, page(f"<html><body><p>{SENTENCE}</p></body></html>"))


def test_a_process_that_dies_costs_one_page(extractor: Extractor) -> None:
    plain = page("x", content_type="text/plain")
    assert text_of(extractor, plain) == "x"
    server = extractor._sandbox._workers.idle[-1]
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait(10)
    assert text_of(extractor, plain) == "x"


def test_pages_at_once_and_closing() -> None:
    extractor = Extractor()

    async def many() -> list[str]:
        pages = (page(f"text {n}", content_type="text/plain") for n in range(20))
        return await asyncio.gather(*map(extractor.text, pages))

    assert asyncio.run(many()) == [f"text {n}" for n in range(20)]
    extractor.close()
    extractor.close()
    with pytest.raises(ToolError, match="closed"):
        text_of(extractor, page("late", content_type="text/plain"))
