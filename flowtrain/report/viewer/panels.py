"""The curves of a page: which metrics share a panel, and their points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowtrain.report.curves import Series
from flowtrain.report.viewer.log import spread

MOST_POINTS = 1000
"""Points of a curve; a longer one is thinned out evenly."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Metrics that one picture shows."""

    title: str
    lines: dict[str, str]
    """Key to label; a key that ends in "/" means every metric that begins so, labelled by the rest.
    """
    form: str = "number"
    """"number", "share" or "seconds": how values are written."""
    is_stack: bool = False
    """The values are parts of a whole."""
    sparse: tuple[str, ...] = field(default=())
    """Keys that are not measured at every step: their points are marked."""


PANELS = (
    Panel(
        "Reward",
        {
            "reward_mean": "training",
            "eval_reward": "held-out",
            "eval_reward_entities": "entities",
            "eval_reward_forms": "forms",
        },
        sparse=("eval_reward", "eval_reward_entities", "eval_reward_forms"),
    ),
    Panel("KL to the reference", {"kl": "KL"}),
    Panel("Token entropy", {"entropy": "nats"}),
    Panel("Clipped tokens", {"clip_fraction_high": "above", "clip_fraction_low": "below"}, "share"),
    Panel(
        "Importance ratio", {"ratio_max": "largest", "ratio_mean": "mean", "ratio_min": "smallest"}
    ),
    Panel("Log-prob mismatch", {"logprob_mismatch": "|trainer - sampler|"}),
    Panel("Turns per rollout", {"turns_mean": "turns"}),
    Panel("Tokens per turn", {"prompt_len_mean": "prompt", "response_len_mean": "response"}),
    Panel("Tool use", {"tool_share/": ""}, "share", is_stack=True),
    Panel(
        "What goes wrong",
        {
            "malformed_share": "malformed",
            "tool_error_share": "tool errors",
            "out_of_turns_share": "out of turns",
            "out_of_time_share": "out of time",
        },
        "share",
    ),
    Panel("Loss and gradient norm", {"loss": "loss", "grad_norm": "gradient"}),
    Panel(
        "Seconds per step",
        {
            f"{stage}_s": stage
            for stage in ("collect", "branch", "train", "publish", "load", "eval", "other")
        },
        "seconds",
        is_stack=True,
    ),
)


def panel_records(series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """The panels for which something was logged."""
    records = []
    for panel in PANELS:
        lines = [
            {"label": label, "is_sparse": key in panel.sparse, "points": _thinned(series[key])}
            for key, label in _expanded(panel.lines, series).items()
            if key in series
        ]
        if lines:
            records.append(
                {
                    "title": panel.title,
                    "form": panel.form,
                    "is_stack": panel.is_stack,
                    "lines": lines,
                }
            )
    return records


def _expanded(lines: Mapping[str, str], series: Mapping[str, Series]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, label in lines.items():
        matches = (
            {name: name.removeprefix(key) for name in series if name.startswith(key)}
            if key.endswith("/")
            else {key: label}
        )
        found |= matches
    return found


def _thinned(series: Series) -> list[tuple[int, float]]:
    return spread(list(zip(*series, strict=True)), MOST_POINTS)
