"""`/health` and `/metrics`: who is answered, what is counted, how often the source is asked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from http_servers import running
from prometheus_text import samples

from flowtrain.records import UserError
from flowtrain.utils.net.credentials import Access
from flowtrain.utils.net.monitoring import Cached, Monitor, counter, gauge

TOKEN = {"Authorization": "Bearer t"}


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers /NUMBER with this status."""
    status = int(scope["path"][1:]) if scope["path"][1:].isdigit() else 401
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"12345"})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx2.Client]:
    monkeypatch.setenv("no_proxy", "*")
    with httpx2.Client() as client:
        yield client


def made(access: Access | None = None, **options: Any) -> Monitor:
    kinds = {"/200": "good", "/500": "bad"}
    return Monitor("x", access, value_of=lambda path: kinds.get(path, "other"), **options)


def test_metrics_need_the_token_and_health_none(client: httpx2.Client) -> None:
    with running(made(Access("t")).watching(application)) as url:
        assert client.get(f"{url}/health").json() == {"status": "ok"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic t"}):
            answer = client.get(f"{url}/metrics", headers=headers)
            assert (answer.status_code, answer.text) == (401, "12345"), "the application's own"
        answer = client.get(f"{url}/metrics", headers=TOKEN)
        assert answer.status_code == 200 and "x_requests_total" in answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert client.post(f"{url}/metrics", headers=TOKEN).status_code == 401


def test_open_metrics_need_none(client: httpx2.Client) -> None:
    with running(made().watching(application)) as url:
        assert client.get(f"{url}/metrics").status_code == 200


def test_health_says_no_more_than_a_word(client: httpx2.Client) -> None:
    with running(made(is_healthy=lambda: False).watching(application)) as url:
        answer = client.get(f"{url}/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "failing"})


def test_requests_are_counted_by_kind_and_status(client: httpx2.Client) -> None:
    with running(made().watching(application)) as url:
        for path in ("200", "200", "500", "404", "403"):
            client.get(f"{url}/{path}")
        client.get(f"{url}/a/name/that/strangers/choose{'x' * 900}")
        first = samples(client.get(f"{url}/metrics").text)
        client.get(f"{url}/200")
        second = samples(client.get(f"{url}/metrics").text)
    assert first["x_requests_total{method=good,status=200}"] == 2
    assert first["x_requests_total{method=bad,status=500}"] == 1
    assert first["x_requests_total{method=other,status=403}"] == 1
    assert first["x_sent_bytes_total{method=good}"] == 10
    assert first["x_request_seconds_count{method=other}"] == 3
    assert first["x_requests_open{method=good}"] == 0
    assert second["x_requests_total{method=good,status=200}"] == 3
    assert all(second[key] >= value for key, value in first.items()), "counters only grow"
    assert not any("strangers" in key for key in second)


def test_two_servers_of_a_process_count_apart(client: httpx2.Client) -> None:
    one, two = made(), made()
    with running(one.watching(application)) as url, running(two.watching(application)) as other:
        client.get(f"{url}/200")
        assert "good" in client.get(f"{url}/metrics").text
        assert "good" not in client.get(f"{other}/metrics").text


def test_a_histogram_is_cumulative_and_has_its_sum() -> None:
    monitor = made()
    seconds = monitor.seconds("x_seconds", "Seconds.", "method")
    for value in (0.001, 0.002, 0.3, 99.0):
        seconds.labels("a").observe(value)
    found = samples(monitor.text())
    buckets = [value for key, value in found.items() if key.startswith("x_seconds_bucket")]
    assert buckets == [1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert found["x_seconds_count{method=a}"] == 4
    assert found["x_seconds_sum{method=a}"] == pytest.approx(99.303)


def test_a_source_is_read_once_a_second_and_a_tenth_of_the_time() -> None:
    now, reads, cost = [0.0], [], [0.0]

    def read() -> int:
        reads.append(now[0])
        now[0] += cost[0]
        return len(reads)

    cached = Cached(read, clock=lambda: now[0])
    assert (cached.get(), cached.get()) == (1, 1)
    now[0] = 0.99
    assert cached.get() == 1
    now[0], cost[0] = 1.0, 0.5
    assert cached.get() == 2
    now[0] = 1.5 + 4.9
    assert cached.get() == 2, "a read of half a second is not repeated for five"
    now[0] = 1.5 + 5.0
    assert cached.get() == 3


def test_a_source_that_fails_is_not_asked_at_once_again() -> None:
    now, reads = [0.0], []

    def read() -> int:
        reads.append(1)
        raise UserError("down")

    cached = Cached(read, UserError, clock=lambda: now[0])
    assert (cached.get(), cached.get(), len(reads)) == (None, None, 1)


def test_many_threads_read_a_source_once() -> None:
    gate, reads = threading.Event(), []

    def read() -> int:
        gate.wait(5)
        reads.append(1)
        return 7

    cached = Cached(read)
    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(cached.get) for _ in range(8)]
        gate.set()
        assert {each.result() for each in found} == {7}
    assert len(reads) == 1


def test_numbers_are_made_at_the_scrape() -> None:
    monitor, of = made(), {"a": 2}
    monitor.add(lambda: iter([gauge("y_up", "Up.", 1), counter("y_all", "All.", of, ("k",))]))
    of["b"] = 3
    found = samples(monitor.text())
    assert (found["y_up"], found["y_all_total{k=a}"], found["y_all_total{k=b}"]) == (1, 2, 3)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[serve\]'") as caught:
        made()
    assert "prometheus_client" in str(caught.value) and "\n" not in str(caught.value)
