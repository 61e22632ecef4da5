"""The cache of `SharedCache` in fixed blocks, for `train.exact`.

`training/exact_attention.py` says what makes a query's bits its own. A prompt's whole blocks of
`KEYS` tokens are held once for all its rows. The rest of the prompt is copied to each row, whose
response goes on in the same block: so keys fall into blocks by their positions, as in training. All
of them are held under a window too. A sink has a block before those of the prompt.

E: columns of keys and values, with ones behind those; M: rows of a product. Other letters as in
`shared_cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowtrain.engines.shared_cache import How, SharedCache, _Layer
from flowtrain.training import attention
from flowtrain.training.exact_attention import (
    KEYS,
    QUERIES,
    add_blocks,
    mean_of,
    set_sink,
    width,
    with_ones,
)
from flowtrain.training.forest import sees


class ExactCache(SharedCache):
    """See `SharedCache`."""

    _padding_side = "right"

    def __init__(self, prompts: Sequence[tuple[int, ...]], device: torch.device) -> None:
        super().__init__(prompts, device)
        name = attention.NAMES["exact"]
        self._forest = attention.structure_of(name, self.tree.subtree_end_N)
        length_B = torch.tensor(list(map(len, prompts)), device=device)
        self._rest_B = length_B % KEYS
        whole_Q = self._num_path_Q // KEYS * KEYS
        place_T = torch.arange(KEYS, device=device)
        last = self._path_QP.shape[1] - 1
        self._rest_path_QT = self._path_QP.gather(1, (whole_Q[:, None] + place_T).clamp(max=last))
        self._path_QP = self._path_QP[:, : int(whole_Q.max())]
        place_P = torch.arange(self._path_QP.shape[1], device=device)
        self._bias_Q11P = torch.where(place_P < whole_Q[:, None], 0.0, -torch.inf)[:, None, None]

    def keep(self, row_B: Tensor) -> None:
        super().keep(row_B)
        self._rest_B = self._rest_B[row_B]

    def attend(self, layer: int, query_NHD: Tensor, token_2NKD: Tensor, how: How) -> Tensor:
        token_2NKE = with_ones(token_2NKD)
        if layer in self._layers:
            return self._decode(self._layers[layer], query_NHD, token_2NKE, how)
        prompt_2QPKD = token_2NKD[:, self._path_QP]
        if how.sink_H is not None:
            prompt_2QPKD = pad(prompt_2QPKD, (0, 0, 0, 0, KEYS, 0))
        prompt_2QPKE = with_ones(prompt_2QPKD)
        own_2BTKE = token_2NKE[:, self._rest_path_QT[self.prompt_B]]
        self._layers[layer] = _Layer(
            prompt_2QPKE.transpose(2, 3).contiguous(), own_2BTKE.transpose(2, 3).contiguous()
        )
        return self._prefill(query_NHD, token_2NKD, how)

    def _decode(self, layer: _Layer, query_BHD: Tensor, token_2BKD: Tensor, how: How) -> Tensor:
        num_keys, size = token_2BKD.shape[2], query_BHD.shape[2]
        query_BKRD = how.scaled(query_BHD, num_keys)
        bias_Q11P = self._bias(how.window, layer.num_own)
        own_2BKTE, is_hidden_BT = self._append(layer, token_2BKD, how.window)
        own_BKRT = _scores(query_BKRD, own_2BKTE[0])
        own_BKRT.masked_fill_(is_hidden_BT[:, None, None], -torch.inf)
        top_BKR1 = own_BKRT.amax(-1, keepdim=True)
        total_BKRE = query_BKRD.new_zeros(*query_BKRD.shape[:3], width(size))
        if layer.prompt_2QKPD.shape[3]:
            score_QKMP = _scores(self._beside(query_BKRD), layer.prompt_2QKPD[0])
            score_QKMP += pad(bias_Q11P, (score_QKMP.shape[3] - bias_Q11P.shape[3], 0))
            if (sink_KR1 := how.sink_KR1(num_keys)) is not None:
                set_sink(score_QKMP, sink_KR1.repeat(1, self._num_slots, 1))
            prompt_top_BKR1 = self._apart(score_QKMP.amax(-1, keepdim=True))
            top_BKR1 = torch.maximum(top_BKR1, prompt_top_BKR1)
            weight_QKMP = score_QKMP.sub_(self._beside(top_BKR1)).exp_()
            total_QKME = weight_QKMP.new_zeros(*weight_QKMP.shape[:3], width(size))
            total_QKME = _add(total_QKME, weight_QKMP, layer.prompt_2QKPD[1])
            total_BKRE = self._apart(total_QKME)
        weight_BKRT = own_BKRT.sub_(top_BKR1).exp_()
        mean_BKRD = mean_of(_add(total_BKRE, weight_BKRT, own_2BKTE[1]), size)
        return mean_BKRD.flatten(1, 2)[None].to(query_BHD.dtype)

    def _bias(self, window: int | None, num_own: int) -> Tensor:
        """0 for a prompt's tokens that its rows see, else -inf, after `num_own` of their tokens."""
        if window is None:
            return self._bias_Q11P
        first_Q1 = (self._num_path_Q + num_own - window + 1)[:, None]
        is_past_QP = torch.arange(self._bias_Q11P.shape[3], device=first_Q1.device) < first_Q1
        return self._bias_Q11P.masked_fill(is_past_QP[:, None, None], -torch.inf)

    def _append(
        self, layer: _Layer, token_2BKE: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Add a token to every row; return the rows' own tokens so far, [2, B, K, T, E], and bool
        [B, T], which of these a row does not see.
        """
        slot_B = self._rest_B + layer.num_own
        num_blocks = (int(self._rest_B.max()) + layer.num_own) // KEYS + 1
        room = layer.own_2BKTD.shape[3]
        if num_blocks * KEYS > room:
            layer.own_2BKTD = pad(layer.own_2BKTD, (0, 0, 0, room))
        layer.num_own += 1
        own_2BKTE = layer.own_2BKTD
        first_2BK = torch.arange(token_2BKE[..., 0].numel(), device=slot_B.device)
        place_2BK = first_2BK.view(token_2BKE.shape[:3]) * own_2BKTE.shape[3] + slot_B[:, None]
        own_2BKTE.flatten(0, 3).index_copy_(0, place_2BK.flatten(), token_2BKE.flatten(0, 2))
        place_T = torch.arange(num_blocks * KEYS, device=slot_B.device)
        is_seen_BT = sees(slot_B, place_T, window)
        return own_2BKTE[:, :, :, : len(place_T)], ~is_seen_BT


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """query key^T of [.., M, D] and [.., T, E], in products of a multiple of `QUERIES` rows."""
    num_rows, size = query.shape[-2:]
    query = pad(query, (0, 0, 0, -num_rows % QUERIES)).flatten(0, 1)
    score = (query @ key[..., :size].flatten(0, 1).mT).unflatten(0, key.shape[:2])
    return score[:, :, :num_rows].contiguous()


def _add(total: Tensor, weight: Tensor, value: Tensor) -> Tensor:
    """total + weight value, likewise."""
    num_rows = total.shape[-2]
    total, weight = (pad(x, (0, 0, 0, -num_rows % QUERIES)).flatten(0, 1) for x in (total, weight))
    add_blocks(total, weight, value.flatten(0, 1))
    return total.unflatten(0, value.shape[:2])[:, :, :num_rows]
