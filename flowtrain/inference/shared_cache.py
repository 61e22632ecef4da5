"""Keys and values of a batch whose requests share prompts: a prompt's are held and read once.

The prompts are prefilled as one token tree (`trainer/packing.py`): what several begin with is
computed once too, and nothing is padded. From then on a row attends to its prompt, side by side
with the prompt's other rows, and to its own response; the log-sum-exps of the two say how to mix
them. Keys and values are kept in fp32, so that scores are as precise as within torch's fused
attention. Under a window a row sees its own last tokens and, as long as these do not fill it, the
end of its prompt, of which no more is held; a sink joins the log-sum-exp of the row's own tokens.

N: tokens of a forward pass, B: rows still sampling, Q: their prompts, G: rows of the prompt that
has most, P: tokens of the longest prompt, T: response tokens that there is room for, K: key heads,
R: query heads per key head, D: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from flowtrain.inference.row_states import RowStates
from flowtrain.records import Sample
from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.packing import pack_row

NAME = "flowtrain_shared"
"""The attention of an engine's model, as transformers knows it."""
_CAPACITY = 32
"""Response tokens that a layer has room for at first; it doubles."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of a layer's attention; see `Forest.attend`."""

    scaling: float | None
    window: int | None
    sink_H: Tensor | None

    def scaled(self, query_BHD: Tensor, num_keys: int) -> Tensor:
        """Return the scaled queries, [B, K, R, D] in fp32."""
        scale = query_BHD.shape[2] ** -0.5 if self.scaling is None else self.scaling
        return query_BHD.unflatten(1, (num_keys, -1)).float() * scale

    def sink_KR1(self, num_keys: int) -> Tensor | None:
        """Return the sinks, [K, R, 1] in fp32."""
        return None if self.sink_H is None else self.sink_H.float().view(num_keys, -1, 1)


@dataclass(slots=True)
class _Layer:
    """The keys of one layer, then its values. Of prompts no more than the layer's window needs."""

    prompt_2QKPD: Tensor
    response_2BKTD: Tensor
    num_tokens: int = 0
    """Tokens of each response so far."""

    def append(self, token_2BKD: Tensor) -> Tensor:
        """Add a token to every row; return the responses so far, [2, B, K, num_tokens, D]."""
        capacity = self.response_2BKTD.shape[3]
        if self.num_tokens == capacity:
            self.response_2BKTD = pad(self.response_2BKTD, (0, 0, 0, max(capacity, _CAPACITY)))
        self.response_2BKTD[:, :, :, self.num_tokens] = token_2BKD
        self.num_tokens += 1
        return self.response_2BKTD[:, :, :, : self.num_tokens]


