"""The losses of other projects and ours on one random batch: their value, and their gradients by
hidden states, weight and bias.

Liger's `LigerFusedLinearGRPOLoss` takes hidden states. TRL's `GRPOTrainer._compute_loss` is called
as it is, on an object that holds the attributes it reads and whose log-probs come from a plain
log-softmax, so that autograd through its own code is the reference. Both run on a CPU, in torch,
and pad their completions; ours sees the packed tokens only. All in fp32.

D: hidden size, L: longest completion, S: sequences, T: completion tokens, V: vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from flowkernels import (
    LossSpec,
    TokenLoss,
    TokenLossFn,
    Tokens,
    correct_for_sampler,
    linear_policy_loss,
    token_loss,
    token_weights,
)
from flowkernels.loss_spec import LossType
from flowkernels.sequences import sequence_ids
from flowkernels.token_weights import Averaging
from torch import Tensor

LENGTHS = (7, 3, 0, 5, 2, 4)
"""One completion is masked as a whole, as `mask_truncated_completions` does."""
ADVANTAGES = (1.3, -0.7, 0.5, -1.1, 0.4, -0.9)
LOG_RATIOS = (0.5, -0.5, 0.0, 0.7, -0.4, 0.1)
"""Centres of the sequences' log-ratios: past each clip with each sign of A, and within."""
VOCAB, DIM, MAX_LENGTH, TEMPERATURE, TIS = 67, 24, 9, 0.8, 1.2
SAPO = (1.0, 1.05)
"""Temperatures of positive and of other advantages; the default of both."""
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
HEAD = ("hidden", "weight", "bias")
AVERAGINGS: dict[str, tuple[Averaging, int | None]] = {
    "grpo": ("sequence", None),
    "sapo": ("sequence", None),
    "bnpo": ("token", None),
    "dapo": ("token", None),
    "cispo": ("token", None),
    "vespo": ("token", None),
    "dr_grpo": ("constant", MAX_LENGTH),
    "luspo": ("constant", 1),
}
"""The arguments of `token_weights` that are a loss type of theirs."""
Result = tuple[Tensor, dict[str, Tensor]]
"""Loss, and gradients by the names of `HEAD`."""


@dataclass(frozen=True)
class Setting:
    """A configuration in their words, with two differences: `epsilon_high` is 1 lower than theirs
    for "cispo", which has there the bound of the ratio itself, and `delta` is above 1 +
    epsilon_high, as TRL recommends (below, they bound positive advantages by it too).
    """

    loss_type: str = "grpo"
    is_sequence: bool = False
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    tis: bool = False
    bias_correction_kl: bool = False
    temperature: float = TEMPERATURE
    accumulation: int = 1
    steps_per_generation: int = 1

    @property
    def their_epsilon_high(self) -> float:
        return self.epsilon_high + (1 if self.loss_type == "cispo" else 0)

    def spec(self) -> LossSpec:
        of_ratio: LossType = "gspo" if self.is_sequence else "clip"
        return LossSpec(
            loss_type="cispo" if self.loss_type == "cispo" else of_ratio,
            clip_low=self.epsilon,
            clip_high=self.epsilon_high,
            dual_clip=self.delta,
            kl_coef=self.beta,
            kl_ratio=self.bias_correction_kl,
            tis=TIS if self.tis else None,
        )


@dataclass(frozen=True)
class Batch:
    """Padded, as they have it."""

    hidden_SLD: Tensor
    weight_VD: Tensor
    bias_V: Tensor
    ids_SL: Tensor
    mask_SL: Tensor
    """bool: the completions."""
    trained_SL: Tensor
    """bool: without the tokens that a tool wrote."""
    old_SL: Tensor
    ref_SL: Tensor
    sampler_SL: Tensor
    advantage_S: Tensor

    @classmethod
    def make(cls, seed: int = 0) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        shape = (len(LENGTHS), max(LENGTHS))
        hidden = torch.randn(*shape, DIM, generator=rng)
        weight = 2 * DIM**-0.5 * torch.randn(VOCAB, DIM, generator=rng)
        bias = 0.3 * torch.randn(VOCAB, generator=rng)
        ids = torch.randint(VOCAB, shape, generator=rng)
        mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
        trained = mask.clone()
        trained[0, 2:4] = False
        logp = token_logprobs(hidden @ weight.T + bias, ids, TEMPERATURE)
        old = logp - torch.tensor(LOG_RATIOS)[:, None] - 0.2 * torch.randn(shape, generator=rng)
        ref = logp + 0.5 * torch.randn(shape, generator=rng)
        sampler = torch.where(trained, old + 0.3 * torch.randn(shape, generator=rng), old)
        advantage = torch.tensor(ADVANTAGES)
        return cls(hidden, weight, bias, ids, mask, trained, old, ref, sampler, advantage)

    def packed(self, value_SL: Tensor) -> Tensor:
        return value_SL[self.mask_SL]

    def bounds(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.mask_SL.sum(1).cumsum(0)])

    def leaves(self) -> list[Tensor]:
        head = (self.hidden_SLD, self.weight_VD, self.bias_V)
        return [x.detach().clone().requires_grad_() for x in head]

    def log_sampler_ratio(self, setting: Setting) -> Tensor:
        """log pi_old / pi_sampler: [S, 1] of sequences, else [S, L]."""
        log_SL = self.old_SL - self.sampler_SL
        return (log_SL * self.trained_SL).sum(-1, keepdim=True) if setting.is_sequence else log_SL

    def sampler_ratio(self, setting: Setting) -> Tensor | None:
        """The ratio as they take it: truncated before the loss."""
        return self.log_sampler_ratio(setting).exp().clamp(max=TIS) if setting.tis else None


