"""The metrics of a server of weights. docs/metrics.md lists them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flowtrain.net.credentials import Access
from flowtrain.net.monitoring import OTHER, Cached, Monitor, gauge
from flowtrain.weights.manifest import StoreError

if TYPE_CHECKING:
    from prometheus_client import Metric

_NAME = "flowtrain_weights"
_FILE = re.compile(r"/(?:(HEAD)|v[0-9]{8,18}/(?:(manifest\.json)|[A-Za-z0-9._-]+\.safetensors))")


def monitor(head: Callable[[], int | None], access: Access | None) -> Monitor:
    """Make the monitor of a server. `head` returns the newest version, and may read a file;
    `access` says whom `/metrics` answers, None: everybody.
    """
    newest = Cached(head, StoreError, OSError)
    made = Monitor(_NAME, access, label="file", value_of=_kind)

    def collect() -> Iterator[Metric]:
        version = newest.get()
        text = "Newest version that is served; missing while there is none."
        yield gauge(f"{_NAME}_head_version", text, {} if version is None else {(): version})

    made.add(collect)
    return made


def _kind(path: str) -> str:
    match = _FILE.fullmatch(path)
    if match is None:
        return OTHER
    return "head" if match[1] else "manifest" if match[2] else "data"
