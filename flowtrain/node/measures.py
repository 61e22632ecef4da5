"""The metrics of a rollout node, for Prometheus. docs/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowtrain.net.credentials import Access
from flowtrain.net.monitoring import Monitor, Place, counter, gauge
from flowtrain.node.progress import NodeProgress

if TYPE_CHECKING:
    from prometheus_client import Metric

_NAME = "flowtrain_node"


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """The address at which a node answers `/health` and `/metrics`."""

    host: str
    port: int
    """0: nowhere."""
    token: str
    """That of the node, which `/metrics` asks for."""


@contextmanager
def answering(
    address: MetricsAddress, progress: NodeProgress, sampled: Callable[[], Mapping[str, int]]
) -> Iterator[None]:
    """Answer scrapes until the block ends. `sampled` counts tokens by policy.

    Raises UserError if the address is not available, or the token is none.
    """
    if not address.port:
        yield
        return
    monitor = Monitor(_NAME, Access(address.token))
    monitor.add(lambda: collect(progress, sampled))
    place = Place(monitor, address.host, address.port)
    try:
        yield
    finally:
        place.close()


def collect(progress: NodeProgress, sampled: Callable[[], Mapping[str, int]]) -> Iterator[Metric]:
    """Yield the metrics; on any thread."""
    yield counter(f"{_NAME}_groups", "Groups that this process has pushed.", progress.num_pushed)
    text = "Tokens that this process has sampled."
    yield counter(f"{_NAME}_sampled_tokens", text, sampled(), ("policy",))
    yield gauge(f"{_NAME}_rollouts", "Rollouts under way.", progress.num_rollouts)
    text = "Version of the weights that it samples with."
    yield gauge(f"{_NAME}_weights_version", text, progress.versions, ("policy",))
    text = "1: it leases nothing, as while it waits for weights."
    yield gauge(f"{_NAME}_waiting", text, bool(progress.waiting))
