"""All that a page shows, as plain JSON values. What a run lacks becomes a note on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flowtrain.report.curves import Series, read_series
from flowtrain.report.jsonl import json_value
from flowtrain.report.viewer.detokenize import find_tokenizer
from flowtrain.report.viewer.log import LOGS, Place, choose, find_rollouts, log_files
from flowtrain.report.viewer.panels import panel_records
from flowtrain.report.viewer.rollouts import rollout_record
from flowtrain.report.viewer.run import (
    Config,
    check_run_dir,
    facts,
    read_config,
    read_json,
    read_text,
    result_rows,
    seconds_by_stage,
)
from flowtrain.types import UserError

T = TypeVar("T")


class Run:
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
        self._results: list[tuple[str, str, str, str]] = self._try([], result_rows, path)
        self.places: list[Place] = []
        for split in LOGS:
            self.places += self._try(list[Place](), find_rollouts, path, split)
        self._tokenizer = find_tokenizer(path, str(self._config.get("model", {}).get("path", "")))
        self._note_what_is_missing()

    def data(self, num_rollouts: int) -> dict[str, Any]:
        """Bytes of a page with about so many rollouts."""
        chosen = choose(self.places, num_rollouts)
        rollouts = [rollout_record(place, place.read(), self._tokenizer) for place in chosen]
        last_step = max((steps[-1] for steps, _ in self._series.values()), default=None)
        data = {
            "name": self.path.resolve().name,
            "facts": facts(self._config, self._manifest),
            "config": self._config_text,
            "step": last_step,
            "num_steps": self._config.get("train", {}).get("num_steps"),
            "reward": self._reward(),
            "versions": self._range("version"),
            "seconds": seconds_by_stage(self._series),
            "num_logged": len(self.places),
            "panels": panel_records(self._series),
            "results": self._results,
            "rollouts": rollouts,
            "shown": self._shown(chosen),
            "notes": [*self.notes, *_notes_on_training(rollouts)],
        }
        cleaned: dict[str, Any] = json_value(data)
        return cleaned

    def _try(self, default: T, read: Callable[..., T], *arguments: Any) -> T:
        """Read a file of the run; a file that cannot be read is named on the page."""
        try:
            return read(*arguments)
        except UserError as error:
            self.notes.append(str(error))
            return default

    def _note_what_is_missing(self) -> None:
        path, files = self.path, [path for split in LOGS for path in log_files(self.path, split)]
        torn = [
            each.name
            for each in (path / "metrics.jsonl", *files)
            if each.is_file() and _ends_within_a_line(each)
        ]
        is_training = "num_steps" in self._config.get("train", {}) and bool(files)
        missing = {
            f"{', '.join(torn)}: the last line is incomplete and was left out; the run is writing "
            "it, or was killed.": torn,
            "The run has not finished, or was interrupted: there is no summary.json yet.": (
                is_training and not (path / "summary.json").is_file()
            ),
            "No step has been logged, so there are no curves.": not self._series,
            "No rollouts have been logged: curves and results are all there is.": not self.places,
            "The tokenizer of the run is gone: tokens are shown as ids, and prompts not at all.": (
                self.places and self._tokenizer is None
            ),
        }
        self.notes += [note for note, holds in missing.items() if holds]

    def _reward(self) -> list[float]:
        """First and last held-out reward; [] where none was measured."""
        _, values = self._series.get("eval_reward", ([], []))
        return [values[0], values[-1]] if values else []

    def _range(self, key: str) -> list[int]:
        _, values = self._series.get(key, ([], []))
        return [int(min(values)), int(max(values))] if values else []

    def _shown(self, chosen: Sequence[Place]) -> str:
        """Which rollouts the page has, in a sentence."""
        if len(chosen) == len(self.places):
            return f"All {len(chosen):,} logged rollouts."
        counts = [
            f"{sum(place.split == split for place in chosen):,} of {total:,} {name}"
            for split, name in (("train", "training"), ("held-out", "held-out"))
            if (total := sum(place.split == split for place in self.places))
        ]
        return (
            f"{' and '.join(counts)} rollouts; {len(self.places) - len(chosen):,} were left out. "
            "Whole groups, evenly over the steps, "
            "those with both right and wrong answers first: shares among them are not those of the "
            "run."
        )


def _notes_on_training(rollouts: Sequence[Mapping[str, Any]]) -> list[str]:
    turns = [
        turn for rollout in rollouts if rollout["split"] == "train" for turn in rollout["turns"]
    ]
    if not turns or any(turn["training"] for turn in turns):
        return []
    return [
        "No log-probs of the trainer: none of these rollouts was trained, or an earlier version "
        "wrote the log. Colours show surprisal."
    ]


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 1, 0))
        return file.read(1) not in (b"", b"\n")
