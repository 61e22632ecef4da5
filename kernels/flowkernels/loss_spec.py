"""The specification of a token loss: the options of `token_loss.py`, checked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Literal, get_args

LossType = Literal["clip", "gspo", "cispo", "nll"]
KL = Literal["k1", "k2", "k3", "low_var_kl"]
Level = Literal["token", "sequence"]
LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)
KLS: tuple[KL, ...] = get_args(KL)
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The specification of a token loss, without averaging, which `weight_T` defines (see
    `token_weights`).

    Example: LossSpec(clip_high=0.3, dual_clip=3.0, kl="low_var_kl", kl_coef=0.001) is the loss of
    AgentFlow's released code.
    """

    loss_type: LossType = "clip"
    """Kind of loss, with r = exp(logp - old), or 1 without an old log-prob. "clip": PPO/GRPO,
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); also DAPO and Dr.GRPO, which differ in
    advantage and weights. "gspo": the same with r = exp(mean over the sequence of logp - old)
    (arXiv 2507.18071, eq. 5); its gradient flows through this mean, so all tokens of a sequence
    share it even if their advantages or weights differ; needs `cu_seqlens_S1`. "cispo": -min(r, 1 +
    clip_high) A logp with the ratio held constant (MiniMax-M1, arXiv 2506.13585, eq. 4). "nll": -A
    logp, supervised."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c > 1 bounds the loss for negative advantages A at -c A (Ye et al., arXiv 1912.09729)."""
    kl_coef: float = 0.0
    """beta of the KL term to the reference policy; 0 disables the term."""
    kl: KL = "k3"
    """Estimator with u = logp_ref - logp: k1 = -u, k2 = u^2 / 2, k3 = exp(u) - u - 1 (Schulman,
    "Approximating KL divergence"). "low_var_kl" is verl's k3: clamped to at most 10, with no
    gradient where it is clamped (beyond u = 2.6)."""
    kl_ratio: bool = False
    """Multiply the KL term by the unclipped r, with gradient (TRL's `use_bias_correction_kl`); for
    "gspo", by the ratio of the sequence."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, which the loss subtracts."""
    z_loss_coef: float = 0.0
    """Coefficient of lse^2, with lse = log sum exp of the logits at the temperature, over the whole
    vocabulary; the term keeps logits from drifting (PaLM, arXiv 2204.02311, sec. 5)."""
    log_ratio_limit: float = 20.0
    """Log-ratios (of old, reference and sampler) are clamped to +-this before exp; a clamped one
    has no gradient. So an old log-prob of -inf yields a finite loss, -A e^20 = -4.85e8 A, without
    gradient, if no clip bounds it (A < 0 without a dual clip); the weight of "cispo" stays 1 +
    clip_high, with its gradient."""
    tis: float | None = None
    """Truncated importance sampling multiplies the policy term by min(pi_old / pi_sampler, tis)."""
    mis: tuple[float, float] | None = None
    """Masked importance sampling drops tokens whose pi_old / pi_sampler is outside [low, high]."""
    correction_level: Level = "token"
    """Level of pi_old / pi_sampler for `tis` and `mis`: "token", or "sequence" for the product over
    the tokens of the sequence with weight, which needs `cu_seqlens_S1`."""

    encoded: str = field(init=False, repr=False, compare=False)
    """The whole spec as text, because an operator's schema supports strings, and torch.compile then
    guards one string instead of many numbers."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "encoded",
            json.dumps({f.name: getattr(self, f.name) for f in fields(self) if f.init}),
        )
        choices = {"loss_type": LOSS_TYPES, "kl": KLS, "correction_level": LEVELS}
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
        if not (0 <= self.clip_low <= 1 and 0 <= self.clip_high < math.inf):
            raise ValueError(
                f"clip_low={self.clip_low} must be in [0, 1] and clip_high={self.clip_high} must "
                "be >= 0 and finite"
            )
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1 and finite")
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"kl_coef={self.kl_coef} must be >= 0 and finite")
        if self.kl_ratio and self.kl_coef == 0:
            raise ValueError(f"kl_ratio={self.kl_ratio} needs a kl_coef above 0")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef={self.entropy_coef} must be finite")
        if not 0 <= self.z_loss_coef < math.inf:
            raise ValueError(f"z_loss_coef={self.z_loss_coef} must be >= 0 and finite")
        if not 0 < self.log_ratio_limit <= 80:
            raise ValueError(
                f"log_ratio_limit={self.log_ratio_limit} must be in (0, 80], where exp stays "
                "within float32"
            )
        if self.tis is not None and not self.tis > 0:
            raise ValueError(f"tis={self.tis} must be above 0")
        if self.mis is not None and not 0 <= self.mis[0] < self.mis[1]:
            raise ValueError(f"mis={self.mis} must be (low, high) with 0 <= low < high")

    @property
    def is_fused(self) -> bool:
        """Whether one kernel computes the loss of a row and its gradient; other losses need the
        log-probs of all rows first.
        """
        return self.loss_type != "gspo" and not self.kl_ratio and self.z_loss_coef == 0


@lru_cache(maxsize=64)
def decode(text: str) -> LossSpec:
    """Return the spec that `LossSpec.encoded` stands for."""
    options = json.loads(text)
    mis = options.pop("mis")
    return LossSpec(**options, mis=None if mis is None else tuple(mis))
