"""Addresses that lead inside: every connection of a reader goes to the public internet."""

from __future__ import annotations

import asyncio
import random
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from pathlib import Path

import pytest

from flowtrain.tools import ToolError
from flowtrain.tools.web.addresses import Resolver, Rules
from flowtrain.tools.web.fetch import Fetcher
from tests.attacks.tally import Tally
from tests.tools.web_servers import PUBLIC, Internet, Server, redirect, serving, status

SURFACE = "addresses"
NAMES = {
    "site.example": [[PUBLIC]],
    "localhost": [["127.0.0.1"]],
    "metadata.example": [["169.254.169.254"]],
    "both.example": [[PUBLIC, "10.0.0.7"]],
    "both6.example": [["2606:4700::1", "::1"]],
    "mapped.example": [["::ffff:192.168.0.1"]],
    "scoped.example": [["fe80::1%2"]],
    "late.example": [["127.0.0.1"], [PUBLIC]],
    "none.example": [[]],
}
"""What names resolve to, at first and later; any other name leads into the private network."""

_FILE = tomllib.loads((Path(__file__).parent / "addresses.toml").read_text())


def _all(table: Mapping[str, str | list[str]]) -> list[str]:
    return [
        each
        for texts in table.values()
        for each in (texts.split() if isinstance(texts, str) else texts)
    ]


HOSTS = _all(_FILE["hosts"])
URLS = [*_all(_FILE["urls"]), "http://" + "a" * 3000]
ATTACKS = (*URLS, *(f"{scheme}://{host}/" for host in HOSTS for scheme in ("http", "https")))


class Inside(Internet):
    """Names that it does not know lead into the private network."""

    async def resolve(self, host: str, port: int) -> list[str]:
        found = await super().resolve(host, port)
        return ["10.0.0.7"] if found == [host] and not _is_address(host) else found


def reached(urls: Sequence[str], server: Server | None = None) -> dict[str, list[str]]:
    """Return the connections that reading each URL makes, or each page of the server's that
    redirects to it. The reader's resolver takes every number for an address, as those of C do; the
    read itself ends in a ToolError, as nobody else is there.
    """
    internet = Inside({}, {PUBLIC: server} if server else {})

    async def resolve(host: str, port: int) -> list[str]:
        try:
            return [socket.inet_ntoa(socket.inet_aton(host))]
        except OSError:
            return await internet.resolve(host.rstrip(".").lower(), port)

    async def read_all() -> dict[str, list[str]]:
        fetcher = Fetcher(Rules(), resolve, 1000, internet)
        found = {}
        for url in urls:
            internet.names = {name: list(answers) for name, answers in NAMES.items()}
            internet.connected = []
            if server:
                server.answers = [redirect(url.encode().decode("latin-1")), redirect("/again")]
            with pytest.raises(ToolError):
                await fetcher.fetch("http://site.example/" if server else url, 10.0)
            found[url] = internet.connected
        return found

    return asyncio.run(read_all())


SENDABLE = [url for url in ATTACKS if url and not set(url) & set("\r\0")]
"""Those that a header can hold."""


def is_inside(connection: str) -> bool:
    """Whether a connection leaves the public internet or its two ports, by rules of its own."""
    host, _, port = connection.rpartition(":")
    address = ip_address(host)
    if isinstance(address, IPv6Address):
        in_it = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
        has_private = any(part is not None and not part.is_global for part in in_it)
        if has_private or address.scope_id or address in IPv6Network("64:ff9b::/96"):
            return True
    return not address.is_global or address.is_multicast or port not in ("80", "443")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def leading_inside(connections: Mapping[str, Sequence[str]]) -> list[str]:
    return [url for url, made in connections.items() if any(map(is_inside, made))]


def test_no_address_leads_inside(tally: Tally) -> None:
    through = leading_inside(reached(ATTACKS))
    tally.add(SURFACE, len(ATTACKS), len(through))
    assert through == []


def test_no_redirect_leads_inside(tally: Tally) -> None:
    with serving(status(500)) as server:
        through = leading_inside(reached(SENDABLE, server))
    tally.add(SURFACE, len(SENDABLE), len(through))
    assert through == []


