"""FLOPs of a row, by which steps are measured and rows are balanced over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowtrain.trainer.attention.registration import windows_of
from flowtrain.trainer.model.delta_net import find_layers
from flowtrain.trainer.model.experts import shares_of
from flowtrain.trainer.packing import PackedRow


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """FLOPs of a forward pass through the layers, without norms, rotations and softmax. A backward
    pass takes as many for inputs and as many for trained weights.
    """

    per_token: float
    """Two per parameter of a layer; of E experts the C that read a token count. A recurrent layer
    besides reads its state twice and writes it once, two per entry."""
    per_pair: float
    """FLOPs of a token and one that it sees: four per channel and layer without a window."""
    per_target: float
    """FLOPs per target: two per entry of the head."""
    per_frozen_token: float = 0.0
    """The part of `per_token` of weights that are not trained."""
    per_frozen_target: float = 0.0
    """`per_target` where the head is not trained."""
    per_near_pair: tuple[tuple[int, float], ...] = ()
    """(window, `per_pair` of the layers that have it): a token sees so many and no more."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ForwardCost:
        config = model.config
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        share = shares_of(model)
        layers = {p: p.numel() * share.get(p, 1.0) for p in model.get_decoder().layers.parameters()}
        per_layer = 4.0 * config.num_attention_heads * head_dim
        windows = windows_of(config)
        states = sum(r.num_v_heads * r.head_k_dim * r.head_v_dim for r in find_layers(model))
        per_target = 2.0 * config.vocab_size * config.hidden_size
        has_frozen_head = not any(
            p.requires_grad for p in model.get_output_embeddings().parameters()
        )
        return cls(
            per_token=2.0 * sum(layers.values()) + 6.0 * states,
            per_pair=per_layer * windows.count(None),
            per_target=per_target,
            per_frozen_token=2.0 * sum(n for p, n in layers.items() if not p.requires_grad),
            per_frozen_target=per_target * has_frozen_head,
            per_near_pair=tuple(
                (window, per_layer * windows.count(window))
                for window in sorted({window for window in windows if window})
            ),
        )

    def flops(self, row: PackedRow, *, once: bool = False) -> float:
        """Return the FLOPs of a forward pass: a token at position p of its sample sees p + 1, or as
        many as the window holds. `once`: without the tokens that the row repeats, so that each
        counts once over all rows.
        """
        seen_N = row.position_ids_N + 1
        flops = self._flops_of(seen_N) + self.per_target * len(row.target_ids_T)
        # What a row repeats is the path to its first sample.
        return flops - once * self._flops_of(torch.arange(1, row.num_repeated_tokens + 1))

    def _flops_of(self, seen_N: Tensor) -> float:
        """Return the FLOPs of tokens that each see the given number of tokens."""
        flops = self.per_token * len(seen_N) + self.per_pair * int(seen_N.sum())
        for window, per_pair in self.per_near_pair:
            flops += per_pair * int(seen_N.clamp(max=window).sum())
        return flops

    def step_flops(self, minibatches: Sequence[Sequence[PackedRow]], num_scores: int) -> float:
        """Return the FLOPs of training rows and of scoring them the given number of times. Tokens
        that several rows repeat, trunks that walks read again and recomputation count once.
        """
        return sum(
            num_scores * self.flops(row, once=True) + self.training_flops(row)
            for rows in minibatches
            for row in rows
        )

    def training_flops(self, row: PackedRow) -> float:
        """Forward and backward pass, each token once and without what is recomputed for memory."""
        frozen = self.per_frozen_token * (len(row.input_ids_N) - row.num_repeated_tokens)
        frozen += self.per_frozen_target * len(row.target_ids_T)
        return 3 * self.flops(row, once=True) - frozen


def path_bytes(model: PreTrainedModel, itemsize: int) -> int:
    """Count what a walk keeps of each token of its open path: keys and values, `itemsize` bytes a
    number, and fp32 sums of their gradients. States of recurrent layers, a set for each open piece,
    are left out.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = [getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim")]
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return len(windows_of(config)) * num_heads * sum(sizes) * (itemsize + 4)
