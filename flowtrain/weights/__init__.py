"""Versioned weights: the trainer publishes sparse deltas, engines load them in place."""

from flowtrain.weights.manifest import StoreError
from flowtrain.weights.publisher import Published, Publisher, PublishOptions
from flowtrain.weights.reader import Loaded, WeightReader, pull
from flowtrain.weights.store import WeightStore

__all__ = ["Loaded", "PublishOptions", "Published", "Publisher", "StoreError", "WeightReader", "WeightStore", "pull"]
