"""Attention over packed rows, for any Hugging Face decoder through its attention interface.

A row of N tokens is a forest (see `packing.py`). Attention alone looks at its structure; everything
else in the model runs on the row as it is. On a CPU it falls into segments (`forest.py`); on a GPU
`flex.py` has a mask.

H: heads, D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from flowtrain.records import UserError
from flowtrain.trainer.attention.flex import FlexTree
from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.walk import OpenPath

NAMES = {
    "auto": "flowtrain_auto",
    "sdpa": "flowtrain_sdpa",
    "flex": "flowtrain_flex",
    "rectangles": "flowtrain_rectangles",
    "flash": "flowtrain_fa4",  # transformers takes any name with "flash" in it for its own
}
"""Kinds of attention, as transformers knows them: on segments by torch's SDPA; by FlexAttention,
with Triton's kernels, with cuDNN's for the rectangles of a tree, or with FlashAttention 4's; auto:
"flex" on a GPU, else "sdpa"."""
NAME = NAMES["auto"]
_LEFT_OUT = ("softcap", "position_bias", "alibi")
"""Attention arguments of transformers that trees do not support."""
SLIDING = "sliding_attention"
"""A layer with a window, in a config's `layer_types`."""
RECURRENT = "linear_attention"
"""A layer without attention, in a config's `layer_types`; see `delta_net.py`."""


TreeAttention = Forest | FlexTree


class BelowPath(NamedTuple):
    """A piece of a row, and the open pieces above it; see `walk.py`."""

    structure: TreeAttention
    path: OpenPath


def name_of(kind: str, device: torch.device) -> str:
    """The name of a kind, which must be one for this device."""
    if kind not in ("auto", "sdpa") and device.type != "cuda":
        raise UserError(f"train.attention = {kind!r} needs a GPU, but the model runs on {device}")
    return NAMES[kind]


def hiding(window: int | None, config: PreTrainedConfig) -> int | None:
    """Return a window, or None if it holds as many tokens as the model has positions."""
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    return window if window and window < positions else None


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """Return the window of each layer with attention by the config; None where it hides nothing."""
    is_used = getattr(config, "use_sliding_window", True)
    window = hiding(getattr(config, "sliding_window", None), config) if is_used else None
    kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    return [window if kind == SLIDING else None for kind in kinds if kind != RECURRENT]


def structure_of(name: str, subtree_end_N: Tensor, num_before: int = 0) -> TreeAttention:
    """The structure of a row for this attention; on a GPU N is a multiple of `flex.BLOCK`.

    `num_before`: tokens of other passes that all of the row sees.
    """
    if name == NAMES["auto"]:
        name = NAMES["flex" if subtree_end_N.is_cuda else "sdpa"]
    if name == NAMES["sdpa"]:
        return Forest.of(subtree_end_N)
    assert name in NAMES.values(), f"{name}: any other attention would build an N x N mask"
    kinds = {kind: name == NAMES[kind] for kind in ("flash", "rectangles")}
    return FlexTree.of(subtree_end_N, num_before, **kinds)


def forest_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: TreeAttention | BelowPath | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function that Hugging Face calls in every layer; returns [1, N, H, D]. `s_aux`:
    sinks [H].

    Raises UserError when the model asks for what trees leave out, or keeps the row's structure.
    """
    asked = [name for name in _LEFT_OUT if others.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if not (getattr(module, "is_causal", True) and others.get("is_causal", True)):
        asked.append("is_causal=False")
    if asked:
        raise UserError(f"its attention needs {', '.join(asked)}")
    if forest is None:
        raise UserError("it does not pass the structure of a row to its attention")
    before: Sequence[tuple[Tensor, Tensor]] = ()
    if isinstance(forest, BelowPath):
        forest, path = forest
        assert isinstance(module.layer_idx, int)
        before = path.before(module.layer_idx, key_1HND, value_1HND)
    out_1NHD = forest.attend(
        query_1HND,
        key_1HND,
        value_1HND,
        scaling=scaling,
        dropout=dropout,
        window=sliding_window or None,
        sink_H=s_aux,
        before=before,
    )
    return out_1NHD, None


for _name in NAMES.values():
    AttentionInterface.register(_name, forest_attention)
