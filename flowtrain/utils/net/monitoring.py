"""Let a long-lived process tell of itself: `/health` to supervisors, `/metrics` to Prometheus.

Each server has a `Monitor` and a registry of its own, so that two servers of one process do not mix
theirs. Labels have values from closed lists only: names that others choose would grow without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flowtrain.utils.net import serving
from flowtrain.utils.net.credentials import Access

if TYPE_CHECKING:
    from prometheus_client import Histogram, Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")
Collect = Callable[[], Iterator["Metric"]]
"""Makes metrics at the moment of a scrape."""
OTHER = "other"
"""Stands for every value of a label that is none of the known ones."""
_BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0)
_FRESH_S = 1.0
_MOST_SHARE = 0.1


class Cached(Generic[T]):
    """A value that costs something to read: read again when it is asked for, but at most once a
    second and for a tenth of the time. Threads may share it.
    """

    def __init__(
        self, read: Callable[[], T], *failures: type[Exception], clock: Any = time.monotonic
    ) -> None:
        """`failures` are what `read` may raise; the value is None then."""
        self._read, self._failures, self._clock = read, failures, clock
        self._lock = threading.Lock()
        self._value: T | None = None
        self._until = float("-inf")

    def get(self) -> T | None:
        """Return the value; None when the last attempt to read it failed."""
        with self._lock:
            start = self._clock()
            if start >= self._until:
                self._value = None
                with contextlib.suppress(*self._failures):
                    self._value = self._read()
                end = self._clock()
                self._until = end + max(_FRESH_S, (end - start) / _MOST_SHARE)
            return self._value


class Monitor:
    """Answers `/health` and `/metrics` in front of an application, whose requests it counts."""

    def __init__(
        self,
        prefix: str,
        access: Access | None,
        *,
        label: str = "method",
        value_of: Callable[[str], str] = lambda path: OTHER,
        is_healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            prefix: with which the names of all metrics begin.
            access: whom `/metrics` answers; None: everybody. `/health` answers everybody.
            label, value_of: the label of requests, and its value for a path, of a closed list.
            is_healthy: asked for `/health`, on a thread of the monitor's own.

        Raises:
            UserError: a package is missing.
        """
        serving.require("prometheus_client", "starlette.responses")
        from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._access, self._value_of, self._is_healthy = access, value_of, is_healthy
        # One thread: scrapes, however many, keep no other thread or connection busy.
        self._thread = ThreadPoolExecutor(1, "metrics")
        text = "Seconds from the head of a request to the end of its answer."
        self._seconds = self.seconds(f"{prefix}_request_seconds", text, label)
        text = f"Requests by {label} and status of the answer; none: cut before it."
        labels, registry = (label, "status"), self.registry
        self._requests = Counter(f"{prefix}_requests", text, labels, registry=registry)
        text = f"Bytes of answers by {label}, without their heads."
        self._bytes = Counter(f"{prefix}_sent_bytes", text, (label,), registry=registry)
        text = f"Requests under way by {label}."
        self._open = Gauge(f"{prefix}_requests_open", text, (label,), registry=registry)

    def seconds(self, name: str, text: str, label: str) -> Histogram:
        """Make a histogram of durations by one label, whose values must come from a closed list."""
        from prometheus_client import Histogram

        return Histogram(name, text, (label,), registry=self.registry, buckets=_BUCKETS_S)

    def add(self, collect: Collect) -> None:
        """Add what `collect` yields to every scrape."""
        self.registry.register(_Collector(collect))

    def watching(self, app: ASGIApp) -> ASGIApp:
        """Return the application with the two addresses in front of it."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            is_read = scope["method"] in ("GET", "HEAD")
            if is_read and scope["path"] == "/health":
                return await self._answer_health(scope, receive, send)
            # Without a valid token the application answers, as it does any other request.
            if is_read and scope["path"] == "/metrics" and self._may_read(scope):
                return await self._answer_metrics(scope, receive, send)
            return await self._count(app, scope, receive, send)

        return watched

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def _may_read(self, scope: Scope) -> bool:
        if self._access is None:
            return True
        header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        return self._access.caller(header) is not None

    async def _answer_health(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import JSONResponse

        loop = asyncio.get_running_loop()
        is_healthy = await loop.run_in_executor(self._thread, self._is_healthy)
        status, word = (200, "ok") if is_healthy else (503, "failing")
        headers = {"Cache-Control": "no-store"}
        await JSONResponse({"status": word}, status, headers)(scope, receive, send)

    async def _answer_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST
        from starlette.responses import Response

        text = await asyncio.get_running_loop().run_in_executor(self._thread, self.text)
        headers = {"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"}
        await Response(text, headers=headers)(scope, receive, send)

    async def _count(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        label, status = self._value_of(scope["path"]), "none"

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            self._bytes.labels(label).inc(len(message.get("body", b"")))
            await send(message)

        with self._open.labels(label).track_inprogress(), self._seconds.labels(label).time():
            try:
                await app(scope, receive, counting)
            finally:
                self._requests.labels(label, status).inc()


def gauge(
    name: str, text: str, values: float | Mapping[Any, float], labels: Sequence[str] = ()
) -> Metric:
    """Make a metric that goes up and down, of one value or of one for each tuple of labels."""
    from prometheus_client.core import GaugeMetricFamily

    return _fill(GaugeMetricFamily(name, text, labels=labels), values)


def counter(
    name: str, text: str, values: float | Mapping[Any, float], labels: Sequence[str] = ()
) -> Metric:
    """Make a metric that only grows; Prometheus knows it by its name with `_total`."""
    from prometheus_client.core import CounterMetricFamily

    return _fill(CounterMetricFamily(name, text, labels=labels), values)


def _fill(family: Any, values: float | Mapping[Any, float]) -> Metric:
    # Copied at once: the values may belong to another thread.
    for labels, value in (dict(values) if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    metric: Metric = family
    return metric


class _Collector:
    def __init__(self, collect: Collect) -> None:
        self.collect = collect
