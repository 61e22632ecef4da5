"""Fused losses for reinforcement learning of language models, layers of their decoders, and sparse
weight deltas. They need torch and Triton only.

    from flowkernels import LossSpec, policy_loss

    out = policy_loss(logits_TV, target_ids_T, spec=LossSpec(clip_high=0.3), advantage_T=adv,
                      old_logprob_T=old, weight_T=weight)
    out.loss.backward()

Every public function takes `impl=`: "triton" (the kernels), "torch" (the reference implementation,
which runs on a CPU) or "auto" (by device).
"""

from flowkernels.branching import (
    BranchingScore,
    branch_points,
    branching_score,
    discounted_reverse_scan,
)
from flowkernels.distillation import (
    DIVERGENCES,
    Distillation,
    Divergence,
    linear_distillation,
    linear_topk_distillation,
)
from flowkernels.future_ratio import FutureRatio, future_aware, future_factor
from flowkernels.layers import rms_norm, rotary, swiglu
from flowkernels.linear_logprobs import linear_logprobs
from flowkernels.linear_policy_loss import linear_policy_loss
from flowkernels.logprobs import LogProbs, logprobs
from flowkernels.loss_spec import LossSpec
from flowkernels.m2po import divergent_log_ratios, m2po_clip, second_moment_bound
from flowkernels.policy_loss import PolicyLoss, policy_loss
from flowkernels.sparse_delta import (
    WordDiff,
    diff_pieces,
    diff_words,
    diffs_to_host,
    scatter_words_,
)
from flowkernels.targets import SamplingMask
from flowkernels.token_loss import (
    TokenInputs,
    TokenLoss,
    TokenLossFn,
    Tokens,
    by_autograd,
    correct_for_sampler,
    token_loss,
)
from flowkernels.token_weights import token_weights
from flowkernels.word_digests import digest_at, digest_words

__version__ = "0.1.0"

__all__ = [
    "DIVERGENCES",
    "BranchingScore",
    "Distillation",
    "Divergence",
    "FutureRatio",
    "LogProbs",
    "LossSpec",
    "PolicyLoss",
    "SamplingMask",
    "TokenInputs",
    "TokenLoss",
    "TokenLossFn",
    "Tokens",
    "WordDiff",
    "branch_points",
    "branching_score",
    "by_autograd",
    "correct_for_sampler",
    "diff_pieces",
    "diff_words",
    "diffs_to_host",
    "digest_at",
    "digest_words",
    "discounted_reverse_scan",
    "divergent_log_ratios",
    "future_aware",
    "future_factor",
    "linear_distillation",
    "linear_logprobs",
    "linear_policy_loss",
    "linear_topk_distillation",
    "logprobs",
    "m2po_clip",
    "policy_loss",
    "rms_norm",
    "rotary",
    "scatter_words_",
    "second_moment_bound",
    "swiglu",
    "token_loss",
    "token_weights",
]
