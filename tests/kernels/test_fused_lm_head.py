"""The walk over a head's chunks: what it computes and holds, the same for any size of a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flowkernels import LossSpec, TokenLoss, Tokens, linear_logprobs, token_loss
from flowkernels.lm_head import Gradients, LMHead, new_head
from kernel_truth import IMPLS, Batch, on_device, peak_bytes, plain_rows
from rows import (
    HEAD,
    ROW,
    SETTINGS,
    SPECS,
    VOCAB,
    batch_of,
    cases,
    close,
    head_batch,
    ours,
    plain_logits,
    plain_scores,
    truth,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def of_kernels(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("name", "impl"), [(name, impl) for name, _, impl in cases(names, ["head"])]
    )


class Seen:
    """Keeps the rows of each product, and how many chunks of logits there were at one time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[int] = []
        self.num_alive = 0
        self.gradients: list[int] = []
        """Rows in each chunk that took part in the products for the gradients."""
        chunks: list[StorageWeakRef] = []
        of_head, of_gradients = LMHead.logits, Gradients.add

        def logits(head: LMHead, hidden_CD: Tensor) -> Tensor:
            logits_CV = of_head(head, hidden_CD)
            chunks.append(StorageWeakRef(logits_CV.untyped_storage()))
            self.logits.append(len(logits_CV))
            self.num_alive = max(self.num_alive, sum(not chunk.expired() for chunk in chunks))
            return logits_CV

        def add(gradients: Gradients, *arguments: Any) -> None:
            before = gradients.num_rows
            of_gradients(gradients, *arguments)
            self.gradients.append(gradients.num_rows - before)

        monkeypatch.setattr(LMHead, "logits", logits)
        monkeypatch.setattr(Gradients, "add", add)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def whole_batch(num_tokens: int = 19, **options: Any) -> Batch:
    """Every row counts, so that chunks are not put together from rows here and there."""
    batch = head_batch(num_tokens, **options)
    batch["weight_T"] = torch.where(batch["weight_T"] == 0, 0.7, batch["weight_T"])
    batch["target_ids_T"] = batch["target_ids_T"] % VOCAB
    return batch


@pytest.mark.parametrize("has_holes", [True, False], ids=["holes", "whole"])
@of_kernels("all", "gspo-all", "own", "clip", "gspo-z-loss")
def test_the_size_of_a_chunk_changes_nothing(name: str, impl: str, has_holes: bool) -> None:
    """Holds whether rows without gradient are left out or not."""
    setting = {"temperature": torch.linspace(0.5, 2.5, 19), "softcap": 8.0}
    batch = head_batch(**setting) if has_holes else whole_batch(**setting)
    once, gradients = ours(SPECS[name], batch, impl)
    for num_rows, compact in ((1, True), (3, False)):
        budget = num_rows * ROW + 5
        out, found = ours(SPECS[name], batch, impl, memory_budget=budget, compact=compact)
        results = [(x.loss, x.logprob_T, x.entropy_T, x.stats) for x in (out, once)]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        close(found, gradients)
    assert once.loss.abs() > 0.1


@pytest.mark.parametrize("num_rows", [1, 3, 8, 19])
@pytest.mark.parametrize("has_holes", [True, False], ids=["holes", "whole"])
def test_gspo_of_sequences_shorter_and_longer_than_a_chunk(has_holes: bool, num_rows: int) -> None:
    """Sequences of no tokens too, at the beginning, in the middle and at the end."""
    batch, spec = head_batch() if has_holes else whole_batch(), SPECS["gspo-all"]
    batch["cu_seqlens_S1"] = torch.tensor([0, 0, 2, 4, 13, 13, 14, 16, 19, 19])
    loss, true, _ = truth(spec, batch)
    for compact in (True, False):
        out, found = ours(spec, batch, "torch", memory_budget=num_rows * ROW, compact=compact)
        assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
        close(found, true)


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (torch.bfloat16, {}, 16 + 40),
        (torch.bfloat16, {"fp32_logits": True}, 16 + 40 // 3),
        (torch.bfloat16, {"memory_budget": 2**20 * 2 * 16}, 16),
        (torch.bfloat16, {"frozen": True}, 16),
        (torch.float32, {}, 16),
    ],
)
def test_one_chunk_where_it_takes_no_more_memory_else_equal_ones(
    dtype: torch.dtype, options: dict[str, Any], most: int
) -> None:
    """By default 2^23 logits: 16 rows, beside dW in fp32. In one chunk a trained head of 16 bits
    has dW in 16 bits instead, which spares as much as 40 rows of logits in 16 bits take.
    """
    weight = torch.empty(2**20, 40, dtype=dtype, requires_grad="frozen" not in options)
    given = {"fp32_logits": False, "memory_budget": None}
    given |= {name: value for name, value in options.items() if name != "frozen"}
    head = new_head(weight[:1].detach(), weight, None, **given)

    def sizes(num_rows: int) -> list[int]:
        return [len(range(*c.indices(num_rows))) for c in head.over(num_rows).chunks(num_rows)]

    assert sizes(0) == [] and sizes(most) == [most] and max(sizes(most + 1)) <= 16
    assert sizes(65) == [13] * 5 and sizes(33) == ([33] if most > 32 else [11] * 3)


