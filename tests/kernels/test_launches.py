"""Where kernels are launched, and with how many threads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from flowkernels import logprobs
from flowkernels.implementations import with_launcher
from flowkernels.rows_triton import CAPPED_ONE_PASS, CAPPED_TWO_PASSES, ONE_PASS, two_passes


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on the one that is the thread's, which a thread of an engine has never set."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: found.append(x) or nullcontext())
    logits = torch.randn(2, 5)
    logprobs(logits, torch.tensor([1, 2]), impl="torch")
    assert not found
    logprobs(logits, torch.tensor([1, 2]), impl="triton")
    assert found and all(isinstance(x, torch.Tensor) for x in found)
    assert found[0].data_ptr() == logits.data_ptr()


def test_the_first_tensor_may_be_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: found.append(x) or nullcontext())
    tensor = torch.ones(1)

    def eq(name: str, values: list[torch.Tensor]) -> bool:
        raise AssertionError

    assert with_launcher("operator")(eq)("triton", "text", [tensor]) is False
    assert found == [tensor]


@pytest.mark.parametrize("size", [2, 4])
def test_a_program_has_no_more_threads_than_a_device_allows(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    logits = torch.empty((1, 1 << 18), dtype={2: torch.bfloat16, 4: torch.float32}[size])
    for version, lanes in ((None, 32), ("6.4", 64)):
        monkeypatch.setattr(torch.version, "hip", version)
        for launch in (ONE_PASS, CAPPED_ONE_PASS, CAPPED_TWO_PASSES, two_passes(logits, None)):
            options = launch.options(size)
            assert lanes * options["num_warps"] == options["LANES"] <= 1024
