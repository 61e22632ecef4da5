"""Versioned weights: the trainer publishes sparse deltas, engines load them in place."""

from flowtrain.weights.manifest import StoreError
from flowtrain.weights.publisher import Published, Publisher, PublishOptions
from flowtrain.weights.reader import Loaded, WeightReader, pull
from flowtrain.weights.remote import HttpStore, open_source
from flowtrain.weights.schedule import SnapshotPolicy
from flowtrain.weights.store import Source, WeightStore

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
