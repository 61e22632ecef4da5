"""The demonstrations of a teacher: asked for, scored, and written down as each of them ends, so
that nothing is asked twice, not even after a crash.

`trajectories.jsonl` has a line per rollout: that of a training run's log, for people and the
viewer, with what the rollout cost and, as `group`, the rollout itself in the form of the dataflow,
from which it is imitated.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowtrain.agents.base import Agent
from flowtrain.agents.collect import roll_out
from flowtrain.config import Config, Reward
from flowtrain.dataflow.codec import pack_group, unpack_group
from flowtrain.dataflow.contract import Refused
from flowtrain.engines.chat import Usage, metered
from flowtrain.metrics import ProgressLine, trajectory_record
from flowtrain.metrics.jsonl import append_lines, cut_lines, read_lines
from flowtrain.metrics.pins import check_same
from flowtrain.rewards import Judge, RewardFunctions, score_one
from flowtrain.types import Group, Task, Trajectory, UserError
from flowtrain.utils.loops import run_to_end
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.text import printable

FILE = "trajectories.jsonl"
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
_OF_ENGINES = ("kind", "model", "temperature", "max_tokens")
"""The options of an engine that decide what it writes: not its address, key, prices or limits."""


def pins(config: Config) -> dict[str, Any]:
    """Return the options that decide about demonstrations, as JSON."""
    values = config.model_dump(mode="json", include={*_DECIDING, "engines"})
    for key in _NOT_DECIDING:
        section, _, name = key.partition(".")
        values[section].pop(name)
    values["engines"] = {
        name: {key: options[key] for key in _OF_ENGINES}
        for name, options in values["engines"].items()
    }
    own = {"rft.expert": config.rft.expert, "rft.fictional": config.rft.fictional}
    return {**values, **own, "run.seed": config.run.seed, "train.policy": config.train.policy}


def open_log(config: Config) -> DemonstrationLog:
    """Open the log of the run, with what is there where the run is resumed.

    Raises UserError for a folder of another run, and for demonstrations that other options made.
    """
    folder = Path(config.run.dir)
    now = pins(config)
    manifest = folder / "manifest.json"
    resumes = config.run.resume == "auto" and manifest.exists()
    if resumes:
        begun = json.loads(manifest.read_text()).get(PINS)
        if begun is None:
            raise UserError(
                f"--run.dir {folder} is the folder of another run, without a teacher; choose "
                "another"
            )
        check_same(folder, begun, now, "--run.dir")
    return DemonstrationLog(folder, now, resumes=resumes)


@dataclass(slots=True)
class _Entry:
    """The part of a line that stays in memory."""

    task_id: str
    error: str
    """Why it failed; such a one has no reward, and may be asked for again."""


class DemonstrationLog:
    """The file of the demonstrations, which are numbered from 0."""

    def __init__(self, folder: Path, pins: Mapping[str, Any], *, resumes: bool) -> None:
        """Read what an earlier process has left, if one did; nothing is written."""
        self.facts = {PINS: pins}
        """What the run's manifest must hold."""
        self.path = Path(folder) / FILE
        self.usage = Usage()
        """Tokens and cost of all models in all rollouts that ended, the failed ones included."""
        self._entries: dict[int, _Entry] = {}
        self._num_failed = 0
        self._reward = 0.0
        self._lock = threading.Lock()
        for record in read_lines(self.path) if resumes and self.path.exists() else ():
            self._note(record)

    @property
    def num_done(self) -> int:
        """Rollouts that did not fail."""
        return len(self._entries) - self._num_failed

    def missing(self, num_rollouts: int, num_ranks: int) -> list[int]:
        """Return the numbers that are to be asked for: those without a rollout, or of a failed one.

        Of several ranks none asks, so that failed ones stay so. Raises UserError where they had to.
        """
        there = {n for n, entry in self._entries.items() if num_ranks > 1 or not entry.error}
        missing = [number for number in range(num_rollouts) if number not in there]
        if missing and num_ranks > 1:
            raise UserError(
                f"{self.path} has {num_rollouts - len(missing)} of rft.num_rollouts="
                f"{num_rollouts} demonstrations, and one process asks a teacher: run it without "
                "torchrun with --rft.collect_only true, then here with --resume auto"
            )
        return missing

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UserError unless the rollouts there are of these tasks."""
        for number, entry in self._entries.items():
            if number < len(tasks) and entry.task_id != tasks[number].id:
                raise UserError(
                    f"{self.path} has the task {entry.task_id!r} as demonstration {number}, and it "
                    f"is {tasks[number].id!r} now: the file of questions has changed; choose "
                    "another --run.dir"
                )

    def repair(self) -> None:
        """Drop a line that a killed process has left unfinished, before anything is added."""
        cut_lines(self.path, sys.maxsize)

    def append(self, number: int, trajectory: Trajectory, usage: Usage) -> None:
        """Append a rollout, from any thread; it is on disk when the call returns."""
        record = {
            "step": 1,
            "version": 0,
            **trajectory_record(trajectory, number),
            "usage": asdict(usage),
            "group": base64.b64encode(pack_group(Group(number, (trajectory,)))).decode(),
        }
        with self._lock:
            append_lines(self.path, [record])
            self._note(record)

    def read(self, numbers: Sequence[int]) -> Iterator[Trajectory]:
        """Read the last rollout of each of these numbers. Raises UserError for a damaged line."""
        wanted, latest = set(numbers), dict[int, str]()
        for record in read_lines(self.path) if self.path.exists() else ():
            if record["group_index"] in wanted:
                latest[record["group_index"]] = record["group"]
        for number, packed in sorted(latest.items()):
            try:
                (trajectory,) = unpack_group(base64.b64decode(packed, validate=True)).trajectories
            except (Refused, binascii.Error) as error:
                raise UserError(
                    f"{self.path}: demonstration {number} is damaged: {error}"
                ) from error
            yield trajectory

    @property
    def failures(self) -> list[str]:
        """Return why the failed rollouts failed."""
        return [entry.error for entry in self._entries.values() if entry.error]

    def state(self) -> str:
        """Format the mean reward so far and what it cost."""
        parts = [f"reward {self._reward / max(self.num_done, 1):.3f}"]
        parts += [f"{self._num_failed} failed"] if self._num_failed else []
        return ", ".join([*parts, cost_text(self.usage)])

    def _note(self, record: Mapping[str, Any]) -> None:
        used = Usage(**record["usage"])
        self.usage.prompt_tokens += used.prompt_tokens
        self.usage.reply_tokens += used.reply_tokens
        self.usage.cost += used.cost
        number = record["group_index"]
        if (before := self._entries.get(number)) is not None:
            self._num_failed -= bool(before.error)
        entry = _Entry(record["task_id"], record["error"])
        self._entries[number] = entry
        self._num_failed += bool(entry.error)
        self._reward += record["reward"] or 0.0


def cost_text(usage: Usage) -> str:
    """Format what some requests cost."""
    tokens = f"{usage.prompt_tokens:,} + {usage.reply_tokens:,} tokens"
    return f"{tokens}, cost {usage.cost:.4f}"


def collect_demonstrations(
    agent: Agent,
    tasks: Mapping[int, Task],
    log: DemonstrationLog,
    *,
    seed: int,
    max_in_flight: int,
    progress: ProgressLine,
    is_over: Callable[[], bool],
    judge: Judge | None = None,
    functions: RewardFunctions | None = None,
    bounds: Reward | None = None,
) -> None:
    """Roll out tasks by the number of their demonstration, and log each as it ends.

    A number has its own seed, so that it does not matter which others are asked for. Once `is_over`
    says so, no rollout begins any more.

    Raises UserError when an engine refuses all requests.
    """
    log.repair()
    free = asyncio.Semaphore(max_in_flight)

    async def demonstrate(number: int, task: Task) -> None:
        async with free:
            if is_over():
                return
            with metered() as usage:
                trajectory = await roll_out(agent, task, derive_seed(seed, number, task.id))
                if not trajectory.error:
                    trajectory = await score_one(trajectory, judge, functions, bounds)
        await asyncio.to_thread(log.append, number, trajectory, usage)  # which waits for the disk
        progress.show(log.num_done, log.state())

    async def every() -> None:
        async with asyncio.TaskGroup() as running:
            for number, task in tasks.items():
                running.create_task(demonstrate(number, task))

    run_to_end(every())
    if failures := log.failures:
        text = f"{len(failures)} rollouts failed ({failures[0]}); --resume auto asks them again"
        print(printable(text), file=sys.stderr)
