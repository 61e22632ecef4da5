"""States of recurrent layers for a batch whose requests share prompts.

The prompts are read as one tree, of which the state after each prompt is kept; every row of a
prompt goes on with a copy of it, a token at a time.

B: rows still sampling, Q: their prompts, C: channels, W: width of the convolution, H: heads, K:
size of a key, V: size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowtrain.trainer.model.delta_net import DeltaTree, Functions, one_token_conv
from flowtrain.trainer.packing import PackedRow


class RowStates:
    """See `Recurrence`. Its first pass reads `tree`, each later one a token per row."""

    def __init__(self, tree: PackedRow, prompt_B: Tensor) -> None:
        """
        Args:
            tree: the distinct prompts; its targets follow their last tokens.
            prompt_B: the prompt of each row.
        """
        last_Q = tree.target_row_T
        self._tree = DeltaTree.of(tree.subtree_end_N, {*last_Q.tolist()})
        state_of = {token: state for state, token in enumerate(self._tree.kept_P.tolist())}
        self._last_B = last_Q[prompt_B]
        self._state_B = prompt_B.new_tensor([state_of[token] for token in self._last_B.tolist()])
        self._past: dict[int, Tensor] = {}
        """By layer: what the convolution reads besides the next token, [B, C, W - 1]."""
        self._states: dict[int, Tensor] = {}
        """By layer, fp32 [B, H, K, V]."""

    def keep(self, row_B: Tensor) -> None:
        """Keep these rows alone, in this order."""
        self._past = {layer: past[row_B] for layer, past in self._past.items()}
        self._states = {layer: state[row_B] for layer, state in self._states.items()}

    def conv(self, layer: int, functions: Functions, x_1CN: Tensor, *weights: Any) -> Tensor:
        if layer not in self._past:
            path_BP = self._tree.path(self._last_B, weights[0].shape[1] - 1)
            # The column of zeros at the end is what a path reads before its first token.
            self._past[layer] = F.pad(x_1CN[0], (0, 1))[:, path_BP].transpose(0, 1)
            return self._tree.conv(layer, functions, x_1CN, *weights)
        past_BCW = torch.cat([self._past[layer], x_1CN[0].T[:, :, None]], 2)
        self._past[layer] = past_BCW[:, :, 1:]
        return one_token_conv(past_BCW.transpose(0, 1), *weights)[None].to(x_1CN.dtype)

    def rule(self, layer: int, functions: Functions, *row: Tensor, **options: Any) -> Tensor:
        if layer not in self._states:
            out_1NHV, kept_P = self._tree.run(functions, *row, **options)
            self._states[layer] = kept_P[self._state_B]
            return out_1NHV
        query, key, value, g, beta = (x.transpose(0, 1) for x in row)
        out_B1HV, self._states[layer] = functions.step(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=self._states[layer],
            output_final_state=True,
            **options,
        )
        return out_B1HV.transpose(0, 1)
