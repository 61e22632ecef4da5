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

from flowtrain.report.flame import Frame, flame_html
from flowtrain.run import run as runs
from flowtrain.run.profiler import profiled
from flowtrain.run.run import Run
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


def test_the_flame_graph_has_calls_and_operators_of_all_threads(folder: Path) -> None:
    page = (folder / "flame.html").read_text()
    titles = re.findall(r'title="([^"]*): [\d.]+ s,', page)
    assert sum(title.endswith(": multiply") for title in titles) == 2, "on both threads"
    assert titles.count("aten::mm") == 4, "forward and backward"
    assert " at 0x" not in page, "calls of one method on many objects are one frame"
    assert "http" not in page, "it opens without a network"


def test_the_table_says_how_stages_spend_their_time(folder: Path) -> None:
    head, *lines = (folder / "operators.txt").read_text().splitlines()
    assert re.split(r" {2,}", head.strip())[:3] == ["stage", "seconds", "matrix products"]
    stages = {line.split()[0]: line.split()[1:] for line in lines[:2]}
    assert list(stages) == ["collect", "train"]
    for _, *shares in stages.values():
        assert float(shares[0].rstrip("%")) > 0
        assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.5)
    assert any(line.split()[1:] == ["6", "aten::mm"] for line in lines), "three in each stage"


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
        placement=SimpleNamespace(world=SimpleNamespace(is_main=is_main, device=None)),
        run_dir=SimpleNamespace(profile=None),
    )
    seen = [(step, is_on) for step in Run.steps(run)]
    assert [step for step, _ in seen] == list(range(start + 1, 6))
    assert [step for step, was_on in seen if was_on] == expected and not is_on


def test_a_frame_is_as_wide_as_its_share_of_its_caller() -> None:
    root = Frame()
    step = root.add("step <1>", 4.0)
    step.add("train", 3.0)
    step.add("train", 0.5)
    step.add("tiny", 1e-6)
    page = flame_html("A & B", root)
    assert "<title>A &amp; B</title>" in page and "step &lt;1&gt;: 4.000 s, 100.0%" in page
    assert "train: 3.500 s, 87.5%" in page and "--share:0.87500" in page
    assert "tiny" not in page
