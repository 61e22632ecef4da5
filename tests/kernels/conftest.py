"""The implementations under test. Triton's kernels run in its interpreter where there is no GPU (see tests/conftest.py)."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kernel_truth")
from kernel_truth import IMPLS  # noqa: E402


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["copy", "inplace"])
def inplace(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
