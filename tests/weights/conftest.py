"""A store in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.weights import WeightStore


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")
