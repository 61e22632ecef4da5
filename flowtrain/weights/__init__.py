"""Versioned weights: the trainer publishes sparse deltas, engines load them in place."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowtrain.weights.format.manifest import StoreError
    from flowtrain.weights.load.reader import Loaded, WeightReader, pull
    from flowtrain.weights.publish.publisher import (
        Published,
        Publisher,
        PublishOptions,
        SnapshotPolicy,
    )
    from flowtrain.weights.stores.folder import Source, WeightStore
    from flowtrain.weights.stores.remote import RemoteStore, open_source

_HOMES = {
    "format.manifest": ("StoreError",),
    "load.reader": ("Loaded", "WeightReader", "pull"),
    "publish.publisher": ("PublishOptions", "Published", "Publisher", "SnapshotPolicy"),
    "stores.folder": ("Source", "WeightStore"),
    "stores.remote": ("RemoteStore", "open_source"),
}
"""Names by module, imported on first use, so that a file server needs no torch."""

__all__ = [
    "Loaded",
    "PublishOptions",
    "Published",
    "Publisher",
    "RemoteStore",
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
