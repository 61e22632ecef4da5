"""The rules of the dataflow, built-in ones and those of other packages (docs/dataflow-rules.md)."""

from flowtrain.dataflow.rules.base import Candidate, Curator, Filter, Outcome, Selector
from flowtrain.dataflow.rules.registry import Rules, load
from flowtrain.dataflow.rules.reuse import reused

__all__ = ["Candidate", "Curator", "Filter", "Outcome", "Rules", "Selector", "load", "reused"]
