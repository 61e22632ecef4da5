"""The panels of metrics in the picture of a run and on its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flowtrain.logging.page.log import spread
from flowtrain.logging.series import Series

STAGES = ("collect", "branch", "train", "publish", "load", "eval", "other")


class Curve(NamedTuple):
    """A metric in a panel."""

    label: str
    series: Series
    is_sparse: bool = False
    """The metric is not measured at every step, so its points are marked."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Metrics that one picture shows."""

    title: str
    lines: Mapping[str, str]
    """Key to label; a key that ends in "/" means every metric that begins so, labelled by the rest.
    """
    form: Literal["number", "share", "seconds"] = "number"
    """The way in which values are written."""
    is_stack: bool = False
    """The values are parts of a whole."""

    def curves(self, series: Mapping[str, Series]) -> list[Curve]:
        """Return those of its metrics that were logged."""
        return [
            Curve(label or name.removeprefix(key), series[name], key.startswith("eval_"))
            for key, label in self.lines.items()
            for name in series
            if name == key or (key.endswith("/") and name.startswith(key))
        ]

    def record(self, curves: Sequence[Curve], max_points: int) -> dict[str, Any]:
        """Return a panel of these curves as JSON values; a curve of more points is thinned out."""
        lines = [
            {
                "label": curve.label,
                "is_sparse": curve.is_sparse,
                "points": spread(list(zip(*curve.series, strict=True)), max_points),
            }
            for curve in curves
        ]
        return {"title": self.title, "form": self.form, "is_stack": self.is_stack, "lines": lines}


PANELS = (
    Panel(
        "Reward",
        {
            "reward_mean": "training",
            "eval_reward": "held-out texts",
            "eval_reward_entities": "held-out entities",
            "eval_reward_forms": "held-out forms",
        },
    ),
    Panel("Accuracy on benchmarks", {"eval_accuracy/": ""}, "share"),
    Panel("Parts of the reward", {"reward/": ""}),
    Panel("KL", {"kl_ref": "to the reference", "kl": "KL"}),
    Panel("Token entropy", {"entropy": "nats"}),
    Panel("Clipped tokens", {"clip_fraction_high": "above", "clip_fraction_low": "below"}, "share"),
    Panel(
        "Importance ratio", {"ratio_max": "largest", "ratio_mean": "mean", "ratio_min": "smallest"}
    ),
    Panel("Log-prob mismatch", {"logprob_mismatch": "|trainer - sampler|"}),
    Panel("KL of trainer and sampler", {"mismatch_kl": "nats per token"}),
    Panel("Tokens by mismatch in nats", {"mismatch_tokens/": ""}, is_stack=True),
    Panel("Turns per rollout", {"turns_mean": "turns", "segments_mean": "segments"}),
    Panel("Tokens per response", {"response_len_mean": "tokens"}),
    Panel("Tokens per prompt", {"prompt_len_mean": "tokens"}),
    Panel("Where sampled tokens go", {"tokens/to/": ""}, is_stack=True),
    Panel("Tool use", {"tool_share/": ""}, "share", is_stack=True),
    Panel(
        "What goes wrong",
        {
            "malformed_share": "malformed",
            "tool_error_share": "tool errors",
            "out_of_turns_share": "out of turns",
            "out_of_time_share": "out of time",
            "out_of_positions_share": "out of positions",
        },
        "share",
    ),
    Panel("Replies read leniently", {"rescued_share/": ""}, "share"),
    Panel("Loss and gradient norm", {"loss": "loss", "grad_norm": "gradient"}),
    Panel(
        "Seconds per step",
        {f"{stage}_s": stage for stage in STAGES},
        "seconds",
        is_stack=True,
    ),
)
