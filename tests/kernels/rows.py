"""Losses of rows, and the forms in which a loss gets its rows: what `test_row_losses.py` holds
against the plain formulas of `kernel_truth`.

`SPECS` lists the losses, `FORMS` the ways. Tests take both from `cases`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from flowkernels import (
    LossSpec,
    PolicyLoss,
    TokenLoss,
    TokenLossFn,
    Tokens,
    linear_policy_loss,
    policy_loss,
)
from kernel_truth import (
    IMPLS,
    Batch,
    counted,
    counted_tokens,
    mask_of,
    on_device,
    plain_loss,
    plain_rows,
    random_batch,
    subsets_of,
)
from torch import Tensor

HEAD = ("hidden_TD", "weight_VD", "bias_V")
"""What has a gradient where a loss makes its logits itself."""
VOCAB = 17
ROW = 4 * VOCAB
"""Bytes of a row of fp32 logits."""
Gradients = dict[str, Tensor]
Loss = LossSpec | TokenLossFn


def squared(tokens: Tokens) -> TokenLoss:
    """A loss of one's own, of a kind no spec has: (logp - old)^2, three times that where it is
    negative, -A logp and 0.1 H^2 beside it.
    """
    difference_T = tokens.logprob_T - tokens.old_logprob_T
    factor_T = torch.where(difference_T < 0, 3.0, 1.0)
    return TokenLoss(
        loss_T=factor_T * difference_T**2
        - tokens.advantage_T * tokens.logprob_T
        + 0.1 * tokens.entropy_T**2,
        dlogprob_T=2 * factor_T * difference_T - tokens.advantage_T,
        dentropy_T=0.2 * tokens.entropy_T,
        log_ratio_T=difference_T,
        is_clipped_T=difference_T > 0.5,
        kl_T=difference_T**2 / 2,
    )


def plain_squared(logp: Tensor, entropy: Tensor, tokens: Batch) -> Tensor:
    weight, old, advantage = (
        tokens[name].to(logp.dtype) for name in ("weight_T", "old_logprob_T", "advantage_T")
    )
    up, down = (logp - old).clamp(min=0), (old - logp).clamp(min=0)
    return (weight * (up**2 + 3 * down**2 - advantage * logp + 0.1 * entropy**2)).sum()


_MANY: dict[str, Any] = {"kl_coef": 0.2, "entropy_coef": 0.1, "tis": 2.0, "mis": (0.5, 2.5)}
SPECS: dict[str, Loss] = {
    "clip": LossSpec(),
    "clip-higher": LossSpec(clip_low=0.2, clip_high=0.3),
    "dual": LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=1.5),
    "gspo": LossSpec("gspo", clip_low=0.1, clip_high=0.05),
    "gspo-dual": LossSpec("gspo", clip_high=0.3, dual_clip=1.2),
    "cispo": LossSpec("cispo", clip_high=0.1),
    "nll": LossSpec("nll"),
    "k1": LossSpec(kl="k1", kl_coef=0.4),
    "k2": LossSpec(kl="k2", kl_coef=0.4),
    "k3": LossSpec(kl="k3", kl_coef=0.4),
    "k3-entropy": LossSpec(kl="k3", kl_coef=0.4, entropy_coef=0.3),
    "entropy": LossSpec(entropy_coef=0.3),
    "tis": LossSpec(tis=1.2),
    "mis": LossSpec(mis=(0.6, 1.5)),
    "mis-open": LossSpec(mis=(0.6, math.inf)),
    "released": LossSpec(
        clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl="low_var_kl", kl_coef=0.001
    ),
    "all": LossSpec(clip_low=0.1, clip_high=0.4, dual_clip=1.5, kl="k2", **_MANY),
    "gspo-all": LossSpec("gspo", **_MANY),
    "cispo-all": LossSpec("cispo", kl="k1", **_MANY | {"tis": 0.8, "clip_high": 0.1}),
    "nll-all": LossSpec("nll", kl="k1", kl_coef=0.2, entropy_coef=-0.1),
    "z-loss": LossSpec(z_loss_coef=0.03),
    "gspo-z-loss": LossSpec("gspo", kl_coef=0.2, entropy_coef=0.1, z_loss_coef=0.03),
    "own": squared,
}
MAIN = ("all", "gspo-all", "nll")
"""The fused way with every term, the one that scores whole sequences first, and the fused one with
the fewest terms."""
BRANCHES = (*MAIN, "cispo-all", "released", "gspo-z-loss", "own")
"""Together they take every branch of the kernels."""
FORMS: dict[str, dict[str, Any]] = {
    "logits": {},
    "inplace": {"inplace": True},
    "head": {},
    "chunks": {"memory_budget": 5 * ROW},
}
"""Options of the loss: of logits, of logits that the gradient goes over, of hidden states and a
head in one chunk, and of these without a bias in chunks of five rows of fp32."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "per-token": {"temperature": torch.linspace(0.5, 2.5, 20)},
    "softcap": {"temperature": 0.7, "softcap": 3.0},
    "mask": {"temperature": 1.3, "masked": True},
    "mask-softcap": {"temperature": 0.7, "softcap": 1.5, "masked": True},
}
"""Options of `batch_of`: how logits become log-probs."""


