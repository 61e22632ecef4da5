"""`policy_loss` against the loss that TRL releases: the same number and the same gradient by the
logits, on the same tensors.

TRL's `GRPOTrainer._compute_loss` is called as it is, on an object that holds the attributes it
reads and whose log-probs come from a plain log-softmax of a leaf tensor, so that autograd through
TRL's own code is the reference. Ours sees the packed completion tokens only. L: longest completion,
S: sequences, T: completion tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, policy_loss, token_weights
from flowkernels.token_weights import Averaging
from torch import Tensor

pytest.importorskip("trl")
from trl import GRPOTrainer

LENGTHS = (7, 3, 0, 5, 2, 4)
"""One completion is masked as a whole, as `mask_truncated_completions` does."""
ADVANTAGES = (1.3, -0.7, 0.5, -1.1, 0.4, -0.9)
LOG_RATIOS = (0.5, -0.5, 0.0, 0.7, -0.4, 0.1)
"""Centres of the sequences' log-ratios: past each clip with each sign of A, and within."""
VOCAB, MAX_LENGTH, TEMPERATURE, TIS = 67, 9, 0.8, 1.2

AVERAGINGS: dict[str, tuple[Averaging, int | None]] = {
    "grpo": ("sequence", None),
    "bnpo": ("token", None),
    "dapo": ("token", None),
    "cispo": ("token", None),
    "dr_grpo": ("constant", MAX_LENGTH),
    "luspo": ("constant", 1),
}
"""The arguments of `token_weights` that are TRL's loss type."""


@dataclass(frozen=True)
class Setting:
    """A configuration in TRL's words, with two differences: `epsilon_high` is 1 lower than TRL's
    for "cispo", which has there the bound of the ratio itself, and `delta` is above 1 +
    epsilon_high, as TRL recommends (below, TRL bounds positive advantages by it too).
    """

    loss_type: str = "grpo"
    is_sequence: bool = False
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    tis: bool = False
    accumulation: int = 1
    steps_per_generation: int = 1
    bias_correction_kl: bool = False
    entropy_coef: float = 0.0

    def spec(self) -> LossSpec:
        return LossSpec(
            loss_type="cispo"
            if self.loss_type == "cispo"
            else "gspo"
            if self.is_sequence
            else "clip",
            clip_low=self.epsilon,
            clip_high=self.epsilon_high,
            dual_clip=self.delta,
            kl_coef=self.beta,
            kl_ratio=self.bias_correction_kl,
            tis=TIS if self.tis else None,
            entropy_coef=self.entropy_coef,
        )


LOSSES = {
    **{name: Setting(name) for name in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo")},
    "gspo": Setting("grpo", is_sequence=True),
    "gspo-luspo": Setting("luspo", is_sequence=True),
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.3},
    "delta": {"epsilon_high": 0.3, "delta": 1.7},
    "kl": {"beta": 0.3},
    "tis": {"tis": True},
    "all": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.7, "beta": 0.3, "tis": True},
}


@dataclass(frozen=True)
class Batch:
    """Padded, as TRL has it."""

    logits_SLV: Tensor
    ids_SL: Tensor
    mask_SL: Tensor
    """bool: the completions."""
    trained_SL: Tensor
    """bool: without the tokens that a tool wrote."""
    old_SL: Tensor
    ref_SL: Tensor
    sampler_SL: Tensor
    advantage_S: Tensor

    def packed(self, value_SL: Tensor) -> Tensor:
        return value_SL[self.mask_SL]

    def bounds(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.mask_SL.sum(1).cumsum(0)])


def random_batch() -> Batch:
    rng = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    logits = 2 * torch.randn(*shape, VOCAB, generator=rng)
    ids = torch.randint(VOCAB, shape, generator=rng)
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    trained = mask.clone()
    trained[0, 2:4] = False
    logp = token_logprobs(logits, ids)
    old = logp - torch.tensor(LOG_RATIOS)[:, None] - 0.2 * torch.randn(shape, generator=rng)
    ref = logp + 0.5 * torch.randn(shape, generator=rng)
    sampler = old + 0.3 * torch.randn(shape, generator=rng)
    return Batch(logits, ids, mask, trained, old, ref, sampler, torch.tensor(ADVANTAGES))


def token_logprobs(logits_SLV: Tensor, ids_SL: Tensor) -> Tensor:
    return (logits_SLV / TEMPERATURE).log_softmax(-1).gather(-1, ids_SL[:, :, None])[:, :, 0]


def entropies(logits_SLV: Tensor) -> Tensor:
    logp_SLV = (logits_SLV / TEMPERATURE).log_softmax(-1)
    return -(logp_SLV.exp() * logp_SLV).sum(-1)


