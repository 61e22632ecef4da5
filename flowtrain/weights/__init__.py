"""Versioned weights: the trainer publishes sparse deltas, engines load them in place."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowtrain.weights.manifest import StoreError
    from flowtrain.weights.publisher import Published, Publisher, PublishOptions
    from flowtrain.weights.reader import Loaded, WeightReader, pull
    from flowtrain.weights.remote import HttpStore, open_source
    from flowtrain.weights.schedule import SnapshotPolicy
    from flowtrain.weights.store import Source, WeightStore

_HOMES = {
    "manifest": ("StoreError",),
    "publisher": ("PublishOptions", "Published", "Publisher"),
    "reader": ("Loaded", "WeightReader", "pull"),
    "remote": ("HttpStore", "open_source"),
    "schedule": ("SnapshotPolicy",),
    "store": ("Source", "WeightStore"),
}
"""Names by the module that has them, imported when asked for: a server of files needs no torch."""

__all__ = [
    "HttpStore",
    "Loaded",
    "PublishOptions",
    "Published",
    "Publisher",
    "SnapshotPolicy",
    "Source",
    "StoreError",
    "WeightReader",
    "WeightStore",
    "open_source",
    "pull",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
