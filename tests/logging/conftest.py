"""A rollout to log and a disk that is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make
import pytest
from make import call, rollout

from flowtrain.records import Action, Task, ToolResult, Trajectory, Turn, Verdict, VersionSpan


class FullFile:
    """A file on a disk with room for half of what is written next."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> None:
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From the call on, files whose name contains the given part can no longer be written."""
    real_open = Path.open

    def fill(part: str = "") -> None:
        def open_file(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = real_open(self, mode, *args, **kwargs)
            return FullFile(file) if part in self.name and mode in ("ab", "wb") else file

        monkeypatch.setattr(Path, "open", open_file)

    return fill


def make_turn(action: Action | None, text: str = "raw response", **changes: Any) -> Turn:
    spans = VersionSpan(0, 1, 6), VersionSpan(1, 2, 7)
    said = call((4, 5), (1, 2, 3), (-0.123456789, -2.0), text=text, spans=spans)
    fields = {
        "arguments": '{"query": "Chad"}',
        "result": ToolResult(output="N'Djamena", seconds=0.1),
        "verdict": Verdict.STOP,
        "seconds": 0.5,
        "plan_s": 0.25,
    }
    return make.turn(said, action, **{**fields, **changes})


@pytest.fixture
def trajectory() -> Trajectory:
    """Two turns: a malformed one, then a lookup that answers the question."""
    lookup = Action("because", "the question", "Find the capital of Chad", "Lookup_Tool")
    malformed = make_turn(
        None,
        text="I would\nrather chat",
        problem="no action",
        verdict=Verdict.CONTINUE,
    )
    task = Task(
        "texts-17", "What is the capital of Chad?", ("N'Djamena", "Ndjamena"), "lookup", 1, "exact"
    )
    turns = malformed, make_turn(lookup)
    more = {"seconds": 1.25, "seed": 11, "truncated": "turns", "reward": 0.75}
    return rollout(*turns, task=task, answer="N'Djamena", **more)
