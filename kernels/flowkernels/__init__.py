"""Fused losses for reinforcement learning of language models: torch and Triton are all they need.

    from flowkernels import LossSpec, policy_loss

    out = policy_loss(logits_TV, target_ids_T, spec=LossSpec(clip_high=0.3), advantage_T=adv, old_logprob_T=old, weight_T=weight)
    out.loss.backward()

Every public function takes `impl=`; today there is one, "torch", which is also what the Triton kernels will be measured against.
"""

from flowkernels.policy_loss import LogProbs, PolicyLoss, logprobs, policy_loss
from flowkernels.token_loss import LossSpec, TokenLoss, token_loss

__all__ = ["LogProbs", "LossSpec", "PolicyLoss", "TokenLoss", "logprobs", "policy_loss", "token_loss"]
