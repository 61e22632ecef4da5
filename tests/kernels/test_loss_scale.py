"""A loss scale keeps small gradients of fp16 from being rounded to 0, if it comes before that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flowkernels import LossSpec, linear_policy_loss, policy_loss
from torch import Tensor

NUM, VOCAB, SIZE, SCALE = 16, 300, 8, 2.0**13
Loss = Callable[[Tensor, Tensor, float], Tensor]


def of_rows(inputs: Tensor, weight: Tensor, scale: float, **options: bool | str) -> Tensor:
    """`inputs` are hidden states."""
    return _of(policy_loss, scale, inputs @ weight.T, **options)


def of_hidden(inputs: Tensor, weight: Tensor, scale: float, **options: str) -> Tensor:
    return _of(linear_policy_loss, scale, inputs, weight, **options)


def _of(loss: Callable[..., object], scale: float, *tensors: Tensor, **options: object) -> Tensor:
    targets, ones = torch.arange(NUM) % VOCAB, torch.ones(NUM)
    weights = scale * ones / 1e4  # as of a batch with so many tokens
    result = loss(*tensors, targets, spec=LossSpec(), advantage_T=ones, weight_T=weights, **options)
    value: Tensor = result.loss  # type: ignore[attr-defined]
    return value


def inputs_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(NUM, SIZE), 2 * torch.randn(VOCAB, SIZE)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype)


FORMS = {
    "rows": of_rows,
    "over the rows": lambda *inputs, **options: of_rows(*inputs, inplace=True, **options),
    "hidden": of_hidden,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_scale_of_fp16_goes_into_the_weights(form: str, impl: str) -> None:
    hidden, weight = inputs_of(torch.float32)
    FORMS[form](hidden, weight, 1.0, impl=impl).backward()
    exact = hidden.grad
    hidden, weight = inputs_of(torch.float16)
    with pytest.raises(RuntimeError, match="was rounded before scaling by 8192: scale weight"):
        (SCALE * FORMS[form](hidden, weight, 1.0, impl=impl)).backward()
    hidden, weight = inputs_of(torch.float16)
    FORMS[form](hidden, weight, SCALE, impl=impl).backward()
    torch.testing.assert_close(hidden.grad.float() / SCALE, exact, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_takes_a_loss_scale_and_fp16_a_share(form: str, impl: str) -> None:
    for dtype, factor in ((torch.bfloat16, SCALE), (torch.float16, 0.5), (torch.float16, 1.0)):
        hidden, weight = inputs_of(dtype)
        (factor * FORMS[form](hidden, weight, 1e4, impl=impl)).backward()
        assert hidden.grad.isfinite().all() and hidden.grad.any()
