"""Loggers of a run's metrics beside metrics.jsonl: TensorBoard, Weights & Biases, Trackio, and
custom ones from entry points `flowtrain.loggers` or user files.

docs/metrics.md shows a logger from end to end.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flowtrain.config import Config
from flowtrain.logging.run_dir import atomic_write_text
from flowtrain.records import UserError
from flowtrain.utils import plugins
from flowtrain.utils.errors import foreign, one_line
from flowtrain.utils.files import writing

GROUP = "flowtrain.loggers"
BUILT_IN = plugins.built_in(
    GROUP, "flowtrain.logging", {name: f"loggers:{name}" for name in ("wandb", "trackio")}
)
_log = logging.getLogger(__name__)
_MAX_WAITING = 1000
_END_S = 30.0


class Logger(Protocol):
    """Receives the metrics of a run in the order of its steps, on the main rank only."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the finite numbers of a step; an evaluation may report an earlier step."""

    def close(self) -> None:
        """Flush pending metrics and close."""


@dataclass(frozen=True, slots=True)
class LoggerContext:
    """The parts that a logger is built from."""

    config: Config
    run_dir: Path
    resume_step: int
    """Step of the resumed checkpoint; below 1 for a new run."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The logger's own table, [plugins.NAME]."""


def open_loggers(config: Config, run_dir: Path, resume_step: int) -> list[Logger]:
    """Open the loggers of `[log]`, except for TensorBoard, which belongs to `MetricsLog`.

    Raises UserError for an unknown logger, a missing package, or a failed start.
    """
    loggers: list[Logger] = []
    with ExitStack() as cleanup:
        for name in config.log.loggers:
            options = config.options_of(name)
            logger = _load(name, LoggerContext(config, run_dir, resume_step, options))
            loggers.append(Background(name, logger))
            cleanup.callback(loggers[-1].close)
        cleanup.pop_all()
    return loggers


def _load(name: str, context: LoggerContext) -> Logger:
    origin = f"log.loggers={name!r}"
    factory = plugins.load(name, origin, "logger", GROUP, BUILT_IN)
    if not callable(factory):
        raise UserError(f"{origin} is not a callable that creates a logger")
    with foreign(origin):
        logger: Logger = factory(context)
    return logger


# ---- the loggers


def open_tensorboard(run_dir: Path, resume_step: int) -> list[Logger]:
    """Open TensorBoard's files; returns [] with a warning if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        _log.warning(
            "TensorBoard is not installed, so no event files are written; install it "
            "with: pip install -e '.[plots]'"
        )
        return []
    return [TensorBoard(run_dir, resume_step)]


class TensorBoard:
    """Writes TensorBoard files into a folder of the run."""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = Path(run_dir) / "tensorboard"
        with writing(self._path):
            self._board = SummaryWriter(str(self._path), purge_step=resume_step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        with writing(self._path):
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
            self._board.flush()

    def close(self) -> None:
        with writing(self._path):
            self._board.close()


class RemoteRun:
    """A run of Weights & Biases, or of a package with its functions."""

    def __init__(self, run: Any, has_steps: bool = False) -> None:
        """`has_steps`: the package takes steps in any order, and the name "step" for itself."""
        self._run, self._has_steps = run, has_steps

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._has_steps:
            self._run.log(dict(numbers), step=step)
        else:
            # As a number among the others: W&B drops what comes for an earlier one of its own
            # steps, as evaluations and the steps after a resume do.
            self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


def wandb(context: LoggerContext) -> RemoteRun:
    """Open the W&B run of this folder; its id lies beside the metrics, so that a run that resumes
    goes on with the same one. `context.options` go to `wandb.init`, as `project` or `tags`.
    """
    module = _package("wandb")
    run = module.init(
        name=context.run_dir.name,
        id=_run_id(context.run_dir / "wandb_id.txt"),
        resume="allow",
        dir=str(context.run_dir),
        config=context.config.model_dump(mode="json"),
        **context.options,
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return RemoteRun(run)


def trackio(context: LoggerContext) -> RemoteRun:
    """Open the Trackio run of this folder. `context.options` go to `trackio.init`, as `project` or
    `space_id`.
    """
    module = _package("trackio")
    run_id = _run_id(context.run_dir / "trackio_id.txt")
    config = context.config.model_dump(mode="json")
    # It knows runs by their names, and other folders may have the same one.
    defaults = {"project": "flowtrain", "name": f"{context.run_dir.name}-{run_id[:8]}"}
    run = module.init(resume="allow", config=config, **{**defaults, **context.options})
    return RemoteRun(run, has_steps=True)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"the logger {name!r} is not installed: pip install -e '.[{name}]'"
        ) from error


def _run_id(path: Path) -> str:
    if not path.exists():
        atomic_write_text(path, uuid.uuid4().hex)
    return path.read_text()


class Background:
    """Calls a logger on its own thread, so that a slow or unavailable service never delays a run. A
    failing logger is disabled with a warning.
    """

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger = name, logger
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_off = self._is_full = False
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._put(lambda: self._logger.log(step, numbers))

    def close(self) -> None:
        """Wait until the logger is done, for at most half a minute."""
        self._waiting.put(self._logger.close)
        self._waiting.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning(
                "the logger %r did not finish within %g s; its last metrics may be missing",
                self._name,
                _END_S,
            )

    def _put(self, work: Callable[[], None]) -> None:
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put(work)
        elif not self._is_full:
            self._is_full = True
            _log.warning("the logger %r is too slow; some metrics are dropped", self._name)

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            # Read on, or the queue would fill and `close` wait in vain.
            if self._is_off:
                continue
            try:
                work()
            except Exception as error:  # noqa: BLE001 - foreign code may fail in any way
                self._is_off = True
                reason = one_line(error)
                _log.warning("the logger %r failed and is disabled: %s", self._name, reason)