def token_logprobs(logits_SLV: Tensor, ids_SL: Tensor, temperature: float) -> Tensor:
    return (logits_SLV / temperature).log_softmax(-1).gather(-1, ids_SL[:, :, None])[:, :, 0]


def liger(setting: Setting, batch: Batch) -> Result:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    leaves = batch.leaves()
    loss = LigerFusedLinearGRPOLoss(
        beta=setting.beta,
        compiled=False,
        use_ref_model=setting.beta != 0,
        epsilon_low=setting.epsilon,
        epsilon_high=setting.their_epsilon_high,
        loss_type=setting.loss_type,
        max_completion_length=MAX_LENGTH,
        importance_sampling_level="sequence" if setting.is_sequence else "token",
        temperature=setting.temperature,
        delta=setting.delta,
        use_bias_correction_kl=setting.bias_correction_kl,
    )(
        leaves[0],
        leaves[1],
        batch.ids_SL,
        batch.trained_SL.float(),
        batch.advantage_S,
        bias=leaves[2],
        old_per_token_logps=batch.old_SL,
        ref_per_token_logps=batch.ref_SL,
        vllm_is_ratio=batch.sampler_ratio(setting),
    )[0]
    return result_of(loss, leaves)


def trl(setting: Setting, batch: Batch) -> Result:
    leaves = batch.leaves()
    logits_SLV = leaves[0] @ leaves[1].T + leaves[2]
    return result_of(trl_loss(setting, batch, logits_SLV)[0], leaves)