def trl_stub(setting: Setting) -> SimpleNamespace:
    """Exactly what `_compute_loss` reads of its trainer; anything else is an AttributeError."""

    def score(
        model: Tensor, input_ids: Tensor, _: Tensor, logits_to_keep: int, **__: object
    ) -> tuple[Tensor, Tensor, None]:
        return token_logprobs(model, input_ids[:, -logits_to_keep:]), entropies(model), None

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=score,
        loss_type=setting.loss_type,
        importance_sampling_level="sequence" if setting.is_sequence else "token",
        epsilon_low=setting.epsilon,
        epsilon_high=setting.epsilon_high + (1 if setting.loss_type == "cispo" else 0),
        beta=setting.beta,
        use_vllm=setting.tis,
        vllm_importance_sampling_correction=True,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=setting.accumulation,
        args=SimpleNamespace(
            delta=setting.delta,
            use_bias_correction_kl=setting.bias_correction_kl,
            steps_per_generation=setting.steps_per_generation,
        ),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        entropy_coef=setting.entropy_coef,
        _entropy_bonus_enabled=setting.entropy_coef != 0,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )


def trl_loss(
    setting: Setting,
    batch: Batch,
    sampler_ratio: Tensor | None = None,
    num_items: int | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(loss, gradient by the logits of the packed tokens, metrics) of TRL; tokens that are not
    trained get no gradient.
    """
    if sampler_ratio is None:
        sampler_ratio = (
            sequence_ratio(batch) if setting.is_sequence else token_ratio(batch)
        ).clamp(max=TIS)
    trainer = trl_stub(setting)
    logits = batch.logits_SLV.clone().requires_grad_()
    prompt = torch.zeros(len(LENGTHS), 2, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": batch.ids_SL,
        "completion_mask": batch.mask_SL.long(),
        "tool_mask": (batch.trained_SL | ~batch.mask_SL).long(),
        "advantages": batch.advantage_S,
        "old_per_token_logps": batch.old_SL,
        "ref_per_token_logps": batch.ref_SL,
        "importance_sampling_ratio": sampler_ratio,
        "num_items_in_batch": torch.tensor(num_items or int(batch.trained_SL.sum())),
    }
    loss = GRPOTrainer._compute_loss(trainer, logits, inputs)
    loss.backward()
    assert logits.grad is not None and (logits.grad[~batch.trained_SL] == 0).all()
    return (
        loss.detach(),
        logits.grad[batch.mask_SL],
        {name: values[0] for name, values in trainer._metrics["train"].items()},
    )


def token_ratio(batch: Batch) -> Tensor:
    """pi_old / pi_sampler [S, L], the ratio of vllm_importance_sampling_mode="token_*"."""
    return (batch.old_SL - batch.sampler_SL).exp()


def sequence_ratio(batch: Batch) -> Tensor:
    """Ratio by sequence [S, 1], as "sequence_*" has it."""
    return ((batch.old_SL - batch.sampler_SL) * batch.trained_SL).sum(-1, keepdim=True).exp()


def arguments(setting: Setting, batch: Batch) -> dict[str, Any]:
    """Arguments of `policy_loss`, but for `spec`. For GSPO the sampler's log-probs are such that
    every token has the ratio of its sequence.
    """
    averaging, length = AVERAGINGS[setting.loss_type]
    bounds = batch.bounds()
    sampler_SL = (
        batch.old_SL - sequence_ratio(batch).log() if setting.is_sequence else batch.sampler_SL
    )
    weight_T = token_weights(
        bounds, int(bounds[-1]), averaging, mask_T=batch.packed(batch.trained_SL), length=length
    )
    return {
        "logits_TV": batch.packed(batch.logits_SLV).requires_grad_(),
        "target_ids_T": batch.packed(batch.ids_SL),
        "advantage_T": batch.packed(batch.advantage_S[:, None].expand_as(batch.ids_SL)),
        "weight_T": weight_T,
        "old_logprob_T": batch.packed(batch.old_SL),
        "ref_logprob_T": batch.packed(batch.ref_SL),
        "sampler_logprob_T": batch.packed(sampler_SL),
        "cu_seqlens_S1": bounds,
        "temperature": TEMPERATURE,
    }


def our_loss(**kwargs: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    out = policy_loss(**kwargs)
    out.loss.backward()
    return out.loss.detach(), kwargs["logits_TV"].grad, out.stats


def check_same(ours: tuple[Tensor, Tensor, Any], theirs: tuple[Tensor, Tensor, Any]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        ours[1], theirs[1], rtol=1e-5, atol=1e-6 * theirs[1].abs().max().item()
    )


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_trl(name: str, change: str, impl: str) -> None:
    """The ratio to the sampler is by sequence for GSPO (by token see
    `test_gspo_with_a_ratio_by_token...`) and by token for the others.
    """
    setting, batch = replace(LOSSES[name], **CHANGES[change]), random_batch()
    theirs = trl_loss(setting, batch)
    assert theirs[1].abs().max() > 1e-3
    check_same(our_loss(**arguments(setting, batch), spec=setting.spec(), impl=impl), theirs)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *[
            (name, field, value)
            for name in ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "gspo-luspo")
            for field, value in [
                ("clip_low", 0.7),
                ("clip_high", 0.9),
                ("dual_clip", 1.5),
                ("kl_coef", 0.31),
                ("tis", 1.1),
                ("kl", "k2"),
            ]
        ],
        *[
            ("cispo", field, value)
            for field, value in [("clip_high", 0.9), ("kl_coef", 0.31), ("tis", 1.1), ("kl", "k2")]
        ],
        ("grpo", "loss_type", "gspo"),
        ("gspo", "loss_type", "clip"),
        ("cispo", "loss_type", "clip"),
    ],
)
def test_every_setting_changes_the_loss_or_the_gradient(name: str, field: str, value: Any) -> None:
    """If one setting is changed on our side, loss and gradient leave TRL's: each setting has tokens
    that depend on it.
    """
    setting, batch = replace(LOSSES[name], **CHANGES["all"]), random_batch()
    theirs = trl_loss(setting, batch)
    ours = our_loss(**arguments(setting, batch), spec=replace(setting.spec(), **{field: value}))
    assert not torch.isclose(ours[0], theirs[0], rtol=1e-3)
    # The dual clip is a bound of the loss; below it nothing flows, whatever its value.
    same_gradient = torch.allclose(
        ours[1], theirs[1], rtol=1e-3, atol=1e-4 * theirs[1].abs().max().item()
    )
    assert same_gradient == (field == "dual_clip" and name.startswith("gspo"))


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_accumulation_is_a_factor_of_the_weights(name: str) -> None:
    """One micro-batch of four, generated at once and spent on two optimizer steps."""
    setting = replace(LOSSES[name], **CHANGES["all"], accumulation=2, steps_per_generation=4)
    batch, num_items = random_batch(), 90
    theirs = trl_loss(setting, batch, num_items=num_items)
    kwargs = arguments(setting, batch)
    if setting.loss_type in ("dapo", "cispo"):
        kwargs["weight_T"] = batch.packed(batch.trained_SL) / (
            num_items * setting.accumulation / setting.steps_per_generation
        )
    else:
        kwargs["weight_T"] /= setting.accumulation
    check_same(our_loss(**kwargs, spec=setting.spec()), theirs)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_statistics_are_the_metrics_that_trl_logs(name: str) -> None:
    """Settings without `delta`: TRL counts tokens that the region of the ratio clips, ours also
    those of the dual clip.
    """
    setting, batch = replace(LOSSES[name], **CHANGES["asymmetric"], beta=0.3), random_batch()
    theirs = trl_loss(setting, batch)[2]
    ours = our_loss(**arguments(setting, batch), spec=setting.spec())[2]
    names = {
        "entropy": "entropy_sum",
        "kl": "kl_sum",
        "clip_ratio/low_mean": "clipped_low_sum",
        "clip_ratio/high_mean": "clipped_high_sum",
    }
    assert ours["num_tokens_sum"] == batch.trained_SL.sum()
    for trl_name, our_name in names.items():
        assert theirs[trl_name] > 0
        assert (ours[our_name] / ours["num_tokens_sum"]).item() == pytest.approx(
            theirs[trl_name], rel=1e-5
        ), trl_name


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", ["bnpo", "dapo"])
def test_entropy_bonus_is_that_of_trl_where_both_average_over_tokens(name: str, impl: str) -> None:
    """TRL takes the mean entropy over tokens for every loss type; ours is averaged as the rest of
    the loss is.
    """
    setting, batch = replace(LOSSES[name], entropy_coef=0.2), random_batch()
    check_same(
        our_loss(**arguments(setting, batch), spec=setting.spec(), impl=impl),
        trl_loss(setting, batch),
    )


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo"])
def test_masked_importance_sampling_is_that_of_trl(name: str) -> None:
    """vllm_importance_sampling_mode="token_mask" is `mis` together with `tis`, but for the KL term,
    which TRL keeps where it masks.
    """
    setting, batch = replace(LOSSES[name], tis=True), random_batch()
    ratio = token_ratio(batch)
    is_out = (ratio < 0.8) | (ratio > TIS)
    assert (is_out & batch.trained_SL).any() and (~is_out & batch.trained_SL).any()
    theirs = trl_loss(setting, batch, ratio.masked_fill(is_out, 0.0))
    check_same(
        our_loss(**arguments(setting, batch), spec=replace(setting.spec(), mis=(0.8, TIS))), theirs
    )


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo"])
def test_any_other_ratio_of_the_sampler_is_a_factor_of_the_advantage(name: str) -> None:
    """TRL's default mode, "sequence_mask", needs nothing of ours: the ratio [S, 1], 0 where it
    is masked.
    """
    setting, batch = replace(LOSSES[name], **CHANGES["all"]), random_batch()
    ratio = sequence_ratio(batch)
    ratio = ratio.masked_fill(ratio > TIS, 0.0)
    assert (ratio == 0).any() and (ratio > 0).any()
    kwargs = arguments(setting, batch)
    kwargs["advantage_T"] = batch.packed(
        (batch.advantage_S[:, None] * ratio).expand_as(batch.ids_SL)
    )
    check_same(
        our_loss(**kwargs, spec=replace(setting.spec(), tis=None)), trl_loss(setting, batch, ratio)
    )


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_gspo_with_a_ratio_by_token_has_the_loss_of_trl_and_another_gradient(impl: str) -> None:
    """TRL's gradient spreads the mean of r A over the sequence; ours is that of GSPO-token (arXiv
    2507.18071, eq. 13), where each token keeps its own A. The loss is the same number, and so is
    the sum of the slopes by log-prob over each sequence.
    """
    setting, batch = replace(LOSSES["gspo"], tis=True), random_batch()
    theirs = trl_loss(setting, batch, token_ratio(batch).clamp(max=TIS))
    kwargs = {**arguments(setting, batch), "sampler_logprob_T": batch.packed(batch.sampler_SL)}
    ours = our_loss(**kwargs, spec=setting.spec(), impl=impl)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
    assert not torch.allclose(ours[1], theirs[1], rtol=1e-2)
    is_target_TV = torch.nn.functional.one_hot(batch.packed(batch.ids_SL), VOCAB).bool()
    probability_T = (batch.packed(batch.logits_SLV) / TEMPERATURE).softmax(-1)[is_target_TV]
    sums = []
    for gradient_TV in (ours[1], theirs[1]):
        slope_T = TEMPERATURE * gradient_TV[is_target_TV] / (1 - probability_T)
        sums.append(torch.stack([slope.sum() for slope in slope_T.split(LENGTHS)]))
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", LOSSES)
def test_kl_weighted_by_the_ratio_is_that_of_trl(name: str, impl: str) -> None:
    """TRL's default, use_bias_correction_kl=True: the gradient flows through the ratio too."""
    change = {**CHANGES["all"], "bias_correction_kl": True}
    setting, batch = replace(LOSSES[name], **change), random_batch()
    theirs, spec = trl_loss(setting, batch), setting.spec()
    check_same(our_loss(**arguments(setting, batch), spec=spec, impl=impl), theirs)
    without = our_loss(**arguments(setting, batch), spec=replace(spec, kl_ratio=False), impl=impl)
    assert not torch.allclose(without[1], theirs[1], rtol=1e-2)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("change", ["plain", "asymmetric", "kl"])
