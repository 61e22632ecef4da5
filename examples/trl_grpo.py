"""flowkernels' loss in TRL's GRPOTrainer:  python examples/trl_grpo.py [--steps N] [--seed N]

`FlowGRPOTrainer` takes the place of TRL's trainer: sampling, rewards, advantages and the optimizer stay TRL's, the loss is `policy_loss` on
the logits of the trained tokens only. A model of two layers with random weights learns on the CPU to repeat the digit of its prompt.
Needs trl >= 1.16. S: sequences, L: longest completion, T: trained tokens, V: vocabulary.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from flowkernels import LossSpec, logprobs, policy_loss, token_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer


class FlowGRPOTrainer(GRPOTrainer):
    """TRL's trainer with flowkernels' loss, for `loss_type` grpo, bnpo, dr_grpo, dapo and cispo, by token or by sequence (GSPO)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check(self.args)

    @staticmethod
    def check(args: GRPOConfig) -> None:
        """Refuse what the loss below does not have rather than train without it."""
        refused = {
            "loss_type": args.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo"),
            "use_bias_correction_kl": args.beta != 0 and args.use_bias_correction_kl,
            "top_entropy_quantile": args.top_entropy_quantile != 1,
            "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
            "entropy_coef": args.entropy_coef != 0 or args.use_adaptive_entropy,
        }
        for name in (name for name, is_refused in refused.items() if is_refused):
            raise ValueError(f"{name}={getattr(args, name)!r} is not supported by FlowGRPOTrainer")

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        mask_SL = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        ...