def cases(
    names: Iterable[str] = MAIN, forms: Iterable[str] = FORMS, kernels: Collection[str] = MAIN
) -> list[tuple[str, str, str]]:
    """(name, form, impl): all in torch. In Triton's interpreter an operation takes a tenth of a
    millisecond: it gets `kernels` of logits, "all" and "gspo-all" in place, and "all" of a head,
    which is made of the same kernels.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    few = {("all", "inplace"), ("gspo-all", "inplace"), ("all", "head")}
    few |= {(name, "logits") for name in kernels}
    return [
        (name, form, impl)
        for name in names
        for form in forms
        for impl in IMPLS
        if impl == "torch" or not is_interpreted or (name, form) in few
    ]


def batch_of(
    form: str,
    num_tokens: int = 20,
    vocab: int = VOCAB,
    *,
    dim: int = 24,
    dtype: torch.dtype = torch.float32,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    masked: bool = False,
) -> Batch:
    """`random_batch` as a form has it: with hidden states and a head in place of logits."""
    batch = random_batch(num_tokens, vocab, temperature)
    ids = batch["target_ids_T"] % vocab
    before = plain_rows(batch["logits_TV"], ids, temperature)[0]
    options: Batch = {"temperature": temperature, "softcap": softcap}
    subsets = some_subsets(batch["target_ids_T"], vocab) if masked else None
    if subsets is not None:
        options["sampling_mask"] = mask_of(subsets)
    if form in ("head", "chunks"):
        rng = torch.Generator().manual_seed(dim)
        shapes = ((num_tokens, dim), (vocab, dim), (vocab,))
        hidden, weight, bias = (torch.randn(shape, generator=rng) for shape in shapes)
        head = (2 / dim**0.5 * hidden, weight, 0.5 * bias)
        batch |= zip(HEAD, (x.to(dtype) for x in head), strict=True)
        del batch["logits_TV"]
        if form == "chunks":
            batch["bias_V"] = None
    else:
        batch["logits_TV"] = batch["logits_TV"].to(dtype)
    logits = plain_logits(batch).float()
    shift = plain_rows(logits, ids, temperature, softcap, subsets)[0] - before
    near = {f"{name}_logprob_T": batch[f"{name}_logprob_T"] for name in ("old", "ref", "sampler")}
    return {**batch, **options, **{name: value + shift for name, value in near.items()}}


def head_batch(num_tokens: int = 19, dim: int = 24, vocab: int = VOCAB, **options: Any) -> Batch:
    return batch_of("head", num_tokens, vocab, dim=dim, **options)


def some_subsets(target_ids_T: Tensor, vocab: int = VOCAB, seed: int = 7) -> list[list[int]]:
    """Masks of every kind, with the target and without, whose ids come in any order."""
    rng = torch.Generator().manual_seed(seed)
    subsets: list[list[int]] = []
    for row, target in enumerate((target_ids_T % vocab).tolist()):
        others = [i for i in torch.randperm(vocab, generator=rng).tolist() if i != target]
        at, own = others[: row % 5 + 2], [target]
        kinds = [[], own, others[:1], [*at, *own], at, [*at[:1], *own, *at[1:]]]
        subsets.append(kinds[row % 6])
    subsets[-1] = list(range(vocab - 1, -1, -1))
    return subsets


def leaves_of(batch: Batch) -> tuple[str, ...]:
    """What has a gradient."""
    names = ("logits_TV",) if "logits_TV" in batch else HEAD
    return tuple(name for name in names if batch[name] is not None)


def plain_logits(batch: Batch, dtype: torch.dtype = torch.float64) -> Tensor:
    if "logits_TV" in batch:
        logits: Tensor = batch["logits_TV"].to(dtype)
        return logits
    hidden, weight, bias = (None if batch[x] is None else batch[x].to(dtype) for x in HEAD)
    return torch.nn.functional.linear(hidden, weight, bias)


def plain_scores(
    batch: Batch, rows: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) of these rows (bool [T])."""
    temperature, mask = batch.get("temperature", 1.0), batch.get("sampling_mask")
    if isinstance(temperature, Tensor):
        temperature = temperature[rows]
    subsets = None if mask is None else subsets_of(mask.at(rows.nonzero()[:, 0]))
    logits, ids = plain_logits(batch, dtype)[rows], batch["target_ids_T"][rows]
    return plain_rows(logits, ids, temperature, batch.get("softcap"), subsets)