def test_one_chunk_takes_no_more_memory_than_several() -> None:
    """As many rows as one chunk may have: their logits and dW, beside a copy of the weight."""
    num_vocab, dim, num_tokens = 2**18, 32, 64
    batch = head_batch(num_tokens, dim, num_vocab, dtype=torch.bfloat16) | {"bias_V": None}
    batch["weight_T"], batch["target_ids_T"] = torch.ones(64), torch.arange(64)
    one, several = (
        peak_bytes(lambda budget=budget: ours(SPECS["nll"], batch, "torch", memory_budget=budget))
        for budget in (None, 2 * num_vocab * 32)
    )
    by_hand = 2 * num_vocab * (num_tokens + 2 * dim)
    assert by_hand <= one <= 1.01 * by_hand and one < several


LONG, SHORT = [0, 3, 18, 19], [0, 2, 2, 5, 9, 10, 15, 19]
"""Sequences of which one takes three chunks of five rows, and that all fit one."""


@pytest.mark.parametrize(
    ("name", "bounds"), [(x, LONG) for x in ("clip", "gspo", "own", "scores")] + [("gspo", SHORT)]
)
def test_no_two_chunks_of_logits_are_there_at_one_time(
    name: str, bounds: list[int], seen: Seen
) -> None:
    """Checked forward and backward. A loss of rows computes its logits once, and so does one of
    sequences that fit a chunk. (Triton's interpreter holds on to what it was given.)
    """
    batch = whole_batch() | {"cu_seqlens_S1": torch.tensor(bounds)}
    if name == "scores":
        few = {key: batch[key] for key in (*HEAD, "target_ids_T")}
        linear_logprobs(**few, memory_budget=5 * ROW, impl="torch")
    else:
        ours(SPECS[name], batch, "torch", memory_budget=5 * ROW)
    assert len(seen.logits) >= 4 and max(seen.logits) == 5
    assert sum(seen.logits) == 19 or (name, bounds) in (("gspo", LONG), ("own", LONG))
    assert seen.num_alive == 1


def batch_of_four_kinds() -> tuple[Batch, Tensor]:
    """(rows without weight, advantage, within the clip, with a gradient; which have one)."""
    batch = whole_batch(20)
    kind = torch.arange(20) // 5
    logp = plain_rows(plain_logits(batch), batch["target_ids_T"])[0].float()
    batch["old_logprob_T"] = torch.where(kind == 2, logp - 1, logp + 0.01)
    batch["advantage_T"] = torch.where(kind == 1, 0.0, 1.0)
    batch["weight_T"] = torch.where(kind == 0, 0.0, 0.5)
    batch["cu_seqlens_S1"] = torch.tensor([0, 5, 10, 15, 20])
    return batch, kind == 3


def clip_of_ones_own(tokens: Tokens) -> TokenLoss:
    return token_loss(LossSpec(), tokens)


OF_KINDS = {"clip": LossSpec(), "gspo": LossSpec("gspo"), "own": clip_of_ones_own}


