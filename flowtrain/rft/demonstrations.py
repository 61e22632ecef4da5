"""The log of a teacher's demonstrations.

`trajectories.jsonl` has a line per rollout: that of a training run's log, for people and the
viewer, with what the rollout cost and, as `group`, the rollout itself in the form of the dataflow,
from which it is imitated.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain.config import Config
from flowtrain.evaluation.rollout_log import Question, RolloutLog
from flowtrain.logging import trajectory_record
from flowtrain.logging.fingerprints import check_same, pinned
from flowtrain.logging.jsonl import read_lines
from flowtrain.records import Group, Task, Trajectory, UserError
from flowtrain.rollouts.codec import pack_group, unpack_group
from flowtrain.rollouts.contract import Refused

PINS = "demonstrations"
"""The key of the manifest that holds the `pins`."""
_DECIDING = (
    *("model", "tiny", "tasks", "agent", "roles", "policies", "plugins", "mcp", "reward", "judge"),
    *("web_search", "wikipedia", "web_reader", "corpus"),
)
_NOT_DECIDING = (
    *("model.dtype", "agent.eval_max_turns"),
    "judge.cache",
)
_ENGINE_KEYS = ("kind", "model", "temperature", "max_tokens")
"""The options of an engine that decide what it writes: not its address, key, prices or limits."""


def pins(config: Config) -> dict[str, Any]:
    """Return the options that decide about demonstrations, as JSON."""
    values = pinned(config, _DECIDING, _NOT_DECIDING)
    for key, value in pinned(config, ("engines",), ()).items():
        if key.rpartition(".")[2] in _ENGINE_KEYS:
            values[key] = value
    rft_pins = {"rft.expert": config.rft.expert, "rft.fictional": config.rft.fictional}
    return {**values, **rft_pins, "run.seed": config.run.seed, "train.policy": config.train.policy}


def open_log(config: Config) -> DemonstrationLog:
    """Open the log of the run, with what is there where the run is resumed.

    Raises UserError for a folder of another run, and for demonstrations that other options made.
    """
    folder = Path(config.run.dir)
    current_pins = pins(config)
    manifest = folder / "manifest.json"
    resumes = config.run.resume == "auto" and manifest.exists()
    if resumes:
        recorded_pins = json.loads(manifest.read_text()).get(PINS)
        if recorded_pins is None:
            raise UserError(
                f"--run.dir {folder} is the folder of a run without a teacher; choose another"
            )
        check_same(folder, recorded_pins, current_pins, "--run.dir")
    return DemonstrationLog(folder, current_pins, resumes=resumes)


class DemonstrationLog(RolloutLog[int]):
    """The file of the demonstrations, which are numbered from 0."""

    def __init__(self, folder: Path, pins: Mapping[str, Any], *, resumes: bool) -> None:
        super().__init__(folder, resumes=resumes)
        self.facts = {PINS: pins}
        """Entries that the run's manifest must hold."""

    def key(self, record: Mapping[str, Any]) -> int:
        return int(record["group_index"])

    def fields(self, question: Question[int], trajectory: Trajectory) -> dict[str, Any]:
        number = question.key
        packed = base64.b64encode(pack_group(Group(number, (trajectory,)))).decode()
        record = trajectory_record(trajectory, number)
        return {"step": 1, "version": 0, **record, "group": packed}

    def missing(self, num_rollouts: int, num_ranks: int) -> list[int]:
        """Return the numbers that are to be asked for: those without a rollout, or of a failed one.

        Of several ranks none asks, so that failed ones stay so. Raises UserError where they had to.
        """
        done_numbers = {n for n, entry in self.entries.items() if num_ranks > 1 or not entry.error}
        missing = [number for number in range(num_rollouts) if number not in done_numbers]
        if missing and num_ranks > 1:
            raise UserError(
                f"{self.path} has {num_rollouts - len(missing)} of "
                f"rft.num_rollouts={num_rollouts} demonstrations, and only a single process can "
                "collect them: run it without torchrun and with --rft.collect_only true, then "
                "here with --resume auto"
            )
        return missing

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UserError unless the rollouts there are of these tasks."""
        for number, entry in self.entries.items():
            if number < len(tasks) and entry.task_id != tasks[number].id:
                raise UserError(
                    f"{self.path} has the task {entry.task_id!r} as demonstration {number}, but "
                    f"the task is {tasks[number].id!r} now, because the dataset has changed; "
                    "choose another --run.dir"
                )

    def read(self, numbers: Sequence[int]) -> Iterator[Trajectory]:
        """Read the last rollout of each of these numbers. Raises UserError for a damaged line."""
        wanted_numbers, packed_by_number = set(numbers), dict[int, str]()
        for record in read_lines(self.path) if self.path.exists() else ():
            if record["group_index"] in wanted_numbers:
                packed_by_number[record["group_index"]] = record["group"]
        for number, packed in sorted(packed_by_number.items()):
            try:
                (trajectory,) = unpack_group(base64.b64decode(packed, validate=True)).trajectories
            except (Refused, binascii.Error) as error:
                raise UserError(
                    f"{self.path}: demonstration {number} is damaged: {error}"
                ) from error
            yield trajectory
