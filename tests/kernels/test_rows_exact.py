"""Rows of real vocabularies against fp64, beside what plain torch gives in bf16; and sizes at which
indices overflow.

The requirement is error <= 1 * (error of plain torch in bf16) + floor, on bf16 logits; on fp32
logits the floor alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, logprobs, policy_loss, statistics, token_loss
from kernel_truth import (
    BF16_ROUNDING,
    Batch,
    counted,
    device_of,
    on_device,
    plain_rows,
    random_batch,
)
from rows import close, ours, truth
from torch import Tensor

KINDS = ("wide", "negative", "one-hot hit", "one-hot missed", "uniform")


def hard_rows(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(logits, targets): |z| up to 60, all below -100, one-hot rows hit and missed, uniform."""
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.empty(len(KINDS), vocab)
    logits[0].uniform_(-60, 60, generator=rng)
    logits[1].uniform_(-160, -101, generator=rng)
    logits[2:4].normal_(generator=rng)
    logits[4], logits[0, -1], logits[0, 0] = -7.25, -60.0, 60.0
    logits = logits.to(dtype)
    targets = torch.randint(vocab, (len(KINDS),), generator=rng)
    targets[0] = vocab - 1
    logits[2, targets[2]], logits[3, (targets[3] + vocab // 2) % vocab] = 60.0, 60.0
    return logits, targets


def score_floor(logits: Tensor, temperature: float) -> Tensor:
    """[T] fp32 rounds each of x and max x in units of the temperature, their difference and the
    logarithm by 6e-8, relatively; so much is lost of the range of z (for the lse: of its size), and
    1e-6 by the sums over V.
    """
    span = (logits.amax(-1) - logits.amin(-1)).double()
    return 1e-6 + 2.4e-7 * torch.maximum(span, logits.abs().amax(-1).double()) / temperature


def gradient_floor(
    logits: Tensor, targets: Tensor, temperature: float, a: Tensor, c: Tensor
) -> Tensor:
    """[T, V] p is off relatively by what log p is off absolutely: p (a + c (log p + H)) by that
    times p (|a| + |c| (|log p + H| + 1)).
    """
    logp_all = (logits.double() / temperature).log_softmax(-1)
    p, entropy = logp_all.exp(), -(logp_all.exp() * logp_all).sum(-1, keepdim=True)
    size = p * (a.abs()[:, None] + c.abs()[:, None] * ((logp_all + entropy).abs() + 1))
    size.scatter_add_(1, targets[:, None], a.abs()[:, None].double())
    return score_floor(logits, temperature)[:, None] * size / temperature + 1e-30


CELLS = [
    (129_920, torch.bfloat16, 5.0),
    (32_003, torch.float32, 0.1),
    (257, torch.bfloat16, 1.0),
    (257, torch.float32, 1.0),
]
"""Vocabularies (one that ends within a block of every dtype, one that is odd, and one below a
block), dtypes and temperatures."""


@pytest.mark.parametrize("way", ["fused", "two-pass"])
@pytest.mark.parametrize(("vocab", "dtype", "temperature"), CELLS)
def test_scores_and_gradients_of_hard_rows(
    vocab: int, dtype: torch.dtype, temperature: float, way: str, impl: str
) -> None:
    """The kernel of the loss, and those of scores and of their gradients."""
    spec, batch = LossSpec("nll", entropy_coef=0.3), random_batch(len(KINDS), 3)
    logits, targets = hard_rows(vocab, dtype)
    batch |= {"logits_TV": logits, "target_ids_T": targets, "temperature": temperature}
    batch["weight_T"] = torch.tensor([0.5, -1.0, 1.0, 2.0, 0.7])
    true_loss, true, true_scores = truth(spec, batch)
    _, plain, plain_scores = truth(spec, batch, torch.bfloat16)
    given = spec if way == "fused" else partial(token_loss, spec)
    out, gradients = ours(given, batch, impl, inplace=True)
    few = on_device({name: batch[name] for name in ("logits_TV", "target_ids_T")}, impl)
    lse_T = logprobs(**few, temperature=temperature, impl=impl).lse_T.cpu()
    floor = score_floor(logits, temperature)
    for found_T, true_T, plain_T in zip(
        (out.logprob_T, out.entropy_T, lse_T), true_scores, plain_scores, strict=True
    ):
        error = (found_T.double() - true_T).abs()
        assert (error <= floor).all(), dict(zip(KINDS, (error / floor).tolist(), strict=True))
        assert dtype == torch.float32 or error.max() <= (plain_T - true_T).abs().max()
    a, c = batch["weight_T"] * batch["advantage_T"], 0.3 * batch["weight_T"]
    assert (out.loss - true_loss).abs() <= ((a.abs() + c.abs()) * floor).sum()
    error, exact = (gradients["logits_TV"] - true["logits_TV"]).abs(), true["logits_TV"].abs()
    rounding = 0.0 if dtype == torch.float32 else BF16_ROUNDING
    bound = gradient_floor(logits, targets, temperature, a, c) + rounding * exact
    assert (error <= bound).all(), (error - bound).amax(-1)
    if dtype == torch.bfloat16:
        most = (plain["logits_TV"] - true["logits_TV"]).abs().max() + rounding * exact.max()
        assert error.max() <= most


def many_tokens(vocab: int) -> Batch:
    """70,000 tokens of which 20 count: every 3500th, the last one among them."""
    num_tokens = 70_000
    batch = random_batch(num_tokens, vocab)
    is_counted = torch.arange(num_tokens) % 3500 == 3499
    batch["weight_T"] = torch.where(
        is_counted, torch.randn(num_tokens, generator=torch.Generator().manual_seed(4)), 0.0
    )
    batch["target_ids_T"] = batch["target_ids_T"].clamp(min=0)
    assert is_counted[-1] and is_counted.sum() == 20
    return batch


@pytest.mark.parametrize("name", ["clip", "gspo"])
def test_more_tokens_than_16_bits_count(name: str, inplace: bool) -> None:
    """The reference in full: all tokens have a weight."""
    batch = many_tokens(9)
    batch["weight_T"] = batch["weight_T"] + 1.0
    spec = LossSpec(name, entropy_coef=0.1)
    out, gradients = ours(spec, batch, "torch", inplace=inplace)
    true_loss, true, _ = truth(spec, batch)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-4)
    close(gradients, true)
    assert out.stats["num_tokens_sum"].item() == 70_000


def run_only(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the programs of these rows of the loss alone: an ignored row costs the interpreter
    2 ms.
    """
    from flowkernels import policy_loss_triton
    from triton.runtime.interpreter import interpreter_builder as builder

    kernel = policy_loss_triton.loss_kernel
    set_dim = builder.set_grid_dim
    set_index = builder.set_grid_idx
    is_loss = [False]

    class OfRows:
        def __getitem__(self, _: tuple[int]) -> Any:
            return kernel[(len(rows),)]

    def set_dims(*size: int) -> None:
        is_loss[0] = size[0] == len(rows)  # the statistics have programs of their own
        set_dim(*((rows[-1] + 1, 1, 1) if is_loss[0] else size))

    def set_indices(x: int, *others: int) -> None:
        set_index(rows[x] if is_loss[0] else x, *others)

    monkeypatch.setattr(policy_loss_triton, "loss_kernel", OfRows())
    monkeypatch.setattr(builder, "set_grid_dim", set_dims)
    monkeypatch.setattr(builder, "set_grid_idx", set_indices)


@pytest.fixture
def overflow_is_checked() -> Iterator[None]:
    if device_of("triton") == "cuda":
        yield
        return
    import interpreter

    interpreter.check_overflow(True)
    yield
    interpreter.check_overflow(False)


@pytest.mark.usefixtures("overflow_is_checked")
def test_more_tokens_than_16_bits_count_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows on a GPU; in the interpreter those that count."""
    batch = many_tokens(33)
    rows = counted(batch)
    if device_of("triton") == "cpu":
        run_only(rows.nonzero()[:, 0].tolist(), monkeypatch)
    spec = LossSpec(entropy_coef=0.1)
    out, gradients = ours(spec, batch, "triton")
    true_loss, true, _ = truth(spec, batch)
    gradient, true_gradient = gradients["logits_TV"], true["logits_TV"]
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-4)
    torch.testing.assert_close(gradient[rows].double(), true_gradient[rows], rtol=1e-4, atol=2e-6)
    assert (gradient[-1] != 0).any() and out.stats["num_tokens_sum"].item() == 20
    if device_of("triton") == "cuda":
        assert (gradient[~rows] == 0).all() and (out.logprob_T[~rows] == 0).all()


@pytest.mark.usefixtures("overflow_is_checked")
def test_statistics_of_more_tokens_than_16_bits_count() -> None:
    from flowkernels import policy_loss_triton
    from flowkernels.statistics import Column

    rng = torch.Generator().manual_seed(8)
    columns = torch.randn(Column.NUM, 70_001, generator=rng)
    columns[Column.IS_CLIPPED] = (columns[Column.IS_CLIPPED] > 1).float()
    weight = torch.randn(70_001, generator=rng).clamp(min=0)
    targets = torch.randint(-1, 3, (70_001,), generator=rng)
    weight[-1], targets[-1], columns[Column.LOG_RATIO, -1] = 1.0, 2, 9.0
    expected_loss, expected = statistics.reduce("torch", columns.double(), weight.double(), targets)
    device = device_of("triton")
    moved = (x.to(device) for x in (columns, weight, targets))
    loss, stats = policy_loss_triton.reduce(*moved)
    torch.testing.assert_close(loss.cpu().double(), expected_loss, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(stats.cpu().double(), expected.double(), rtol=1e-4, atol=1e-3)
    found = statistics.by_name(stats)["ratio_max"].item()
    assert found == pytest.approx(math.exp(9.0)), "the last token counts"


@pytest.mark.usefixtures("overflow_is_checked")
def test_elements_beyond_32_bits(impl: str) -> None:
    """Row 8 of a buffer of 4.3 GB, of which only what is looked at is ever touched."""
    vocab, stride = 151_936, 2**28
    device = device_of(impl)
    buffer = torch.empty(8 * stride + vocab, dtype=torch.bfloat16, device=device)
    logits = buffer.as_strided((9, vocab), (stride, 1))
    written = torch.randn(2, vocab, generator=torch.Generator().manual_seed(6)).bfloat16()
    logits[0], logits[8] = written[0].to(device), written[1].to(device)
    targets = torch.full((9,), -1)
    targets[0], targets[8] = 17, vocab - 1
    logp, entropy, lse = plain_rows(written.double(), targets[[0, 8]])
    out = logprobs(logits, targets.to(device), impl=impl)
    for ours_T, true_T in zip(
        (out.logprob_T, out.entropy_T, out.lse_T), (logp, entropy, lse), strict=True
    ):
        torch.testing.assert_close(ours_T.cpu()[[0, 8]].double(), true_T, rtol=0, atol=2e-5)
        assert (ours_T.cpu()[1:8] == 0).all()
    # In place, the gradient lands there too: a_j (p_j - [j = y]).
    logits.requires_grad_()
    ones = torch.ones(9, device=device)
    policy_loss(
        logits,
        targets.to(device),
        spec=LossSpec("nll"),
        advantage_T=ones,
        weight_T=ones,
        inplace=True,
        impl=impl,
    ).loss.backward()
    gradient = written.double().softmax(-1)
    gradient[[0, 1], targets[[0, 8]]] -= 1
    bound = (BF16_ROUNDING + 1e-4) * gradient.abs() + 1e-9
    for held in (logits.grad, logits.detach()):
        assert held is not None and ((held[[0, 8]].cpu().double() - gradient).abs() <= bound).all()
        assert (held[1:8].abs().amax(-1) == 0).all()
