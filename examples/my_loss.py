"""A token loss of your own: the ratio is bounded smoothly, as in SAPO (arXiv 2511.20347).

python -m flowtrain.train --config configs/quickstart.toml --model.path quickstart \
    --algorithm.loss examples/my_loss.py:soft_clip --train.num_steps 4
"""

from __future__ import annotations

import torch
from flowkernels import Tokens
from torch import Tensor

_SHARPNESS = 4.0


def soft_clip(tokens: Tokens) -> Tensor:
    """Return the loss of each token; autograd takes its derivative.

    f(r) = 4 sigmoid(t (r - 1)) / t has a slope of 1 where the policy is the sampler's, and less of
    one the further it has moved.
    """
    assert tokens.old_logprob_T is not None, "the sampler's, or the trainer's of before the step"
    ratio_T = torch.exp(tokens.logprob_T - tokens.old_logprob_T)
    gate_T = torch.sigmoid(_SHARPNESS * (ratio_T - 1)) * 4 / _SHARPNESS
    return -tokens.advantage_T * gate_T
