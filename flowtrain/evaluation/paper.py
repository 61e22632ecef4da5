"""Accuracies that AgentFlow's authors report (arXiv 2510.05592, tables 1 to 3; means of 3 trials),
to set beside one's own.
"""

from __future__ import annotations

from flowtrain.tasks.benchmarks import AGENTFLOW

_PERCENT = {
    "paper: 7B frozen": (58.4, 60.0, 51.3, 19.2, 17.2, 16.7, 47.4, 31.0, 37.0, 76.0),
    "paper: 7B Flow-GRPO": (69.6, 77.2, 57.0, 25.3, 33.1, 40.0, 61.5, 53.0, 47.0, 80.0),
}

PAPER = {
    label: dict(zip(AGENTFLOW, (value / 100 for value in row), strict=True))
    for label, row in _PERCENT.items()
}
"""Label -> benchmark -> accuracy: the planner is Qwen2.5-7B-Instruct inside AgentFlow, as it comes
and trained."""