@pytest.mark.parametrize("name", LOSSES)
def test_without_old_log_probs_the_loss_is_that_of_trl(name: str, change: str, impl: str) -> None:
    """TRL keeps none where the policy that sampled is the current one."""
    setting, batch = replace(LOSSES[name], **CHANGES[change]), random_batch()
    kwargs = {**arguments(setting, batch), "old_logprob_T": None}
    check_same(
        our_loss(**kwargs, spec=setting.spec(), impl=impl),
        trl_loss(setting, replace(batch, old_SL=None), sampler_ratio=torch.ones(())),
    )


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_of_the_sampler_by_sequence_is_that_of_trl(name: str, mode: str, impl: str) -> None:
    """Tokens that a tool wrote count in no ratio. "sequence_mask" is `mis` together with `tis`."""
    setting, batch = replace(LOSSES[name], tis=True), random_batch()
    ratio = sequence_ratio(batch)
    is_out = (ratio < 0.6) | (ratio > TIS)
    assert (is_out & (ratio != 1)).any() and (~is_out & (ratio != 1)).any()
    spec = replace(setting.spec(), correction_level="sequence")
    if mode == "sequence_mask":
        ratio, spec = ratio.masked_fill(is_out, 0.0), replace(spec, mis=(0.6, TIS))
    else:
        ratio = ratio.clamp(max=TIS)
    kwargs = {
        **arguments(setting, batch),
        "sampler_logprob_T": batch.packed(batch.sampler_SL),
    }
    check_same(our_loss(**kwargs, spec=spec, impl=impl), trl_loss(setting, batch, ratio))
