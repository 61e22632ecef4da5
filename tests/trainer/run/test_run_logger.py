"""Rollouts are written beside the run, and are there before what depends on them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flowtrain.config import Config
from flowtrain.logging import RunDir
from flowtrain.records import Rollouts, TrainBatch, UserError
from flowtrain.trainer.devices import MemoryPeak
from flowtrain.trainer.distributed import World
from flowtrain.trainer.run.run_logger import Counted, RunLogger
from flowtrain.trainer.setup.placement import Placement
from tests.make import group, rollout, turn


class SlowDisk:
    """Takes the place of a log of rollouts: writes what it is given once `room` is set."""

    room = threading.Event()
    error: UserError | None = None

    def __init__(self, path: Path, *_: Any) -> None:
        self.path = path

    def log(self, step: int, *_: Any) -> None:
        assert self.room.wait(60)
        if self.error is not None:
            raise self.error
        with (self.path / "steps").open("a") as file:
            file.write(f"{step}\n")


@pytest.fixture
def logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunLogger]:
    monkeypatch.setattr("flowtrain.trainer.run.run_logger.TrajectoryLog", SlowDisk)
    monkeypatch.setattr(SlowDisk, "room", threading.Event())
    world = World(0, 1, torch.device("cpu"))
    place, memory = Placement.colocated(world), MemoryPeak(world.device)
    made = RunLogger(Config(), place, RunDir(tmp_path), memory, start_step=0)
    yield made
    SlowDisk.room.set()
    made.close()


def log(logger: RunLogger, step: int) -> None:
    logger.log(
        step,
        Rollouts((group(rollout(turn())),), {}, {}),
        TrainBatch(()),
        trained={},
        counted=cast(Counted, SimpleNamespace(metrics={})),
        evaluation=None,
        metrics={"train_s": 1.0},
    )


def test_a_step_does_not_wait_until_its_rollouts_are_on_the_disk(
    logger: RunLogger, tmp_path: Path
) -> None:
    log(logger, 1)
    assert not (tmp_path / "steps").exists()
    SlowDisk.room.set()
    logger.flush()
    assert (tmp_path / "steps").read_text() == "1\n"
    log(logger, 2)
    log(logger, 3)
    logger.flush()
    assert (tmp_path / "steps").read_text() == "1\n2\n3\n"


@pytest.mark.parametrize("then", ["flush", "log"])
def test_rollouts_that_could_not_be_written_end_the_run(
    logger: RunLogger, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowDisk, "error", UserError("the disk is full"))
    log(logger, 1)
    SlowDisk.room.set()
    with pytest.raises(UserError, match="the disk is full"):
        logger.flush() if then == "flush" else log(logger, 2)
