"""Ways of attention over token trees that `bench.attention` measures and the trainer does not take.

TRL 1.16 gathers the keys of all ancestors of every segment for a kernel that knows sequences alone.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from flowtrain.records import Sample
from flowtrain.trainer.attention import flex
from flowtrain.trainer.packing import PackedRow


def run_flex(mask: BlockMask, *inputs: Tensor, scaling: float, lse: bool = False) -> Any:
    """FlexAttention with the trainer's options, on queries, keys and values [B, H, N, D].

    Returns:
        the output [B, H, N, D]; with `lse` also the log-sum-exp of the scores, fp32 [B, H, N].
    """
    on_gpu, (query, key, _) = inputs[0].is_cuda, inputs
    attend: Any = flex._compiled() if on_gpu else flex_attention
    found = attend(
        *inputs,
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=dict(flex._TRITON) if on_gpu else None,
        return_aux=AuxRequest(lse=True) if lse else None,
    )
    return (found[0], found[1].lse) if lse else found


@dataclass(slots=True)
class SplitTree:
    """The structure of a row as `FlexTree` has it, with head g of every group in batch g: key heads
    are as many as query heads in each batch.
    """

    mask: BlockMask
    batched: BlockMask | None = None
    """Made once, by the first layer: its lists are many small launches."""

    @classmethod
    def of(cls, subtree_end_N: Tensor) -> SplitTree:
        return cls(flex.FlexTree.of(subtree_end_N).mask())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, **_: object
    ) -> Tensor:
        num_keys, group = key.shape[1], query.shape[1] // key.shape[1]
        query_GKND = query.view(num_keys, group, *query.shape[2:]).transpose(0, 1)
        mask = self.batched = self.batched or _batched(self.mask, group)
        keys = (x.expand(group, *x.shape[1:]) for x in (key, value))
        out_GKND: Tensor = run_flex(mask, query_GKND, *keys, scaling=scaling)
        return out_GKND.permute(2, 1, 0, 3).flatten(1, 2)[None]


def _batched(mask: BlockMask, num: int) -> BlockMask:
    parts = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    lists = [x.expand(num, *x.shape[1:]).contiguous() for x in parts if x is not None]
    make: Any = BlockMask.from_kv_blocks
    options = {"BLOCK_SIZE": mask.BLOCK_SIZE, "mask_mod": mask.mask_mod}
    return cast(BlockMask, make(*lists, **options, seq_lengths=mask.seq_lengths))


@functools.cache
def trl_packing() -> Any:
    """TRL's module of token trees alone, as its package imports a trainer and all that it takes.

    Its kernel, which it would download, is replaced. Raises ModuleNotFoundError without TRL 1.16.
    """
    found = importlib.util.find_spec("trl")
    folders = (found.submodule_search_locations if found else None) or []
    paths = [Path(x) / "experimental" / "async_grpo" / "packing.py" for x in folders]
    if not paths or not paths[0].exists():
        raise ModuleNotFoundError("No module named 'trl', or one without token trees", name="trl")
    spec = importlib.util.spec_from_file_location("trl_packing", paths[0])
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_sequences)
    return module


def trl_row(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """TRL's row of the samples. M: its tokens, more than ours: it forks one token early, and has
    the last of each response.
    """
    row = trl_packing().TreeRow()
    for sample in samples:
        ids = torch.tensor(sample.prompt_ids + sample.response_ids)
        facts = {"completion_mask": torch.zeros_like(ids), "old_log_probs": torch.zeros(len(ids))}
        row.add({"input_ids": ids, **facts, "advantage": 0.0, "group_id": 0})
    packed: dict[str, Tensor] = row.pack()
    return packed


def trl_places(packed: Mapping[str, Tensor], row: PackedRow) -> tuple[Tensor, Tensor]:
    """Match TRL's tokens and ours. One that ours lacks, whom none sees, counts as its parent.

    Returns:
        the token of ours that each of TRL's is, int64 [M], and the first of TRL's that each of ours
        is, int64 [N].
    """
    child: dict[tuple[int, int], int] = {}
    trail: list[int] = []
    ids, depths = row.input_ids_N.tolist(), row.position_ids_N.tolist()
    for place, (token, depth) in enumerate(zip(ids, depths, strict=True)):
        child[trail[depth - 1] if depth else -1, token] = place
        trail[depth:] = [place]
    places: list[int] = []
    ids, depths = packed["input_ids"].tolist(), packed["position_ids"].tolist()
    for token, depth in zip(ids, depths, strict=True):
        parent = trail[depth - 1] if depth else -1
        places.append(child.get((parent, token), parent))
        trail[depth:] = places[-1:]
    first = {place: number for number, place in reversed(list(enumerate(places)))}
    return torch.tensor(places), torch.tensor([first[place] for place in range(len(child))])


def trl_attention(packed: Mapping[str, Tensor], device: torch.device) -> Callable[..., Tensor]:
    """TRL's attention over a row of its own, as `Forest.attend`."""
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    options: dict[str, Any] = {name: packed[name].to(device) for name in names}
    most = dict(zip("qk", packed["tree_max_seqlens"].tolist(), strict=True))
    options |= {f"tree_max_seqlen_{name}": number for name, number in most.items()}
    layer: Any = nn.Linear(1, 1)  # fp32 is cast to the dtype of a layer's weight
    layer.config = SimpleNamespace()

    def attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        attention = trl_packing().tree_attention
        out: Tensor = attention(layer, query, key, value, None, scaling=scaling, **options)[0]
        return out

    return attend


def _sequences(
    query_MHD: Tensor,
    key_LKD: Tensor,
    value_LKD: Tensor,
    bounds_S1: Tensor,
    key_bounds_S1: Tensor,
    *most: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """FlashAttention's call for sequences in a row, whose last query sees the last key."""
    assert causal
    assert window_size == (-1, -1)
    inputs = query_MHD, key_LKD, value_LKD
    options: dict[str, Any] = {"scale": softmax_scale}
    if query_MHD.is_cuda:
        # The kernel takes groups anyhow; a newer torch wants to be told.
        names = {"enable_gqa"} & inspect.signature(varlen_attn).parameters.keys()
        bounds = bounds_S1, key_bounds_S1, *most
        options |= {"window_size": (-1, 0), **dict.fromkeys(names, True)}
        return cast(Tensor, cast(Any, varlen_attn)(*inputs, *bounds, **options))
    parts, attend = [], cast(Any, F.scaled_dot_product_attention)
    for queries, keys in zip(
        *(pairwise(x.tolist()) for x in (bounds_S1, key_bounds_S1)), strict=True
    ):
        slices = slice(*queries), slice(*keys), slice(*keys)
        own = [x[part].transpose(0, 1)[None] for x, part in zip(inputs, slices, strict=True)]
        num_queries, num_keys = own[0].shape[2], own[1].shape[2]
        sees = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        part = attend(*own, sees, **options, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
