"""Pages of a hostile web: redirects, length, time, and what they leave behind."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import tracemalloc
import zlib
from pathlib import Path

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st
from web_servers import (
    PUBLIC,
    Answer,
    Internet,
    Server,
    check_cancelled,
    drip,
    endless,
    hang_up,
    html,
    redirect,
    serving,
    silent,
    status,
)

from flowtrain.tools import ToolError
from flowtrain.tools.web.addresses import Refused, Rules
from flowtrain.tools.web.fetch import Fetcher, Page, _content_type

MAX_BYTES = 100_000


def fetcher(internet: Internet, max_bytes: int = MAX_BYTES, **rules: object) -> Fetcher:
    return Fetcher(Rules(**rules), internet.resolve, max_bytes, internet)


def site(server: Server, **names: str) -> Internet:
    """The public name site.example leads to the server; `names`: what others resolve to."""
    return Internet(
        {"site.example": [[PUBLIC]], **{name: [[address]] for name, address in names.items()}},
        {PUBLIC: server},
    )


def fetch(
    *answers: Answer,
    url: str = "http://site.example/start",
    deadline_s: float = 10.0,
    max_bytes: int = MAX_BYTES,
) -> Page:
    with serving(*answers) as server:
        return asyncio.run(fetcher(site(server), max_bytes).fetch(url, deadline_s))


def problem(*answers: Answer, deadline_s: float = 10.0) -> str:
    with pytest.raises(ToolError) as caught:
        fetch(*answers, deadline_s=deadline_s)
    return str(caught.value)


# ---- what works


def test_a_page_comes_with_its_type_charset_and_address() -> None:
    page = fetch(html(b"<p>caf\xe9", Content_Type='Text/HTML; charset="ISO-8859-1"'))
    assert page == Page("http://site.example/start", "text/html", "iso-8859-1", b"<p>caf\xe9")


def test_the_request_names_the_host_and_what_can_be_read() -> None:
    with serving(html("x")) as server:
        asyncio.run(fetcher(site(server)).fetch("http://Site.example/a%20b?c=d#e", 10.0))
    request = server.seen[0]
    assert (request.path, request.headers["Host"]) == ("/a%20b?c=d", "site.example")
    assert "text/html" in request.headers["Accept"]
    assert request.headers["User-Agent"].startswith("Mozilla/5.0 (compatible; flowtrain/")


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_compressed_pages_are_unpacked(encoding: str, pack: type[bytes]) -> None:
    body = b"<p>" + b"word " * 1000
    assert fetch(html(pack(body), Content_Encoding=encoding)).body == body


def test_redirects_are_followed_and_the_last_address_is_told() -> None:
    page = fetch(
        redirect("/b?x=1", 301),
        redirect("http://site.example/c#part", 308),
        redirect("d"),
        html("there"),
    )
    assert (page.url, page.body) == ("http://site.example/d", b"there")


def test_tls_names_and_checks_the_host_of_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to an IP address, and yet the certificate must be that of the name."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("site.example").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    asked: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    with serving(html("secret"), ssl_context=context) as server:
        internet = site(server, **{"other.example": PUBLIC})
        assert asyncio.run(fetcher(internet).fetch("https://site.example/", 10.0)).body == b"secret"
        told = r"other\.example cannot be read: ConnectError.*certificate"
        with pytest.raises(ToolError, match=told):
            asyncio.run(fetcher(internet).fetch("https://other.example/", 10.0))
    assert asked == ["site.example", "other.example"]
    assert internet.connected == [f"{PUBLIC}:443"] * 2


# ---- where redirects may not lead


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://127.0.0.1/", "127.0.0.1, which is not on the public internet"),
        ("http://inside.example/", "inside.example is at 10.0.0.7, which is not"),
        ("http://site.example:8080/", "port 8080"),
        ("file:///etc/passwd", "only http"),
        ("/" + "x" * 60_000, "more than 2000 characters"),
        ("http://site.example:port/", "redirects to what is no URL"),
    ],
)
def test_every_redirect_is_checked(location: str, reason: str) -> None:
    with serving(redirect(location), html("secret")) as server:
        internet = site(server, **{"inside.example": "10.0.0.7"})
        with pytest.raises(Refused, match=reason):
            asyncio.run(fetcher(internet).fetch("http://site.example/", 10.0))
    assert internet.connected == [f"{PUBLIC}:80"] and len(server.seen) == 1


def test_redirects_end() -> None:
    with (
        serving(redirect("/again")) as server,
        pytest.raises(
            Refused, match=r"more than 5 redirects, the last to 'http://site\.example/again'"
        ),
    ):
        asyncio.run(fetcher(site(server)).fetch("http://site.example/", 10.0))
    assert len(server.seen) == 6


def test_private_addresses_may_be_allowed() -> None:
    with serving(html("intranet")) as server:
        internet = Internet({}, {"10.0.0.7": server})
        page = asyncio.run(
            fetcher(internet, allow_private=True, ports=(8080,)).fetch(
                "http://10.0.0.7:8080/", 10.0
            )
        )
    assert page.body == b"intranet" and server.seen[0].headers["Host"] == "10.0.0.7:8080"


# ---- what is sent back


@pytest.mark.parametrize(
    "kind",
    [
        *("application/pdf", "image/png", "application/octet-stream", "text/css"),
        *("application/json", "html"),
    ],
)
def test_other_content_types_are_refused_by_name(kind: str) -> None:
    shown = kind if "/" in kind else "no content type"
    found = problem(html("x", Content_Type=kind))
    assert found == (
        f"site.example sent {shown}; only text/html, application/xhtml+xml, text/plain can be read"
    )


@given(
    st.text(alphabet=st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=40),
    st.sampled_from(["", "text/html; charset="]),
)
@settings(max_examples=300)
def test_any_content_type_has_a_type_and_a_charset(header: str, start: str) -> None:
    kind, charset = _content_type(start + header)
    assert isinstance(kind, str) and not any(character.isspace() for character in charset)


def test_a_page_without_content_type_is_refused() -> None:
    assert "no content type" in problem(html("x", Content_Type=None))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(404, "gone"), "site.example answered HTTP 404"),
        (status(500), "site.example answered HTTP 500"),
        (status(204), "site.example answered HTTP 204"),
        (status(302), "site.example answered HTTP 302"),
        (html(b"not gzip", Content_Encoding="gzip"), "cannot be decompressed"),
        (html(b"x", Content_Encoding="br"), "the encoding 'br', which was not asked for"),
        (hang_up, "site.example cannot be read: RemoteProtocolError"),
        (html("x", Content_Length=10), "site.example cannot be read: RemoteProtocolError"),
        (html("x", Content_Length="9" * 5000), "site.example cannot be read: RemoteProtocolError"),
        (
            lambda handler: handler.wfile.write(b"garbage\r\n\r\n"),
            "site.example cannot be read: RemoteProtocolError",
        ),
        (
            html("x", **{f"H{n}": "x" * 8000 for n in range(30)}),
            "site.example cannot be read: RemoteProtocolError",
        ),
    ],
)
def test_other_answers_are_errors_that_say_what_came(answer: Answer, reason: str) -> None:
    assert reason in problem(answer)


def test_nobody_listens() -> None:
    reader = fetcher(Internet({"site.example": [[PUBLIC]]}, {}))
    with pytest.raises(ToolError, match=r"site\.example cannot be read: ConnectError"):
        asyncio.run(reader.fetch("http://site.example/", 10.0))


# ---- bodies without end


def test_the_limit_is_the_limit() -> None:
    assert len(fetch(html(b"x" * MAX_BYTES)).body) == MAX_BYTES
    found = len(fetch(html(gzip.compress(b"x" * MAX_BYTES), Content_Encoding="gzip")).body)
    assert found == MAX_BYTES
    for answer in (
        html(b"x" * (MAX_BYTES + 1)),
        html(gzip.compress(b"x" * (MAX_BYTES + 1)), Content_Encoding="gzip"),
        endless,
    ):
        expected = f"the page at site.example is longer than {MAX_BYTES} bytes, which is not read"
        assert problem(answer) == expected


def test_an_announced_length_is_enough_to_refuse() -> None:
    def announce(handler: object) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", str(10**12))
        handler.end_headers()
        silent(handler)

    assert "longer than" in problem(announce)


def test_a_bomb_is_refused_before_it_unfolds() -> None:
    """128 MiB in 128 KiB, which comes in two or three pieces: memory must stay where it was."""
    bomb = gzip.compress(bytes(128 << 20), 9)
    with serving(html(bomb, Content_Encoding="gzip")) as server:
        tracemalloc.start()
        try:
            with pytest.raises(ToolError, match="longer than 1000000 bytes"):
                asyncio.run(fetcher(site(server), 1_000_000).fetch("http://site.example/", 20.0))
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()


# ---- time, and what is left behind


@pytest.mark.parametrize(
    "answer",
    [
        silent,
        drip,
        lambda handler: redirect("/next")(handler) if handler.path == "/start" else drip(handler),
    ],
)
def test_the_deadline_holds_for_the_whole(answer: Answer) -> None:
    assert problem(answer, deadline_s=0.3) == "site.example did not deliver the page within 0.3 s"


def test_a_resolver_that_hangs_costs_no_more_than_the_deadline() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(ToolError, match=r"did not deliver the page within 0\.2 s"):
        asyncio.run(
            Fetcher(Rules(), never, MAX_BYTES, Internet({}, {})).fetch("http://site.example/", 0.2)
        )


def test_a_cancelled_read_closes_its_connection() -> None:
    check_cancelled(lambda server: fetcher(site(server)).fetch("http://site.example/", 60.0))


def test_many_pages_at_once() -> None:
    async def many(reader: Fetcher) -> list[Page]:
        asked = (reader.fetch(f"http://site.example/{n}", 20.0) for n in range(60))
        return await asyncio.gather(*asked)

    with serving(lambda handler: html(handler.path)(handler)) as server:
        found = [page.body.decode() for page in asyncio.run(many(fetcher(site(server))))]
        assert found == [f"/{n}" for n in range(60)]
