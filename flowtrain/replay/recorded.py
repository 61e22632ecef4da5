"""The replay log of a run (`log.py`) read, and what was changed there."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowtrain.config import Config
from flowtrain.config.options import parse_over
from flowtrain.logging.jsonl import read_lines
from flowtrain.records import Group, Rollouts, UserError
from flowtrain.replay import log_path
from flowtrain.replay.batch_digests import Digests
from flowtrain.replay.log import (
    batch_name,
    chained,
    config_path,
    decode,
    rollouts_name,
    step_folder,
)
from flowtrain.trainer.distributed import World

_UNTRAINED_SECTIONS = ("log", "eval", "checkpoint", "weights", "dataflow")
"""Sections that do not decide what is trained from given rollouts; in [run], these options."""
_UNTRAINED_RUN_OPTIONS = {"dir", "resume", "profile", "dry_run", "threads"}

Line = Mapping[str, Any]


class Problem(NamedTuple):
    """A line of the log that was changed or is missing."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """The replay log in `folder`."""

    run: Path
    folder: Path
    lives: Mapping[int, Line]
    """Lines of the run being opened, by the step that it began or went on after."""
    steps: Mapping[int, Line]
    """Lines of steps, without those that were changed."""
    problems: tuple[Problem, ...]
    """Lines that were changed or are missing, in the order of steps."""

    @classmethod
    def read(cls, run: Path) -> Recorded:
        """Read the log of a run folder. Raises UserError where there is none."""
        path = log_path(run)
        lives: dict[int, Line] = {}
        steps: dict[int, Line] = {}
        problems: list[Problem] = []
        previous_chains: tuple[str, ...] = ("",)
        for number, line in enumerate(read_lines(path), 1):
            step, expected = int(line["step"]), [chained(chain, line) for chain in previous_chains]
            # The next line follows from what stands here, or from what should.
            previous_chains = (str(line.get("chain")), expected[0])
            if line.get("chain") in expected:
                (steps if "files" in line else lives)[step] = line
            else:
                text = f"line {number}, of step {step}, was changed, or an earlier line is missing"
                problems.append(Problem(step, f"{path} {text}"))
        if any("index.rank0.json" in line["files"] for line in steps.values()):
            raise UserError(
                f"{path} was written by an older version of flowtrain; replay it with that version"
            )
        problems += _missing_lines(path, steps, lives, {problem.step for problem in problems})
        return cls(run, path.parent, lives, steps, tuple(sorted(problems)))

    def life_of(self, step: int) -> int:
        """Return the step after which the part of the run that made `step` began or went on."""
        return max((start for start in self.lives if start < step), default=0)

    def version(self, step: int) -> Mapping[str, str] | None:
        """Return the digests by tensor of the version after `step`; None: it is not on record."""
        line = self.steps.get(step) or self.lives.get(step)
        return None if line is None else line["tensors"]

    def config(self, life: int) -> Config:
        """Return the options of a life. Raises UserError when its line or its file was changed."""
        if life not in self.lives:
            opened = f"{self.folder} has no record of the start of the run after step {life}"
            raise UserError("; ".join([opened, *(problem.text for problem in self.problems)]))
        path = config_path(self.folder, life)
        text = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(text).hexdigest() != self.lives[life]["opened"]["config"]:
            raise UserError(f"{path} is missing, or was changed since the run wrote it")
        threads = self.lives[life]["opened"]["threads"]
        return parse_over(
            text.decode(), ["--run.dir", str(self.run), "--run.threads", str(threads)]
        )

    def last_alike(self, life: int) -> int:
        """Return the last step that follows a life without a hole and with its options, as far as
        they decide what is trained.
        """
        options, last_step = _trained_by(self.config(life)), max(self.steps)
        hole_steps = (step for step in range(life + 1, last_step) if self.is_hole(step))
        last_step = next(hole_steps, last_step + 1) - 1
        for later_life in sorted(start for start in self.lives if start > life):
            if _trained_by(self.config(later_life)) != options:
                return min(later_life, last_step)
        return last_step

    def is_hole(self, step: int) -> bool:
        """Return whether a step was trained without the option, so that nothing was kept of it."""
        next_step = min((number for number in self.steps if number > step), default=0)
        return step not in self.steps and any(step <= start < next_step for start in self.lives)

    def damage(self, step: int) -> list[str]:
        """Say which files of a step are not as they were written."""
        problems = []
        for name, file in self.steps[step]["files"].items():
            path = step_folder(self.folder, step) / name
            if not path.is_file():
                problems.append(f"step {step}: {path} is missing")
            elif hashlib.sha256(path.read_bytes()).hexdigest() != file["sha256"]:
                problems.append(f"step {step}: {path} was changed")
        return problems

    def rollouts(self, step: int, world: World) -> Rollouts:
        """Read this rank's rollouts of a step: its own where there are as many ranks as there were,
        else every so many-th group.
        """
        num_ranks = int(self.steps[step]["num_ranks"])
        if num_ranks == world.size:
            return self._of_rank(step, world.rank)
        groups = self.groups(step)[world.rank :: world.size]
        group_indices = {group.index for group in groups}
        logprobs = {
            sample_id: scored
            for rank in range(num_ranks)
            for sample_id, scored in self._of_rank(step, rank).logprobs.items()
            if sample_id.group in group_indices
        }
        return Rollouts(groups, logprobs, {})

    def groups(self, step: int) -> list[Group]:
        """Read all groups of a step, in their order."""
        ranks = range(int(self.steps[step]["num_ranks"]))
        groups = (group for rank in ranks for group in self._of_rank(step, rank).groups)
        return sorted(groups, key=lambda group: group.index)

    def batch(self, step: int) -> Digests:
        """Return the digests of a step's batch, those of all ranks together."""
        left_out: Counter[str] = Counter()
        samples: dict[str, Any] = {}
        for rank in range(int(self.steps[step]["num_ranks"])):
            digests = json.loads((step_folder(self.folder, step) / batch_name(rank)).read_bytes())
            samples |= digests["samples"]
            left_out.update(digests["left_out"])
        return {"left_out": left_out, "samples": samples}

    def _of_rank(self, step: int, rank: int) -> Rollouts:
        return decode((step_folder(self.folder, step) / rollouts_name(rank)).read_bytes())


def _missing_lines(
    path: Path, steps: Mapping[int, Line], lives: Mapping[int, Line], changed_steps: set[int]
) -> Iterator[Problem]:
    """Yield the steps without a line, but for `changed_steps`, which have a changed one."""
    first = min(steps, default=0)
    for step in sorted(steps):
        # A run that was resumed without the option leaves a hole, behind which it was opened anew.
        if step > first and not {step - 1} & (steps.keys() | lives.keys() | changed_steps):
            yield Problem(step - 1, f"{path} has no line of step {step - 1}")
    for step in sorted(_logged(path.parents[1]) - steps.keys() - changed_steps):
        if step > max(steps, default=0):
            yield Problem(step, f"{path} has no line of step {step}, which metrics.jsonl has")


def _logged(run: Path) -> set[int]:
    path = run / "metrics.jsonl"
    lines = read_lines(path) if path.is_file() else ()
    return {int(line["step"]) for line in lines if "replay_log_bytes" in line}


def _trained_by(config: Config) -> dict[str, Any]:
    options = config.model_dump(exclude=set(_UNTRAINED_SECTIONS))
    options["run"] = {k: v for k, v in options["run"].items() if k not in _UNTRAINED_RUN_OPTIONS}
    return options