def truth(
    spec: Loss, batch: Batch, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Gradients, tuple[Tensor, Tensor, Tensor]]:
    """Loss, gradients (fp64), and (logp, entropy, lse) of the rows that count, of the plain formula
    by autograd. Head and softmax are in `dtype`, of which bf16 is what plain torch would do; the
    loss is in fp64.
    """
    leaves = {
        name: batch[name].detach().to(dtype, copy=True).requires_grad_()
        for name in leaves_of(batch)
    }
    scores = plain_scores({**batch, **leaves}, counted(batch), dtype)
    logp, entropy, lse = (x.double() for x in scores)
    tokens = counted_tokens(batch)
    if isinstance(spec, LossSpec):
        loss = plain_loss(spec, logp, entropy, lse, tokens)
    else:
        loss = plain_squared(logp, entropy, tokens)
    loss.backward()
    gradients = {name: leaf.grad.double() for name, leaf in leaves.items() if leaf.grad is not None}
    return loss.detach(), gradients, (logp.detach(), entropy.detach(), lse.detach())


def loss_of(spec: Loss, batch: Batch, impl: str = "torch", **options: Any) -> PolicyLoss:
    """Return `policy_loss` or `linear_policy_loss`, by what the batch has."""
    function: Any = policy_loss if "logits_TV" in batch else linear_policy_loss
    out: PolicyLoss = function(**batch, **options, spec=spec, impl=impl)
    return out


def ours(
    spec: Loss,
    batch: Batch,
    impl: str,
    *,
    scale: float = 1.0,
    needs: Collection[str] | None = None,
    **options: Any,
) -> tuple[PolicyLoss, Gradients]:
    """The result of a loss, and the gradients that it times `scale` leaves, on the CPU."""
    moved = on_device(batch, impl)
    leaves = {
        name: moved[name].detach().clone().requires_grad_(needs is None or name in needs)
        for name in leaves_of(batch)
    }
    out = loss_of(spec, {**moved, **leaves}, impl, **options)
    (out.loss * scale).backward()
    given = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    own = moved["logits_TV" if "logits_TV" in moved else "hidden_TD"].dtype
    assert out.loss.dtype == (own if own == torch.float64 else torch.float32)
    assert all(gradient.dtype == leaves[name].dtype for name, gradient in given.items())
    out = replace(
        out,
        loss=out.loss.detach().cpu(),
        logprob_T=out.logprob_T.cpu(),
        entropy_T=out.entropy_T.cpu(),
        stats={name: value.cpu() for name, value in out.stats.items()},
    )
    return out, {name: gradient.cpu() for name, gradient in given.items()}


def close(
    gradients: Gradients,
    true: Gradients,
    rtol: float = 1e-4,
    atol: float = 5e-6,
    factor: float = 1.0,
) -> None:
    assert set(gradients) == set(true)
    for name, gradient in gradients.items():
        assert true[name].abs().max() > 0.01, f"{name} would be close to anything"
        torch.testing.assert_close(
            gradient.double(),
            factor * true[name].double(),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def of_rows(batch: Batch, rows: Tensor) -> Batch:
    """The batch of these rows alone (bool [T])."""
    index = rows.nonzero()[:, 0]
    found = {
        name: value[index]
        if isinstance(value, Tensor)
        and (name.endswith(("_T", "_TV", "_TD")) or name == "temperature")
        else value
        for name, value in batch.items()
    }
    ends = [int(rows[:bound].sum()) for bound in batch["cu_seqlens_S1"]]
    found["cu_seqlens_S1"] = torch.tensor(ends)
    if batch.get("sampling_mask") is not None:
        found["sampling_mask"] = batch["sampling_mask"].at(index)
    return found


def with_garbage(batch: Batch) -> Batch:
    """The batch with anything at all in rows that do not count."""
    batch, rows = dict(batch), counted(batch)
    assert (~rows & (batch["weight_T"] == 0)).sum() >= 3
    assert (~rows & (batch["target_ids_T"] < 0)).sum() >= 2
    num = int((~rows).sum())
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e30]).repeat(num)[:num]
    tokens = ("old_logprob_T", "ref_logprob_T", "sampler_logprob_T", "advantage_T")
    for name in (*tokens, "logits_TV", "hidden_TD"):
        if name in batch:
            batch[name] = batch[name].clone()
            width = batch[name].dim() - 1
            batch[name][~rows] = garbage.view(-1, *[1] * width).to(batch[name].dtype)
    return batch
