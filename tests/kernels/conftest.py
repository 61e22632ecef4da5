"""The implementations under test. Triton's kernels run in its interpreter where there is no GPU
(see tests/conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from kernel_truth import IMPLS

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.speed_up()


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