def trl_loss(
    setting: Setting,
    batch: Any,
    logits_SLV: Tensor,
    sampler_ratio: Tensor | None = None,
    num_items: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of TRL's own code."""
    from trl import GRPOTrainer

    if sampler_ratio is None:
        sampler_ratio = batch.sampler_ratio(setting)
    trainer = trl_stub(setting)
    prompt = torch.zeros(len(batch.ids_SL), 2, dtype=torch.int64)
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
    loss = GRPOTrainer._compute_loss(trainer, logits_SLV, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def trl_stub(setting: Setting) -> SimpleNamespace:
    """Exactly what `_compute_loss` reads of its trainer; anything else is an AttributeError."""
    from trl import GRPOTrainer

    def score(
        model: Tensor, input_ids: Tensor, _: Tensor, logits_to_keep: int, **__: object
    ) -> tuple[Tensor, Tensor, None]:
        logp_SLV = (model / setting.temperature).log_softmax(-1)
        logprobs = token_logprobs(model, input_ids[:, -logits_to_keep:], setting.temperature)
        return logprobs, -(logp_SLV.exp() * logp_SLV).sum(-1), None

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=score,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        loss_type=setting.loss_type,
        importance_sampling_level="sequence" if setting.is_sequence else "token",
        epsilon_low=setting.epsilon,
        epsilon_high=setting.their_epsilon_high,
        beta=setting.beta,
        use_vllm=setting.tis,
        vllm_importance_sampling_correction=True,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=setting.accumulation,
        args=SimpleNamespace(
            delta=setting.delta,
            use_bias_correction_kl=setting.bias_correction_kl,
            steps_per_generation=setting.steps_per_generation,
            sapo_temperature_pos=SAPO[0],
            sapo_temperature_neg=SAPO[1],
            **{f"vespo_{name}": value for name, value in VESPO.items()},
        ),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        entropy_coef=0.0,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )


def result_of(loss: Tensor, leaves: list[Tensor]) -> Result:
    gradients = torch.autograd.grad(loss, leaves)
    return loss.detach(), dict(zip(HEAD, gradients, strict=True))


RIVALS: dict[str, Callable[[Setting, Batch], Result]] = {"liger": liger, "trl": trl}


def spec_of(setting: Setting) -> LossSpec | TokenLossFn:
    """What we say for it."""
    if setting.loss_type in ("sapo", "vespo"):
        return partial(soft_loss, setting)
    return setting.spec()


def soft_loss(setting: Setting, tokens: Tokens) -> TokenLoss:
    """SAPO (arXiv 2511.20347) and VESPO, losses without a clip, as functions of one's own."""
    spec, old_T = setting.spec(), tokens.old_logprob_T
    log_ratio_T = tokens.logprob_T - old_T
    advantage_T, _ = correct_for_sampler(
        spec, tokens.advantage_T, tokens.weight_T, old_T, tokens.sampler_logprob_T
    )
    if setting.loss_type == "sapo":
        heat_T = torch.where(advantage_T > 0, torch.full_like(old_T, SAPO[0]), SAPO[1])
        ratio_T = log_ratio_T.exp()
        gate_T = (heat_T * (ratio_T - 1)).sigmoid()
        loss_T = -4 / heat_T * gate_T * advantage_T
        slope_T = -4 * gate_T * (1 - gate_T) * ratio_T * advantage_T
    else:  # the ratio to the sampler is part of phi, and phi is held constant
        slope_T = -vespo_factor(tokens, log_ratio_T) * tokens.advantage_T
        loss_T = slope_T * tokens.logprob_T
    none_T = torch.zeros_like(advantage_T)
    kl = token_loss(LossSpec(kl_coef=setting.beta), replace(tokens, advantage_T=none_T))
    return replace(kl, loss_T=kl.loss_T + loss_T, dlogprob_T=kl.dlogprob_T + slope_T)


def vespo_factor(tokens: Tokens, log_ratio_T: Tensor) -> Tensor:
    """phi = e^lambda w^k e^(-lambda w), w the ratio of the whole sequence."""
    if tokens.sampler_logprob_T is not None:
        behind_T = (tokens.old_logprob_T - tokens.sampler_logprob_T).clamp(max=math.log(TIS))
        log_ratio_T = log_ratio_T + behind_T
    sequence_T = sequence_ids(tokens.cu_seqlens_S1, len(log_ratio_T))
    sum_S = log_ratio_T.new_zeros(len(tokens.cu_seqlens_S1) - 1)
    sum_S.index_add_(0, sequence_T, torch.where(tokens.weight_T != 0, log_ratio_T, 0.0))
    log_w_T = sum_S.clamp(math.log(1e-8), 20.0)[sequence_T]
    is_up_T = tokens.advantage_T >= 0
    k_T = torch.where(is_up_T, VESPO["k_pos"], VESPO["k_neg"])
    lambda_T = torch.where(is_up_T, VESPO["lambda_pos"], VESPO["lambda_neg"])
    return (lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp()).exp()


def ours(setting: Setting, batch: Batch, device: str = "cpu", impl: str = "auto") -> Result:
    averaging, length = AVERAGINGS[setting.loss_type]
    bounds, leaves = batch.bounds(), batch.leaves()
    weight_T = token_weights(
        bounds, int(bounds[-1]), averaging, mask_T=batch.packed(batch.trained_SL), length=length
    )
    of_tokens: dict[str, Tensor] = {
        "advantage_T": batch.advantage_S[:, None].expand_as(batch.ids_SL),
        "old_logprob_T": batch.old_SL,
        "ref_logprob_T": batch.ref_SL,
    }
    if setting.tis:
        of_tokens["sampler_logprob_T"] = batch.old_SL - batch.log_sampler_ratio(setting)
    tokens: dict[str, Any] = {name: batch.packed(x).to(device) for name, x in of_tokens.items()}
    out = linear_policy_loss(
        batch.packed(leaves[0]).to(device),
        leaves[1].to(device),
        batch.packed(batch.ids_SL).to(device),
        bias_V=leaves[2].to(device),
        spec=spec_of(setting),
        weight_T=weight_T.to(device),
        cu_seqlens_S1=bounds.to(device),
        temperature=setting.temperature,
        memory_budget=8 * VOCAB * 4,
        impl=impl,
        **tokens,
    )
    return result_of(out.loss.cpu(), leaves)


LOSSES = {
    **{name: Setting(name) for name in AVERAGINGS if name != "luspo"},
    "gspo": Setting("grpo", is_sequence=True),
    "gspo-luspo": Setting("luspo", is_sequence=True),
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.3},
    "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.3},
    "delta": {"epsilon_high": 0.3, "delta": 1.7},
    "kl": {"beta": 0.3},
    "kl times ratio": {"beta": 0.3, "bias_correction_kl": True},
    "tis": {"tis": True},
    "all": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.7, "beta": 0.3, "tis": True},
}


def cases() -> list[tuple[str, str, str]]:
    """(rival, loss, change) of all that we share. SAPO, VESPO and CISPO know no `delta`; Liger's
    "luspo" counts padding as soon as a term has a number per token, as KL has.
    """
    return [
        (rival, loss, change)
        for rival in RIVALS
        for loss in LOSSES
        for change in CHANGES
        if not (loss in ("sapo", "vespo") and change in ("asymmetric", "delta", "kl times ratio"))
        and not (loss == "cispo" and change in ("delta", "kl times ratio"))
        and not (rival == "liger" and loss == "gspo-luspo" and CHANGES[change].get("beta"))
    ]


def setting_of(loss: str, change: str) -> Setting:
    setting = replace(LOSSES[loss], **CHANGES[change])
    return replace(setting, delta=None) if loss in ("sapo", "vespo", "cispo") else setting


def difference(found: Result, expected: Result) -> tuple[float, float]:
    """(of the loss, of the gradients), relative to the loss and to the largest entry."""
    value = (found[0] - expected[0]).abs() / expected[0].abs()
    gradients = [
        (found[1][name] - expected[1][name]).abs().max() / expected[1][name].abs().max()
        for name in HEAD
    ]
    return float(value), float(torch.stack(gradients).max())