@pytest.mark.parametrize("chunk", [3, 20])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", OF_KINDS)
def test_rows_without_gradient_take_no_part_in_the_products(
    name: str, shuffle: bool, chunk: int, seen: Seen
) -> None:
    """Rows of weight 0 not even in the first."""
    batch, is_active = batch_of_four_kinds()
    if shuffle and name != "gspo":
        order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
        is_active = is_active[order]
        batch |= {
            key: value[order]
            for key, value in batch.items()
            if key.endswith("_T") or key == "hidden_TD"
        }
    _, gradients = ours(OF_KINDS[name], batch, "torch", memory_budget=chunk * ROW)
    assert sum(seen.gradients) == 5 and sum(seen.logits) <= 30
    assert name != "clip" or sum(seen.logits) == 15
    assert (gradients["hidden_TD"] != 0).any(1).tolist() == is_active.tolist()
    true = truth(LossSpec("gspo") if name == "gspo" else LossSpec(), batch)[1]
    close(gradients, true)
    if name != "own":
        seen.logits.clear(), seen.gradients.clear()
        options = {"memory_budget": chunk * ROW, "compact": False}
        close(ours(OF_KINDS[name], batch, "torch", **options)[1], true)
        assert sum(seen.gradients) == 20 and sum(seen.logits) >= 20


@pytest.mark.parametrize("which", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("setting", ["per-token", "mask-softcap"])
@pytest.mark.parametrize("impl", IMPLS[:1])
def test_log_probs_are_differentiable_by_any_upstream_gradients(
    setting: str, which: tuple[int, ...], impl: str
) -> None:
    """Of log-prob, entropy and log-sum-exp. Some are 0, some targets negative."""
    batch = batch_of("head", **SETTINGS[setting])
    rng = torch.Generator().manual_seed(2)
    upstream = torch.randn(3, 20, generator=rng) * torch.tensor(which)[:, None]
    upstream[:, 4:8] = 0
    rows = batch["target_ids_T"] >= 0
    leaves = {name: batch[name].double().requires_grad_() for name in HEAD}
    scores = plain_scores({**batch, **leaves}, rows)
    (upstream[:, rows] * torch.stack(scores)).sum().backward()
    names = (*HEAD, "target_ids_T", "temperature", "softcap", "sampling_mask")
    given = on_device({name: batch[name] for name in names if name in batch}, impl)
    given |= {name: given[name].requires_grad_() for name in HEAD}
    options = {"memory_budget": 5 * ROW, "impl": impl}
    quiet = linear_logprobs(**given, **options)
    out = linear_logprobs(**given, **options, differentiable=True)
    total = 0
    for name, true_T, upstream_T in zip(
        ("logprob_T", "entropy_T", "lse_T"), scores, upstream, strict=True
    ):
        found_T, quiet_T = getattr(out, name), getattr(quiet, name)
        assert torch.equal(found_T, quiet_T) and not quiet_T.requires_grad
        found = found_T.detach().cpu().double()
        assert (found[~rows] == 0).all()
        torch.testing.assert_close(found[rows], true_T.detach(), rtol=1e-6, atol=5e-6)
        if upstream_T.any():
            total = total + (found_T * upstream_T.to(found_T)).sum()
    total.backward()
    close(
        {name: given[name].grad.cpu() for name in HEAD},
        {name: leaf.grad for name, leaf in leaves.items()},
    )


@of_kernels("all", "gspo-all", "own")
def test_two_runs_agree_to_the_bit(name: str, impl: str) -> None:
    (out, gradients), (again, same) = (
        ours(SPECS[name], head_batch(), impl, memory_budget=5 * ROW) for _ in range(2)
    )
    assert torch.equal(out.loss, again.loss) and out.loss.isfinite()
    assert all(torch.equal(value, again.stats[stat]) for stat, value in out.stats.items())
    for key, gradient in gradients.items():
        assert torch.equal(gradient, same[key]) and gradient.any()


def test_only_the_rows_that_count_are_multiplied(seen: Seen) -> None:
    """Of scores too."""
    batch = head_batch()
    few = {name: batch[name] for name in (*HEAD, "target_ids_T")}
    linear_logprobs(**few, memory_budget=5 * ROW)
    assert sum(seen.logits) == (batch["target_ids_T"] >= 0).sum() < 19
