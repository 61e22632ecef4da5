"""Which addresses a page may be read from: the public internet, by name or by plain IP address, and
nothing that only looks like it.

A name is resolved once, every address it stands for is checked, and the connection goes to one of
those very addresses: a name that means something else a moment later (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import httpcore2
import httpx2

from flowtrain.tools.base import ToolError
from flowtrain.tools.blocking import BlockingPool

PORTS = {"http": 80, "https": 443}
MAX_URL = 2000
"""Characters."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_NUMBER = re.compile(r"\d+|0[xX][0-9a-fA-F]*")

# Beside what `ipaddress` calls private, reserved or multicast, which differs between releases of
# Python. IANA, special-purpose registries.
_V4_REFUSED = tuple(
    map(
        IPv4Network,
        ("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"),
    )
)
_V6_PUBLIC = IPv6Network("2000::/3")
_V6_REFUSED = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Teredo, 6to4 and documentation; IPv4-mapped addresses and NAT64 lie outside `_V6_PUBLIC`."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to the IP addresses in the order to try them; OSError when there are none."""


class Refused(ToolError):
    """The rules do not let this address be asked."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What `[web_reader]` allows."""

    ports: tuple[int, ...] = (80, 443)
    allow_private: bool = False
    """Addresses outside the public internet too; the forms of a URL are checked all the same."""

    def parse(self, url: str | httpx2.URL) -> httpx2.URL:
        """The URL, if its form is allowed; raises Refused with the reason. What it resolves to is
        checked when it is connected to.
        """
        if len(str(url)) > MAX_URL:
            raise Refused(f"the URL has more than {MAX_URL} characters")
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise Refused(f"{str(url)[:200]!r} is no URL: {error}") from None
        shown = repr(str(parsed)[:200])
        if parsed.scheme not in PORTS:
            raise Refused(f"{shown}: only http:// and https:// are read")
        if parsed.userinfo:
            raise Refused("a URL with a user name or a password is not read")
        if (port := parsed.port or PORTS[parsed.scheme]) not in self.ports:
            raise Refused(
                f"{shown}: port {port} is not read, only {', '.join(map(str, self.ports))}"
            )
        self._check_host(parsed.raw_host.decode("ascii"), shown)
        return parsed

    def _check_host(self, host: str, shown: str) -> None:
        if ":" not in host and not _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
            if not _NAME.fullmatch(host):
                raise Refused(f"{shown}: no host")
            return
        try:
            address = ip_address(host)
        except (
            ValueError
        ):  # 127.1, 0x7f000001, 2130706433 and the like, which resolvers take for IPv4
            raise Refused(f"{shown}: {host!r} is no IP address in its usual form") from None
        self.check_address(address)

    def check_address(self, address: IPv4Address | IPv6Address, host: str = "") -> None:
        """Raises Refused when it is not on the public internet, unless that is allowed."""
        if not (self.allow_private or is_public(address)):
            raise Refused(
                f"{host + ' is at ' if host else ''}{address}, which is not on the public "
                "internet, and is not read"
            )


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether packets to the address leave for one host of the public internet."""
    if isinstance(address, IPv4Address):
        is_special = (
            address.is_private
            or address.is_reserved
            or address.is_multicast
            or not address.is_global
        )
        return not is_special and not any(address in network for network in _V4_REFUSED)
    return (
        address.scope_id is None
        and address in _V6_PUBLIC
        and not any(address in network for network in _V6_REFUSED)
    )


class Checked(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that have passed the rules. TLS still names, and checks, the host of
    the URL.
    """

    def __init__(
        self, rules: Rules, resolve: Resolve, network: httpcore2.AsyncNetworkBackend
    ) -> None:
        self._rules, self._resolve, self._network = rules, resolve, network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            addresses = [ip_address(text) for text in await self._resolve(host, port)]
        except OSError as error:
            raise httpcore2.ConnectError(f"no address known ({error.strerror or error})") from error
        for address in addresses:
            self._rules.check_address(address, host)
        failure: Exception = httpcore2.ConnectError("no address known")
        for address in addresses:
            try:
                return await self._network.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class Resolver:
    """The system's resolver on a few threads of its own: a name server that hangs holds one of
    them, and nobody else.
    """

    def __init__(self, num_threads: int = 4) -> None:
        self._threads = BlockingPool(num_threads, "resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        found = await self._threads.run(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def close(self) -> None:
        self._threads.close()
