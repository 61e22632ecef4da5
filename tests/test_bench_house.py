"""The lines of bench.house, in a checkout small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import house

FILES = {
    "flowtrain/__init__.py": 1,
    "flowtrain/train.py": 20,
    "flowtrain/types/task.py": 3,
    "flowtrain/training/tree/pack.py": 5,
    "flowtrain/agents/agentflow/flow.py": 7,
    "flowtrain/view/page.js": 900,
    "kernels/flowkernels/loss.py": 11,
    "csrc/delta.cpp": 13,
    "csrc/delta.h": 2,
    "bench/step.py": 17,
    "tests/test_step.py": 19,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, number in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n" * number)
    return tmp_path


def test_lines_are_those_of_the_sources_by_room(checkout: Path) -> None:
    found = house.rooms(checkout)
    assert found == {
        "flowtrain/__init__.py": 1,
        "flowtrain/agents": 7,
        "flowtrain/train.py": 20,
        "flowtrain/training": 5,
        "flowtrain/types": 3,
        "kernels": 11,
        "csrc": 15,
        "bench": 17,
        "tests": 19,
    }
    assert house.totals(found) == {"the core": 28, "the product": 62, "all": 98}


def test_two_checkouts_stand_side_by_side(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    house.main([str(checkout), str(checkout), "--json", str(tmp_path / "lines.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["before", "after"]
    (line,) = (line for line in lines if "flowtrain/training" in line)
    assert line.split() == ["*", "flowtrain/training", "5", "5"]
    written = json.loads((tmp_path / "lines.json").read_text())
    assert written["before"] == written["after"] and written["after"]["the core"] == 28


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of flowtrain"):
        house.rooms(tmp_path)
