"""The files that `run.profile` leaves, and which steps they are of."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.logging.profiler import profiled
from flowtrain.trainer.run import run as runs
from flowtrain.trainer.run.run import Run
from flowtrain.utils.step_timer import StepTimer


def multiply() -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    (weight @ weight).sum().backward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of one step, which trains here and samples on a thread that was there before."""
    path = tmp_path_factory.mktemp("run") / "profile"
    timer = StepTimer()
    with ThreadPoolExecutor(1) as engine:
        engine.submit(int).result()
        with profiled(path, torch.device("cpu")):
            with timer("collect"):
                engine.submit(multiply).result()
            with timer("train"):
                multiply()
    return path


def test_the_trace_has_the_stages(folder: Path) -> None:
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert {"stage collect", "stage train"} <= {each.get("name") for each in trace["traceEvents"]}


def test_the_table_has_operators_of_all_threads(folder: Path) -> None:
    lines = (folder / "operators.txt").read_text().splitlines()
    assert any(re.match(r" *aten::mm .* 6 *$", line) for line in lines), "three in each stage"


@pytest.mark.parametrize(
    ("number", "is_main", "start", "expected"),
    [
        (0, True, 0, []),
        (2, True, 0, [2, 3]),
        (9, True, 3, [5]),
        (2, True, 4, []),
        (2, False, 0, []),
    ],
)
def test_the_steps_after_the_first_are_profiled_on_the_main_rank(
    monkeypatch: pytest.MonkeyPatch, number: int, is_main: bool, start: int, expected: list[int]
) -> None:
    is_on = False

    @contextmanager
    def spy(path: Path, device: torch.device) -> Iterator[None]:
        nonlocal is_on
        is_on = True
        yield
        is_on = False

    monkeypatch.setattr(runs, "profiled", spy)
    run: Any = SimpleNamespace(
        start_step=start,
        config=SimpleNamespace(
            run=SimpleNamespace(profile=number), train=SimpleNamespace(num_steps=5)
        ),
        components=SimpleNamespace(world=SimpleNamespace(is_main=is_main, device=None)),
        logger=SimpleNamespace(run_dir=SimpleNamespace(profile=None)),
    )
    seen = [(step, is_on) for step in Run.steps(run)]
    assert [step for step, _ in seen] == list(range(start + 1, 6))
    assert [step for step, was_on in seen if was_on] == expected and not is_on
