"""The addresses that a page may be read from: the public internet, by name or by plain IP address.

A name is resolved once, every address of it is checked, and the connection goes to one of those
very addresses, so that a name that changes its address a moment later (DNS rebinding) gains
nothing.
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

# Refused besides the networks that `ipaddress` calls private, reserved or multicast, which differ
# between releases of Python. Source: IANA, special-purpose registries.
_V4_REFUSED = tuple(
    IPv4Network(network)
    for network in ("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15")
)
_V6_PUBLIC = IPv6Network("2000::/3")
_V6_REFUSED = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Teredo, 6to4 and documentation; IPv4-mapped addresses and NAT64 are outside `_V6_PUBLIC`."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""A function of host and port that returns IP addresses in the order to try, or raises OSError."""


class Refused(ToolError):
    """The rules forbid this address."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of `[web_reader]`."""

    ports: tuple[int, ...] = (80, 443)
    allow_private: bool = False
    """Allow addresses outside the public internet too; the form of a URL is still checked."""

    def parse(self, url: str | httpx2.URL) -> httpx2.URL:
        """Return the URL if its form is allowed, else raise Refused with the reason.

        Its addresses are checked at the time of the connection.
        """
        if len(str(url)) > MAX_URL:
            raise Refused(f"the URL has more than {MAX_URL} characters")
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise Refused(f"{str(url)[:200]!r} is no URL: {error}") from None
        label = repr(str(parsed)[:200])
        if parsed.scheme not in PORTS:
            raise Refused(f"{label}: only http:// and https:// are read")
        if parsed.userinfo:
            raise Refused("a URL with a user name or a password is not read")
        port = PORTS[parsed.scheme] if parsed.port is None else parsed.port
        if port not in self.ports:
            raise Refused(
                f"{label}: port {port} is not read, only {', '.join(map(str, self.ports))}"
            )
        self._check_host(parsed.raw_host.decode("ascii"), label)
        return parsed

    def _check_host(self, host: str, label: str) -> None:
        if ":" not in host and not _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
            if not _NAME.fullmatch(host):
                raise Refused(f"{label}: no host")
            return
        try:
            address = ip_address(host)
        except ValueError:  # such as 127.1, 0x7f000001, 2130706433, which resolvers take for IPv4
            raise Refused(f"{label}: {host!r} is no IP address in its usual form") from None
        self.check_address(address)

    def check_address(self, address: IPv4Address | IPv6Address, host: str = "") -> None:
        """Raise Refused when the address is not on the public internet, unless that is allowed."""
        if not (self.allow_private or is_public(address)):
            raise Refused(
                f"{host + ' is at ' if host else ''}{address}, which is not on the public "
                "internet, and is not read"
            )


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether packets to the address leave for one host of the public internet."""
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
    """Connects to addresses that pass the rules; TLS still names and checks the host of the URL."""

    def __init__(
        self, rules: Rules, resolve: Resolve, network: httpcore2.AsyncNetworkBackend
    ) -> None:
        self._rules = rules
        self._resolve = resolve
        self._network = network

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
    """The system's resolver on threads of its own; a name server that hangs holds only one."""

    def __init__(self, num_threads: int = 4) -> None:
        self._threads = BlockingPool(num_threads, "resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        # As bytes: of a name that is no text of IDNA, such as a..b, Python raises no OSError.
        infos = await self._threads.run(
            lambda: socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in infos))

    def close(self) -> None:
        self._threads.close()
