"""All that a page shows, as plain JSON values. Missing parts of a run become notes on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from flowtrain.logging.jsonl import json_value
from flowtrain.logging.page.log import LOGS, Place, choose, find_rollouts
from flowtrain.logging.page.panels import PANELS, STAGES
from flowtrain.logging.page.rollouts import rollout_record
from flowtrain.logging.page.run import (
    Config,
    check_run_dir,
    facts,
    read_config,
    read_json,
    read_text,
    results,
)
from flowtrain.logging.series import Series, read_series, total_seconds, total_tokens
from flowtrain.logging.tables import comparison_rows
from flowtrain.records import UserError

T = TypeVar("T")

MOST_POINTS = 1000
"""Points of a curve; a longer one is thinned out evenly."""


class LoggedRun:
    """A run folder, read but for the rollouts, of which it knows where they lie. UserError where
    the folder is no run.
    """

    def __init__(self, path: Path) -> None:
        check_run_dir(path)
        self.path, self.notes = path, list[str]()
        self._config_text: str = self._try("", read_text, path / "config.toml")
        self._config: Config = self._try({}, read_config, path)
        self._manifest: dict[str, Any] = self._try({}, read_json, path / "manifest.json")
        self._series: dict[str, Series] = {}
        if (path / "metrics.jsonl").is_file() and (path / "metrics.jsonl").stat().st_size:
            self._series = self._try({}, read_series, path)
        no_results: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._before, self._after = self._try(no_results, results, path)
        self.places: list[Place] = []
        for split in LOGS:
            self.places += self._try(list[Place](), find_rollouts, path, split)
        tokenizer_path = path / "tokenizer.json"
        self._tokenizer = (
            Tokenizer.from_file(str(tokenizer_path)) if tokenizer_path.is_file() else None
        )
        self._note_what_is_missing()

    def data(self, num_rollouts: int) -> dict[str, Any]:
        """Return what the page shows, with about so many rollouts."""
        shown_places = choose(self.places, num_rollouts)
        rollouts = [rollout_record(place, place.read(), self._tokenizer) for place in shown_places]
        seconds, account = total_seconds(self._series), total_tokens(self._series)
        tokens = [("Tokens", account.text())] if account.sampled else []
        last_step = max((steps[-1] for steps, _ in self._series.values()), default=None)
        data = {
            "name": self.path.resolve().name,
            "facts": [*facts(self._config, self._manifest), *tokens],
            "config": self._config_text,
            "step": last_step,
            "num_steps": self._config.get("train", {}).get("num_steps"),
            "reward": self._rewards(),
            "versions": self._ends("version"),
            "seconds": {
                stage: seconds[stage] for stage in (*STAGES, "checkpoint") if seconds.get(stage)
            },
            "num_logged": len(self.places),
            "panels": [
                panel.record(curves, MOST_POINTS)
                for panel in PANELS
                if (curves := panel.curves(self._series))
            ],
            "results": comparison_rows(self._before, self._after),
            "rollouts": rollouts,
            "shown": self._shown(shown_places),
            "notes": self.notes,
        }
        return dict(json_value(data))

    def _try(self, default: T, read: Callable[..., T], *arguments: Any) -> T:
        """Read a file of the run; a file that cannot be read is named on the page."""
        try:
            return read(*arguments)
        except UserError as error:
            self.notes.append(str(error))
            return default

    def _note_what_is_missing(self) -> None:
        is_training = "num_steps" in self._config.get("train", {}) and bool(self.places)
        notes = {
            "The run has not finished, or was interrupted: there is no summary.json yet.": (
                is_training and not (self.path / "summary.json").is_file()
            ),
            "No step has been logged, so there are no curves.": not self._series,
            "No rollouts have been logged: only curves and results are shown.": not self.places,
            "The run's tokenizer is missing: tokens appear as ids, without prompts.": (
                self.places and self._tokenizer is None
            ),
        }
        self.notes += [note for note, holds in notes.items() if holds]

    def _ends(self, key: str) -> list[float]:
        """Return the first and last value of a metric; [] where none was logged."""
        _, values = self._series.get(key, ([], []))
        return [values[0], values[-1]] if values else []

    def _rewards(self) -> list[float]:
        """Return the held-out reward at first and at last, as reported where training has ended."""
        first_and_last = self._ends("eval_reward")
        if first_and_last and "eval_reward" in self._after:
            first_and_last[-1] = self._after["eval_reward"]
        return first_and_last

    def _shown(self, shown_places: Sequence[Place]) -> str:
        """Return a sentence about the rollouts on the page."""
        if len(shown_places) == len(self.places):
            return f"All {len(shown_places):,} logged rollouts."
        counts = " and ".join(
            f"{sum(place.split == split for place in shown_places):,} of {total:,} {name}"
            for split, name in (("train", "training"), ("held-out", "held-out"))
            if (total := sum(place.split == split for place in self.places))
        )
        return f"{counts} rollouts: whole groups, evenly over the steps."
