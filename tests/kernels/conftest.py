"""The implementations under test; where there is no GPU Triton's kernels are interpreted."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from kernel_truth import IMPLS

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.speed_up()


COMPOSED = ("test_operators.py", "test_rival_parity.py", "test_trl_parity.py")
"""Files about what is built from kernels which other files test case by case."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the interpreter one case of each test of COMPOSED; a GPU runs all."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    seen: set[tuple[str, str]] = set()
    chosen = []
    for item in items:
        if item.path.name in COMPOSED and "triton" in item.name.partition("[")[2]:
            case = (item.path.name, getattr(item, "originalname", item.name))
            if case in seen:
                continue
            seen.add(case)
        chosen.append(item)
    items[:] = chosen


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["copy", "inplace"])
def inplace(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Number of torch's threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
