"""Addresses that may be read, and that the one checked is the one connected to."""

from __future__ import annotations

import asyncio
import threading
from ipaddress import ip_address

import httpcore2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from web_servers import PUBLIC, Internet

from flowtrain.tools.web.addresses import Checked, Refused, Resolver, Rules, is_public

RULES = Rules()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "only http"),
        ("ftp://example.org/", "only http"),
        ("http://user@example.org/", "user name"),
        ("http://example.org\\@10.0.0.1/", "user name"),
        ("http://example.org:22/", "port 22 is not read, only 80, 443"),
        ("http://example.org:65536/", "port 65536"),
        ("http:///x", "no host"),
        ("http://ex ample.org/", "no host"),
        ("http://exa\x00mple.org/", "no URL"),
        ("http://[::1", "URL"),
        ("http://127.0.0.1/", "public internet"),
        ("http://127.0.0.1./", "usual form"),
        ("http://2130706433/", "usual form"),
        ("http://0177.0.0.1/", "no URL"),
        ("http://1.2.3.4.5/", "usual form"),
        ("http://8.8.8.08/", "no URL"),
        ("http://0x8.8.8.8/", "usual form"),
        ("http://example.0x7f/", "usual form"),
        ("http://[::1]/", "public internet"),
        ("http://[::ffff:8.8.8.8]/", "public internet"),
        ("http://[fe80::1%25eth0]/", "public internet"),
        ("http://" + "a" * 2000 + "/", "2000 characters"),
    ],
)
def test_a_form_that_is_refused(url: str, reason: str) -> None:
    """One of a kind; attacks/test_web_addresses.py has them all."""
    with pytest.raises(Refused, match=reason):
        RULES.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.org", "HTTPS://Example.ORG./a?b=c#d", "https://münchen.de/straße"),
        *("http://8.8.8.8/", "https://[2606:4700::6810:84e5]/", "http://example.org:443/"),
        *("http://a_b.example.org/", "http://1.example.org/", "http://3com/"),
    ],
)
def test_a_form_that_is_allowed(url: str) -> None:
    assert RULES.parse(url).host


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        (PUBLIC, True),
        ("172.15.255.255", True),
        ("172.32.0.0", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("172.16.0.1", False),
        ("172.31.255.255", False),
        ("192.88.99.1", False),
        ("224.0.0.1", False),
        ("2606:4700::6810:84e5", True),
        ("2a00:1450::1", True),
        ("2001:db8::1", False),
        ("3fff::1", False),
        ("4000::1", False),
        ("::8.8.8.8", False),
        ("2606:4700::1%eth0", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) == public


@given(st.ip_addresses())
@settings(max_examples=300)
def test_special_addresses_of_ipaddress_are_not_public(address: object) -> None:
    special = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
    )
    assert not (is_public(address) and (special or not address.is_global))


@given(
    st.one_of(
        st.text(max_size=60),
        st.text(alphabet="htps:/@[]%#?.0123456789abcdefx\\", max_size=40).map("http://".__add__),
    )
)
@settings(max_examples=500)
def test_any_text_is_refused_or_a_url_with_a_checked_host(text: str) -> None:
    try:
        url = RULES.parse(text)
    except Refused:
        return
    assert url.scheme in ("http", "https") and url.host and not url.userinfo


def test_allowing_private_addresses_allows_no_other_form() -> None:
    rules = Rules((8080,), allow_private=True)
    assert rules.parse("http://127.0.0.1:8080/").port == 8080
    for url in ("http://127.1:8080/", "http://127.0.0.1/", "http://u@127.0.0.1:8080/", "file:///x"):
        with pytest.raises(Refused):
            rules.parse(url)


def connect(internet: Internet, host: str, rules: Rules = RULES) -> None:
    asyncio.run(Checked(rules, internet.resolve, internet).connect_tcp(host, 80))


def test_a_name_is_resolved_once_and_its_address_connected_to() -> None:
    """Rebinding: whatever the name means the second time, nobody asks."""
    internet = Internet({"evil.example": [[PUBLIC], ["127.0.0.1"]]}, {})
    with pytest.raises(httpcore2.ConnectError, match="nobody there"):
        connect(internet, "evil.example")
    assert (internet.asked, internet.connected) == (["evil.example"], [f"{PUBLIC}:80"])


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::1", PUBLIC], ["::ffff:10.0.0.1"], ["fe80::1%2"]],
)
def test_name_with_any_private_address_is_refused(addresses: list[str]) -> None:
    internet = Internet({"evil.example": [addresses]}, {})
    told = r"evil\.example is at .*, which is not on the public internet"
    with pytest.raises(Refused, match=told):
        connect(internet, "evil.example")
    assert internet.connected == []


def test_the_addresses_of_a_name_are_tried_in_turn() -> None:
    internet = Internet({"two.example": [["2606:4700::1", PUBLIC]]}, {})
    with pytest.raises(httpcore2.ConnectError, match="nobody there"):
        connect(internet, "two.example")
    assert internet.connected == ["2606:4700::1:80", f"{PUBLIC}:80"]


def test_a_name_without_addresses_is_a_connection_that_failed() -> None:
    with pytest.raises(httpcore2.ConnectError, match="no address"):
        connect(Internet({"no.example": [[]]}, {}), "no.example")


def test_system_resolver_resolves_localhost_and_closes() -> None:
    resolver = Resolver()
    found = asyncio.run(resolver("localhost", 80))
    assert "127.0.0.1" in found and len(found) == len(set(found))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("resolve")]
    resolver.close()
    for thread in threads:
        thread.join(60)
    assert threads and not any(thread.is_alive() for thread in threads)