class SharedCache:
    """The cache of a batch. Its first forward pass reads `tree`, each later one a token per row."""

    states: RowStates | None = None
    """States of the recurrent layers, if the model has some: they have no keys and values."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """`prompts`: one for each row."""
        distinct = list(dict.fromkeys(prompts))
        zero = (0.0,)
        self.tree = pack_row([Sample(p, (0,), zero, zero, zero) for p in distinct]).to(device)
        """The distinct prompts; its targets follow their last tokens."""
        self._forest = Forest.of(self.tree.subtree_end_N)
        last_Q1, index_N = self.tree.target_row_T[:, None], torch.arange(len(self.tree.input_ids_N))
        # A token is on the path to a prompt's last one if that is in its subtree.
        is_on_path_QN = (index_N.to(device) <= last_Q1) & (last_Q1 < self.tree.subtree_end_N)
        self.paths = is_on_path_QN.nonzero()[:, 1].split(list(map(len, distinct)))
        """Indices in the tree of the tokens of each prompt."""
        # Filled up on the left: the ends of all prompts are side by side.
        path_QP = pad_sequence(self.paths, True, padding_value=-1, padding_side="left")
        self._bias_Q11P = torch.where(path_QP < 0, -torch.inf, 0.0)[:, None, None]
        self._path_QP = path_QP.clamp(min=0)
        self._layers: dict[int, _Layer] = {}
        index = {prompt: i for i, prompt in enumerate(distinct)}
        self._place_rows(torch.tensor([index[prompt] for prompt in prompts]))

    def _place_rows(self, prompt_B: Tensor) -> None:
        """Give each row a slot beside the other rows of its prompt."""
        is_alike_BB = prompt_B[:, None] == prompt_B
        self._num_slots = int(is_alike_BB.sum(0).max())
        slot_B = prompt_B * self._num_slots + is_alike_BB.tril(-1).sum(1)
        device = self._path_QP.device
        self.prompt_B, self._slot_B = prompt_B.to(device), slot_B.to(device)

    def keep(self, row_B: Tensor) -> None:
        """Keep these rows alone, in this order, and the prompts that they need."""
        prompt_Q, prompt_B = self.prompt_B[row_B].unique(return_inverse=True)
        is_smaller = len(prompt_Q) < len(self._bias_Q11P)
        self._bias_Q11P = self._bias_Q11P[prompt_Q]
        for layer in self._layers.values():
            layer.response_2BKTD = layer.response_2BKTD[:, row_B]
            if is_smaller:
                layer.prompt_2QKPD = layer.prompt_2QKPD[:, prompt_Q]
        self._place_rows(prompt_B.cpu())
        if self.states is not None:
            self.states.keep(row_B)

    def attend(
        self, layer: int, query_NHD: Tensor, token_2NKD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return what the queries of one layer attend to, [1, N, H, D], and hold the tokens' keys
        and values.
        """
        if layer in self._layers:
            return self._decode(self._layers[layer], query_NHD, token_2NKD.float(), options)
        # A response's first token sees itself and at most window - 1 tokens before it.
        num_held = self._path_QP.shape[1] if options.window is None else options.window - 1
        path_QP = self._path_QP[:, max(0, self._path_QP.shape[1] - num_held) :]
        prompt_2QPKD = token_2NKD[:, path_QP].float()
        response_2BKTD = prompt_2QPKD.new_empty(
            (2, len(self.prompt_B), token_2NKD.shape[2], 0, token_2NKD.shape[3])
        )
        self._layers[layer] = _Layer(prompt_2QPKD.transpose(2, 3).contiguous(), response_2BKTD)
        return self._prefill(query_NHD, token_2NKD, options)

    def _prefill(self, query_NHD: Tensor, token_2NKD: Tensor, options: AttentionOptions) -> Tensor:
        query_1HND, key_1KND, value_1KND = (
            x.transpose(0, 1)[None] for x in (query_NHD, *token_2NKD)
        )
        return self._forest.attend(
            query_1HND,
            key_1KND,
            value_1KND,
            scaling=options.scaling,
            window=options.window,
            sink_H=options.sink_H,
        )

    def _decode(
        self, layer: _Layer, query_BHD: Tensor, token_2BKD: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_keys = token_2BKD.shape[2]
        query_BKRD = options.scaled(query_BHD, num_keys)
        response_2BKTD = layer.append(token_2BKD)
        num_seen = self._path_QP.shape[1]
        if options.window is not None:
            response_2BKTD = response_2BKTD[:, :, :, -options.window :]
            num_seen = options.window - layer.num_tokens
        mixed_BKRD, lse_BKR1 = _attend(
            query_BKRD, response_2BKTD, sink=options.sink_KR1(token_2BKD.shape[2])
        )
        if num_seen > 0:  # of each prompt
            prompt_2QKPD = layer.prompt_2QKPD[:, :, :, -num_seen:]
            bias_Q11P = self._bias_Q11P[..., -prompt_2QKPD.shape[3] :]
            attended = _attend(self._by_prompt(query_BKRD), prompt_2QKPD, bias_Q11P)
            prompt_BKRD, prompt_lse_BKR1 = (self._by_row(x) for x in attended)
            # The prompt's share of the softmax over both: e^lse' / (e^lse' + e^lse).
            share_BKR1 = (prompt_lse_BKR1 - lse_BKR1).sigmoid()
            mixed_BKRD = torch.lerp(mixed_BKRD, prompt_BKRD, share_BKR1)
        return mixed_BKRD.flatten(1, 2)[None].to(query_BHD.dtype)

    def _by_prompt(self, x_BKRX: Tensor) -> Tensor:
        """Put the rows of each prompt side by side, [Q, K, G R, X]; zeros where it has fewer."""
        num_prompts = len(self._bias_Q11P)
        slots = x_BKRX.new_zeros((num_prompts * self._num_slots, *x_BKRX.shape[1:]))
        slots[self._slot_B] = x_BKRX
        return slots.unflatten(0, (num_prompts, -1)).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x_QKMX: Tensor) -> Tensor:
        """Take the rows of each prompt apart again, [B, K, R, X]."""
        slots = x_QKMX.unflatten(2, (self._num_slots, -1)).transpose(1, 2)
        return slots.flatten(0, 1)[self._slot_B]


def _attend(
    query: Tensor,
    key_value_2: Tensor,
    bias: Tensor | float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of values by softmax(query key^T + bias), which a sink takes a share of, and
    the log-sum-exp [..., 1].
    """
    key, value = key_value_2
    score = query @ key.mT + bias
    lse = score.logsumexp(-1, keepdim=True)
    lse = lse if sink is None else torch.logaddexp(lse, sink)
    return (score - lse).exp() @ value, lse


def shared_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    *,
    shared: SharedCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that Hugging Face calls in every layer; returns [1, N, H, D]."""
    size = value_1KND.shape[3]
    value_KND = pad(value_1KND[0], (0, key_1KND.shape[3] - size))  # narrower in latent attention
    token_2NKD = torch.stack([key_1KND[0], value_KND]).transpose(1, 2)
    query_NHD = query_1HND[0].transpose(0, 1)
    assert isinstance(module.layer_idx, int)
    options = AttentionOptions(scaling, sliding_window or None, s_aux)
    return shared.attend(module.layer_idx, query_NHD, token_2NKD, options)[..., :size], None


AttentionInterface.register(NAME, shared_attention)