@pytest.mark.parametrize("later", ["127.0.0.1", "169.254.169.254", "::1", "fd00::1"])
@pytest.mark.parametrize("num_public", [1, 2, 3])
def test_a_name_that_changes_its_mind_gains_nothing(
    later: str, num_public: int, tally: Tally
) -> None:
    """Rebinding: public for the first answers, private from then on, asked again by a redirect."""
    with serving(redirect("http://late.example/")) as server:
        names = {"late.example": [[PUBLIC]] * num_public + [[later]]}
        internet = Inside(names, {PUBLIC: server, later: server})
        fetcher = Fetcher(Rules(), internet.resolve, 1000, internet)
        with pytest.raises(ToolError, match="not on the public internet"):
            asyncio.run(fetcher.fetch("http://late.example/", 10.0))
    through = [where for where in internet.connected if where != f"{PUBLIC}:80"]
    tally.add(SURFACE, 1, len(through))
    assert through == [] and internet.asked == ["late.example"] * (num_public + 1)


@pytest.mark.parametrize("name", ["a..b", ".", "a" * 64 + ".example", "x" * 253])
def test_what_is_no_name_is_one_that_is_not_found(name: str) -> None:
    """The system's resolver is not asked over the network for what cannot be a name."""
    resolver = Resolver()
    try:
        with pytest.raises(OSError):
            asyncio.run(resolver(name, 80))
    finally:
        resolver.close()


# ---- composed


def composed(rng: random.Random) -> str:
    """A URL around an address that may be public or not, in any notation."""
    host = rng.choice((_v4, _v6, _name))(rng)
    scheme = rng.choice(("http", "https", "HTTP", "http", "https", "file", "gopher", "http:", ""))
    user = rng.choice(
        ("", "", "", "u@", "u:p@", "@", ":@", "site.example\\@", "%40", "site.example#@")
    )
    port = rng.choice(("", "", "", ":80", ":443", ":0", ":22", ":", ":080", ":\uff18\uff10"))
    path = rng.choice(("/", "", "/x?y#z", "?@site.example", "#@site.example", "\\..\\", "/%00"))
    return f"{scheme}://{user}{host}{port}{path}"


def _v4(rng: random.Random) -> str:
    value = rng.choice((rng.getrandbits(32), 0x7F000001, 0xA9FEA9FE, 0x0A000001, 0x64400001))
    parts = list(value.to_bytes(4, "big"))
    num = rng.randint(1, 4)
    parts = [*parts[: num - 1], int.from_bytes(bytes(parts[num - 1 :]), "big")]
    form = rng.choice(("{}", "{}", "0x{:x}", "0{:o}", "0X{:08X}", "{:012d}"))
    text = rng.choice((".", ".", ".", "。", "\uff0e", "%2e")).join(
        form.format(part) for part in parts
    )
    return text + rng.choice(("", "", ".", "%00"))


def _v6(rng: random.Random) -> str:
    low = int(IPv4Address(rng.choice((0x7F000001, 0xA9FEA9FE, rng.getrandbits(32)))))
    value = rng.choice(
        (
            rng.getrandbits(128),
            low,
            0xFFFF << 32 | low,
            0x64FF9B << 96 | low,
            0x2002 << 112 | low << 80,
            0x20010000 << 96 | low << 64,
            0xFE80 << 112 | rng.getrandbits(64),
            0x2606 << 112 | rng.getrandbits(96),
        )
    )
    address = IPv6Address(value)
    text = rng.choice((str(address), address.exploded, str(address).upper()))
    return f"[{text}{rng.choice(('', '', '', '%251', '%25eth0', '%1'))}]"


def _name(rng: random.Random) -> str:
    name = rng.choice(
        (*NAMES, "inside.example", "xn--a", "\uff11\uff12\uff17.1", "a..b", "localhost.localdomain")
    )
    return rng.choice((name, name.upper(), name + ".", f"127.0.0.1.{name}", f"{name}\u200b"))


def test_no_composed_address_leads_inside(campaign: Iterator[int], tally: Tally) -> None:
    for seed in campaign:
        rng = random.Random(seed)
        urls = [composed(rng) for _ in range(400)]
        connections = reached(urls)
        through = leading_inside(connections)
        tally.add(SURFACE, len(urls), len(through))
        assert through == [], f"seed {seed}"
        assert any(connections.values()), "some lead to the public internet and are followed"
