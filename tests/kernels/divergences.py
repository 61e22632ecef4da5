"""Divergences as plain formulas, and what tests of a student's loss share."""

from __future__ import annotations

from typing import Any

import torch
from kernel_truth import Batch, on_device
from torch import Tensor

LEARNT = ("hidden_TD", "weight_VD", "bias_V")
"""Tensors of the student, which get gradients."""


def plain_divergence(log_p: Tensor, log_q: Tensor, divergence: str, mix: float) -> Tensor:
    """Of each row; p is the student's."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        """A term of probability 0 is 0."""
        a = log_a.exp()
        return torch.where(a > 0, a * (log_a - log_b), 0.0).sum(1)

    if divergence == "reverse_kl":
        return kl(log_p, log_q)
    if divergence == "forward_kl":
        return kl(log_q, log_p)
    log_m = (mix * log_q.exp() + (1 - mix) * log_p.exp()).log()
    return mix * kl(log_q, log_m) + (1 - mix) * kl(log_p, log_m)


def leaves(b: Batch, impl: str) -> Batch:
    """The batch where `impl` runs."""
    bare = on_device({name: x.detach() for name, x in b.items()}, impl)
    return {name: x.requires_grad_(b[name].requires_grad) for name, x in bare.items()}


def gradients(loss: Tensor, b: Batch) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [b[name] for name in LEARNT]))


def near(impl: str) -> dict[str, Any]:
    """Tolerances: the reference computes in fp64, kernels in fp32."""
    return {"rtol": 1e-11, "atol": 1e-12} if impl == "torch" else {"rtol": 2e-4, "atol": 2e-5}
