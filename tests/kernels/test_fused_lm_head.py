"""The walk over a head's chunks: what it computes, how often, what it holds, and that the results
are the same for any size of a chunk.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flowkernels import (
    LossSpec,
    TokenLoss,
    Tokens,
    linear_logprobs,
    linear_policy_loss,
    token_loss,
)
from flowkernels.lm_head import Gradients, LMHead, new_head
from kernel_truth import Batch, counted, mask_of, on_device, peak_bytes, plain_rows
from test_linear_loss import (
    HEAD,
    MAIN,
    SPECS,
    close,
    head_batch,
    head_truth,
    ours,
    squared,
    temperatures,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

VOCAB = 17
ROW = 4 * VOCAB
"""Bytes of a row of fp32 logits."""


class Seen:
    """Keeps the number of rows of each product, forward and backward, and how many chunks of logits
    were there at one time.
    """

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


def whole_batch(num_tokens: int = 19) -> Batch:
    """Every row counts, so that chunks are not put together from rows here and there."""
    batch = head_batch(num_tokens, temperature=temperatures(num_tokens))
    batch["weight_T"] = torch.where(batch["weight_T"] == 0, 0.7, batch["weight_T"])
    batch["target_ids_T"] = batch["target_ids_T"] % VOCAB
    return batch


def same(first: tuple[Any, dict[str, Tensor]], second: tuple[Any, dict[str, Tensor]]) -> None:
    found = [(x.loss, x.logprob_T, x.entropy_T, x.stats) for x, _ in (first, second)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    close(first[1], {name: value.double() for name, value in second[1].items()})


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all-rows"])
@pytest.mark.parametrize("has_holes", [True, False], ids=["holes", "whole"])
@pytest.mark.parametrize("name", [*MAIN, "clip"])
def test_the_size_of_a_chunk_changes_nothing(
    name: str, has_holes: bool, compact: bool, impl: str
) -> None:
    """Holds whether rows without gradient are left out or not."""
    batch = head_batch(temperature=temperatures()) if has_holes else whole_batch()
    options = {"temperature": temperatures(), "softcap": 8.0}
    once = ours(SPECS[name], batch, impl, **options)
    for num_rows in (1, 3):
        chunked = ours(
            SPECS[name], batch, impl, **options, memory_budget=num_rows * ROW + 5, compact=compact
        )
        same(chunked, once)
    assert once[0].loss.abs() > 0.1


@pytest.mark.parametrize("num_rows", [1, 3, 8, 19])
@pytest.mark.parametrize("has_holes", [True, False], ids=["holes", "whole"])
def test_gspo_of_sequences_shorter_and_longer_than_a_chunk(
    has_holes: bool, num_rows: int, impl: str
) -> None:
    """Sequences of no tokens too, at the beginning, in the middle and at the end."""
    batch = head_batch() if has_holes else whole_batch()
    batch["cu_seqlens_S1"] = torch.tensor([0, 0, 2, 4, 13, 13, 14, 16, 19, 19])
    for compact in (True, False):
        out, gradients = ours(
            SPECS["gspo-all"], batch, impl, memory_budget=num_rows * ROW, compact=compact
        )
        true_loss, true_gradients, _ = head_truth(SPECS["gspo-all"], batch)
        assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
        close(gradients, true_gradients)


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (torch.bfloat16, {}, 16 + 40),
        (torch.bfloat16, {"fp32_logits": True}, 16 + 40 // 3),
        (torch.bfloat16, {"memory_budget": 2**20 * 2 * 16}, 16),
        (torch.bfloat16, {"frozen": True}, 16),
        (torch.float16, {"batch_invariant": True}, 16),
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
    given = {"fp32_logits": False, "memory_budget": None, "batch_invariant": False}
    given |= {name: value for name, value in options.items() if name != "frozen"}
    head = new_head(weight[:1].detach(), weight, None, **given)

    def sizes(num_rows: int) -> list[int]:
        return [len(range(*c.indices(num_rows))) for c in head.over(num_rows).chunks(num_rows)]

    assert sizes(0) == [] and sizes(most) == [most] and max(sizes(most + 1)) <= 16
    assert sizes(65) == [13] * 5 and sizes(33) == ([33] if most > 32 else [11] * 3)


def test_one_chunk_takes_no_more_memory_than_several(seen: Seen) -> None:
    """As many rows as one chunk may have: their logits and dW, beside a copy of the weight. Scores
    are taken in the same chunk, and their gradient too.
    """
    num_vocab, dim, num_tokens = 2**18, 32, 64
    batch = head_batch(num_tokens, dim, num_vocab, dtype=torch.bfloat16) | {"bias_V": None}
    batch["weight_T"], batch["target_ids_T"] = torch.ones(64), torch.arange(64)
    one, several = (
        peak_bytes(lambda budget=budget: ours(SPECS["nll"], batch, "torch", memory_budget=budget))
        for budget in (None, 2 * num_vocab * 32)
    )
    by_hand = 2 * num_vocab * (num_tokens + 2 * dim)
    assert by_hand <= one <= 1.01 * by_hand and one < several
    few = {name: batch[name] for name in (*HEAD, "target_ids_T")}
    few["weight_VD"].requires_grad_()
    linear_logprobs(**few, differentiable=True).logprob_T.sum().backward()
    assert seen.logits == [64, 32, 32, 64, 64] and seen.gradients == [64, 32, 32, 64]


@pytest.mark.parametrize("name", ["k3-entropy", "clip", "nll"])
def test_logits_of_a_loss_of_rows_are_computed_once(name: str, impl: str, seen: Seen) -> None:
    """Three products: in chunks of five, of which no two are there at one time."""
    ours(SPECS[name], whole_batch(), impl, memory_budget=5 * ROW, compact=False)
    assert seen.logits == seen.gradients == [5, 5, 5, 4]


def test_logits_of_sequences_within_a_chunk_are_computed_once(impl: str, seen: Seen) -> None:
    batch = whole_batch() | {"cu_seqlens_S1": torch.tensor([0, 2, 2, 5, 9, 10, 15, 19])}
    ours(
        SPECS["gspo-all"],
        batch | {"sampler_logprob_T": batch["old_logprob_T"]},
        impl,
        memory_budget=5 * ROW,
        compact=False,
    )
    assert seen.logits == seen.gradients == [5, 5, 5, 4], (
        "sequences go together as long as they fit"
    )


def test_logits_of_a_long_sequence_are_computed_twice(impl: str, seen: Seen) -> None:
    """All of them but for those of a chunk that is still there."""
    batch = whole_batch() | {"cu_seqlens_S1": torch.tensor([0, 3, 18, 19])}
    ours(SPECS["gspo"], batch, impl, memory_budget=5 * ROW, compact=False)
    assert seen.gradients == [3, 5, 5, 5, 1] and max(seen.logits) == 5
    assert 3 + 15 + 10 + 1 <= sum(seen.logits) <= 3 + 15 + 15 + 1


def test_chunks_of_a_long_sequence_without_a_gradient_are_not_computed_again(
    impl: str, seen: Seen
) -> None:
    """The first of two has no advantage."""
    batch = whole_batch() | {"cu_seqlens_S1": torch.tensor([0, 10, 19])}
    batch["advantage_T"] = torch.where(torch.arange(19) < 10, 0.0, 1.0)
    batch["old_logprob_T"] = linear_logprobs(
        **{key: batch[key] for key in (*HEAD, "target_ids_T")}
    ).logprob_T
    seen.logits.clear()
    _, gradients = ours(LossSpec("gspo"), batch, impl, memory_budget=5 * ROW)
    assert seen.logits == [5, 5, 5, 4, 5, 4] and sum(seen.gradients) == 9
    assert not gradients["hidden_TD"][:10].any() and gradients["hidden_TD"][10:].any(1).all()
    close(gradients, head_truth(LossSpec("gspo"), batch)[1])


def test_logits_of_a_loss_of_ones_own_are_computed_twice(impl: str, seen: Seen) -> None:
    ours(squared, whole_batch(), impl, memory_budget=5 * ROW)
    assert seen.logits == [5, 5, 5, 4] * 2 and seen.gradients == [5, 5, 5, 4]


@pytest.mark.parametrize("name", ["clip", "gspo", "own", "scores"])
def test_no_two_chunks_of_logits_are_there_at_one_time(name: str, seen: Seen) -> None:
    """Checked forward and backward; for GSPO, a sequence of three chunks. (Triton's interpreter
    holds on to what it was given.)
    """
    batch = whole_batch() | {"cu_seqlens_S1": torch.tensor([0, 3, 18, 19])}
    if name == "scores":
        linear_logprobs(
            **{key: batch[key] for key in (*HEAD, "target_ids_T")},
            memory_budget=5 * ROW,
            impl="torch",
        )
    else:
        ours(SPECS[name], batch, "torch", memory_budget=5 * ROW)
    assert len(seen.logits) >= 4 and max(seen.logits) == 5
    assert seen.num_alive == 1


def batch_of_four_kinds() -> tuple[Batch, Tensor]:
    """(rows of weight 0, of advantage 0, clipped away, and with a gradient, in turn; which have
    one). All in one sequence per kind.
    """
    batch = whole_batch(20)
    kind = torch.arange(20) % 4
    order = kind.argsort(stable=True)
    for name in ("hidden_TD", "target_ids_T", "old_logprob_T"):
        batch[name] = batch[name][order]  # four sequences of five rows
    kind = kind[order]
    logp = plain_rows(
        batch["hidden_TD"] @ batch["weight_VD"].T + batch["bias_V"], batch["target_ids_T"]
    )[0]
    batch["old_logprob_T"] = torch.where(kind == 2, logp - 1, logp + 0.01)
    batch["advantage_T"] = torch.where(kind == 1, 0.0, 1.0)
    batch["weight_T"] = torch.where(kind == 0, 0.0, 0.5)
    batch["cu_seqlens_S1"] = torch.tensor([0, 5, 10, 15, 20])
    return batch, kind == 3


def clip_of_ones_own(tokens: Tokens) -> TokenLoss:
    return token_loss(LossSpec(), tokens)


@pytest.mark.parametrize("chunk", [3, 20])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", ["clip", "gspo", "own"])
def test_rows_without_gradient_take_no_part_in_the_products(
    name: str, shuffle: bool, chunk: int, impl: str, seen: Seen
) -> None:
    """Rows of weight 0 not even in the first."""
    batch, is_active = batch_of_four_kinds()
    if shuffle and name != "gspo":
        order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
        is_active = is_active[order]
        batch = {
            key: value[order] if key.endswith("_T") or key == "hidden_TD" else value
            for key, value in batch.items()
        }
    spec = {"clip": LossSpec(), "gspo": LossSpec("gspo"), "own": clip_of_ones_own}[name]
    _, gradients = ours(spec, batch, impl, memory_budget=chunk * ROW)
    assert sum(seen.gradients) == 5
    assert (
        sum(seen.logits)
        in {"clip": [15], "gspo": [15] if chunk == 20 else range(17, 31), "own": [15 + 5]}[name]
    )
    assert (gradients["hidden_TD"] != 0).any(1).tolist() == is_active.tolist()
    close(gradients, head_truth(LossSpec("gspo") if name == "gspo" else LossSpec(), batch)[1])
    if name != "own":
        seen.logits.clear(), seen.gradients.clear()
        _, same_gradients = ours(spec, batch, impl, memory_budget=chunk * ROW, compact=False)
        assert sum(seen.gradients) == 20 and sum(seen.logits) >= 20
        close(
            same_gradients,
            {key: value.double() for key, value in gradients.items()},
            rtol=1e-5,
            atol=1e-6,
        )


def test_a_chunk_with_few_idle_rows_is_taken_as_it_is(impl: str, seen: Seen) -> None:
    """One row of twelve is not worth a copy of the others."""
    batch = whole_batch(12)
    batch["advantage_T"] = torch.where(torch.arange(12) == 5, 0.0, 1.0)
    _, gradients = ours(SPECS["nll"], batch, impl)
    assert seen.gradients == [12] and not gradients["hidden_TD"][5].any()
    close(gradients, head_truth(SPECS["nll"], batch)[1])


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"memory_budget": ROW - 1},
        r"memory_budget=67 bytes must hold at least one row of logits, which takes 68",
    ),
    (
        {"hidden_TD": torch.zeros(19, 24, dtype=torch.int64)},
        r"hidden_TD must be .* \[T, D\] or .*, got torch.int64",
    ),
    (
        {"hidden_TD": torch.zeros(1, 19, 24)},
        r"target_ids_T must be int64 \[1, 19\] \(or int32\), got int64 \(19,\)",
    ),
    (
        {"weight_VD": torch.zeros(VOCAB, 23)},
        r"weight_VD must be \[V, D=24\] like hidden_TD, got \(17, 23\)",
    ),
    (
        {"weight_VD": torch.zeros(VOCAB, 24).bfloat16()},
        r"weight_VD must be torch.float32 on cpu, as hidden_TD, got torch.bfloat16",
    ),
    ({"bias_V": torch.zeros(VOCAB).half()}, r"bias_V must be torch.float32 .* got torch.float16"),
    ({"bias_V": torch.zeros(VOCAB + 1)}, r"bias_V must be \[V=17\], got \(18,\)"),
    ({"target_ids_T": torch.full((19,), VOCAB)}, r"target_ids_T must be below V=17"),
    ({"impl": "cuda"}, r"impl='cuda' must be one of"),
]
WRONG_LOSS: list[tuple[dict[str, Any], str]] = [
    ({"spec": LossSpec("gspo"), "cu_seqlens_S1": None}, r"loss_type='gspo' needs cu_seqlens_S1"),
    ({"weight_T": torch.zeros(18)}, r"weight_T must be float32 \[19\]"),
]


@pytest.mark.parametrize(("wrong", "message"), [*WRONG, *WRONG_LOSS])
def test_wrong_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**{**head_batch(), "spec": SPECS["clip"], **wrong})


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_arguments_of_log_probs_are_named(wrong: dict[str, Any], message: str) -> None:
    few = {name: head_batch()[name] for name in (*HEAD, "target_ids_T")}
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**{**few, **wrong})


def test_the_budget_of_fp32_logits_holds_a_gradient_of_16_bits_too() -> None:
    batch = head_batch(dtype=torch.bfloat16)
    few = {name: batch[name] for name in (*HEAD, "target_ids_T")}
    with pytest.raises(ValueError, match=r"memory_budget=101 bytes .* takes 102"):
        linear_logprobs(**few, memory_budget=6 * VOCAB - 1, fp32_logits=True)
    linear_logprobs(**few, memory_budget=6 * VOCAB, fp32_logits=True)
    with pytest.raises(ValueError, match="takes 34"):
        linear_logprobs(**few, memory_budget=2 * VOCAB - 1)


@pytest.mark.parametrize("which", ["both", "logprob", "entropy"])
@pytest.mark.parametrize("has_mask", [False, True], ids=["all-ids", "mask"])
def test_log_probs_are_differentiable_by_any_upstream_gradient(
    which: str, has_mask: bool, impl: str
) -> None:
    """Some upstream gradients are 0, some targets negative."""
    batch = head_batch(temperature=temperatures())
    rng = torch.Generator().manual_seed(2)
    subsets = [
        torch.randperm(VOCAB, generator=rng)[: (0, 1, 4, 9)[row % 4]].tolist() for row in range(19)
    ]
    upstream = (
        torch.randn(2, 19, generator=rng)
        * torch.tensor([which != "entropy", which != "logprob"])[:, None]
    )
    upstream[:, 4:8] = 0
    rows = batch["target_ids_T"] >= 0
    true = {name: batch[name].double().requires_grad_() for name in HEAD}
    logits = (true["hidden_TD"] @ true["weight_VD"].T + true["bias_V"])[rows]
    of_rows = (
        [ids for ids, row in zip(subsets, rows.tolist(), strict=True) if row] if has_mask else None
    )
    scores = plain_rows(logits, batch["target_ids_T"][rows], temperatures()[rows], 6.0, of_rows)
    (upstream[0, rows] * scores[0] + upstream[1, rows] * scores[1]).sum().backward()
    mask = mask_of(subsets) if has_mask else None
    moved = on_device(
        {
            **{name: batch[name] for name in (*HEAD, "target_ids_T")},
            "temperature": temperatures(),
            "sampling_mask": mask,
        },
        impl,
    )
    leaves = {name: moved[name].requires_grad_() for name in HEAD}
    quiet = linear_logprobs(**moved, softcap=6.0, memory_budget=5 * ROW, impl=impl)
    out = linear_logprobs(
        **moved, softcap=6.0, memory_budget=5 * ROW, differentiable=True, impl=impl
    )
    for ours_T, quiet_T, true_T in zip(
        (out.logprob_T, out.entropy_T, out.lse_T),
        (quiet.logprob_T, quiet.entropy_T, quiet.lse_T),
        scores,
        strict=True,
    ):
        assert (
            torch.equal(ours_T, quiet_T)
            and not quiet_T.requires_grad
            and (ours_T[~rows] == 0).all()
        )
        torch.testing.assert_close(
            ours_T.detach().cpu()[rows].double(), true_T.detach(), rtol=1e-6, atol=5e-6
        )
    total = sum(
        (x * y.to(x)).sum()
        for x, y in zip((out.logprob_T, out.entropy_T), upstream, strict=True)
        if y.any()
    )
    total.backward()
    close(
        {name: leaf.grad.cpu() for name, leaf in leaves.items()},
        {name: leaf.grad for name, leaf in true.items()},
    )


@pytest.mark.parametrize("name", MAIN)
def test_two_runs_agree_to_the_bit(name: str, impl: str) -> None:
    first, second = (ours(SPECS[name], head_batch(), impl, memory_budget=5 * ROW) for _ in range(2))
    assert torch.equal(first[0].loss, second[0].loss) and first[0].loss.isfinite()
    assert all(torch.equal(value, second[0].stats[stat]) for stat, value in first[0].stats.items())
    assert all(
        torch.equal(gradient, second[1][key]) and gradient.any()
        for key, gradient in first[1].items()
    )


def test_only_the_rows_that_count_are_multiplied(impl: str, seen: Seen) -> None:
    batch = head_batch()
    moved = on_device({name: batch[name] for name in (*HEAD, "target_ids_T")}, impl)
    linear_logprobs(**moved, memory_budget=5 * ROW, impl=impl)
    assert sum(seen.logits) == (batch["target_ids_T"] >= 0).sum() < 19
    seen.logits.clear()
    ours(SPECS["clip"], batch, impl, memory_budget=5 * ROW)
    assert sum(seen.logits) == counted(batch).sum() < 16 and max(seen.logits) == 5


@pytest.mark.parametrize("name", MAIN)
def test_operands_may_have_any_strides(name: str, impl: str) -> None:
    """Hidden states cut out of longer rows, and a weight that is stored the other way round."""
    batch = head_batch()
    moved = on_device(batch, impl)
    wide, across = (
        moved["hidden_TD"].repeat(2, 2).requires_grad_(),
        moved["weight_VD"].t().contiguous().requires_grad_(),
    )
    out = linear_policy_loss(
        **{**moved, "hidden_TD": wide[::2, 24:][:19], "weight_VD": across.t()},
        spec=SPECS[name],
        impl=impl,
    )
    out.loss.backward()
    assert wide.grad is not None and across.grad is not None
    rows = torch.arange(0, 38, 2) % 19
    wanted = ours(SPECS[name], batch | {"hidden_TD": batch["hidden_TD"][rows]}, impl)
    torch.testing.assert_close(out.loss, wanted[0].loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        wide.grad[::2, 24:].cpu(), wanted[1]["hidden_TD"], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(across.grad.t().cpu(), wanted[1]["weight_VD"], rtol=1e-5, atol=1e-6)
    assert not wide.grad[1::2].any() and not wide.grad[:, :24].any()
