"""The rules of the dataflow, built-in ones and those of other packages (docs/dataflow-rules.md)."""

from flowtrain.rollouts.rules.base import Candidate, GroupFilter, Outcome, PromptFilter, Selector
from flowtrain.rollouts.rules.registry import Rules, load

__all__ = [
    "Candidate",
    "GroupFilter",
    "Outcome",
    "PromptFilter",
    "Rules",
    "Selector",
    "load",
]
