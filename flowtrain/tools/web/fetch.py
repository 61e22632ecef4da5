"""Read one page with bounds on redirects, time, and bytes before and after decompression."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import httpcore2
import httpx2

from flowtrain import __version__
from flowtrain.tools.base import ToolError
from flowtrain.tools.web.addresses import MAX_URL, Checked, Refused, Resolve, Rules
from flowtrain.utils.net.bodies import ACCEPT_ENCODING, BadBody, TooLong, read_body

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 32
READABLE = ("text/html", "application/xhtml+xml", "text/plain")
_REDIRECTS = (301, 302, 303, 307, 308)
_CONNECT_S = 5.0
"""Seconds per address; then the next address of the host is tried."""
_CHARSET = re.compile(r"""\bcharset\s*=\s*["']?([^\s"';]+)""", re.IGNORECASE)
_HEADERS = (
    ("User-Agent", f"Mozilla/5.0 (compatible; flowtrain/{__version__})"),
    ("Accept", "text/html, application/xhtml+xml, text/plain;q=0.8"),
    ("Accept-Encoding", ACCEPT_ENCODING),
)


@dataclass(frozen=True, slots=True)
class Page:
    """A page, decompressed."""

    url: str
    """URL after redirects."""
    content_type: str
    """Content type, one of READABLE."""
    charset: str
    """Charset of the header, or ""."""
    body: bytes


class Fetcher:
    """Asks the web directly, because behind a proxy nobody could check the address."""

    def __init__(
        self,
        rules: Rules,
        resolve: Resolve,
        max_bytes: int,
        network: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        """Let `network` make the connections that pass the rules."""
        self._rules = rules
        self._max_bytes = max_bytes
        checked = Checked(rules, resolve, network or httpcore2.AnyIOBackend())
        # Nothing is kept alive: the next page is usually on another host.
        self._pool = httpcore2.AsyncConnectionPool(
            httpcore2.default_ssl_context(),
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=0,
            network_backend=checked,
        )

    async def fetch(self, url: str, deadline_s: float) -> Page:
        """Return the page at the URL; raises ToolError, with the reason, by the deadline."""
        target = self._rules.parse(url)
        try:
            async with asyncio.timeout(deadline_s):
                for _ in range(MAX_REDIRECTS + 1):
                    page = await self._ask(target)
                    if isinstance(page, Page):
                        return page
                    target = page
        except TimeoutError:
            raise ToolError(
                f"{target.host} did not deliver the page within {deadline_s:g} s"
            ) from None
        except (
            httpcore2.NetworkError,
            httpcore2.TimeoutException,
            httpcore2.ProtocolError,
        ) as error:
            raise ToolError(
                f"{target.host} cannot be read: {type(error).__name__}: {str(error)[:200]}"
            ) from None
        raise Refused(f"more than {MAX_REDIRECTS} redirects, the last to {str(target)[:200]!r}")

    async def _ask(self, url: httpx2.URL) -> Page | httpx2.URL:
        """Return the page, or the URL that it redirects to."""
        # Made of the checked parts, so that no second parser reads the URL in another way.
        target = httpcore2.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        headers = [("Host", url.netloc.decode("ascii")), *_HEADERS]
        async with self._pool.stream(
            "GET", target, headers=headers, extensions={"timeout": {"connect": _CONNECT_S}}
        ) as response:
            answer = httpx2.Headers(response.headers)
            if response.status in _REDIRECTS and "location" in answer:
                return self._next(url, answer["location"])
            if response.status != 200:
                raise ToolError(f"{url.host} answered HTTP {response.status}")
            kind, charset = _content_type(answer.get("content-type", ""))
            if kind not in READABLE:
                raise ToolError(
                    f"{url.host} sent {kind or 'no content type'}; only {', '.join(READABLE)} can "
                    "be read"
                )
            length = answer.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > self._max_bytes:
                raise self._too_long(url)
            try:
                body = await read_body(
                    response.aiter_stream(), answer.get("content-encoding", ""), self._max_bytes
                )
            except TooLong:
                raise self._too_long(url) from None
            except BadBody as error:
                raise ToolError(f"{url.host} sent {error}") from None
            return Page(str(url), kind, charset, body)

    def _next(self, url: httpx2.URL, location: str) -> httpx2.URL:
        try:
            return self._rules.parse(url.join(location[: MAX_URL + 1]))
        except httpx2.InvalidURL as error:
            raise Refused(f"{url.host} redirects to what is no URL: {error}") from None

    def _too_long(self, url: httpx2.URL) -> ToolError:
        return ToolError(
            f"the page at {url.host} is longer than {self._max_bytes} bytes, which is not read"
        )


def _content_type(header: str) -> tuple[str, str]:
    """Return (type, charset), in lower case; "" for a missing one."""
    kind, _, parameters = header[:200].partition(";")
    charset = _CHARSET.search(parameters)
    return kind.strip().lower() if "/" in kind else "", charset[1].lower() if charset else ""
