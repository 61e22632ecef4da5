"""The losses that others release, by us and by them: the same number and the same gradients, on the
same random tensors.  python -m bench.parity

`bench.parity_rivals` has theirs. They pad their completions, ours sees the packed tokens only; all
in fp32. Printed is the largest difference of the loss, and of its gradients by hidden states,
weight and bias relative to the largest entry. T: completion tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
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
from flowkernels.sequences import sequence_ids
from torch import Tensor

from bench.measure import print_table
from bench.parity_rivals import (
    AVERAGINGS,
    HEAD,
    RIVALS,
    SAPO,
    TIS,
    VESPO,
    VOCAB,
    Batch,
    Result,
    Setting,
    result_of,
)


def spec_of(setting: Setting) -> LossSpec | TokenLossFn:
    """What we say for it."""
    if setting.loss_type in ("sapo", "vespo"):
        return partial(soft_loss, setting)
    return setting.spec()


def soft_loss(setting: Setting, tokens: Tokens) -> TokenLoss:
    """SAPO (arXiv 2511.20347) and VESPO, losses without a clip, as functions of one's own."""
    spec, old_T = setting.spec(), tokens.old_logprob_T
    assert old_T is not None
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
    assert tokens.cu_seqlens_S1 is not None and tokens.old_logprob_T is not None
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


def main() -> None:
    batch, rows = Batch.make(), []
    for rival in RIVALS:
        for loss in LOSSES:
            changes = [case[2] for case in cases() if case[:2] == (rival, loss)]
            settings = [setting_of(loss, change) for change in changes]
            found = [difference(ours(x, batch), RIVALS[rival](x, batch)) for x in settings]
            values, gradients = zip(*found, strict=True)
            row = {"rival": rival, "loss": loss, "settings": len(found)}
            rows.append(row | {"loss differs": max(values), "gradients differ": max(gradients)})
    print_table(rows)


if __name__ == "__main__":
    main()
