"""Ways of attention over token trees that `bench.attention` measures and the trainer does not take.

In a row, the keys of a segment are one slice, and the queries behind it that see all of them are
another: a dense rectangle. That of the root holds most pairs of a tree (77 % with 3 turns of
AgentFlow's shape, 55 % with 10). `RootTree` gives it to a library, and the rest to FlexAttention.

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
from flowtrain.trainer.packing import PackedRow, Segment, segments


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


def heavy_first(subtree_end_N: Tensor) -> tuple[Tensor, Tensor]:
    """Lay siblings out by the size of their subtrees, the largest first.

    Returns:
        the tokens in their new order, int64 [N], and `subtree_end` of the row that they make, [N].
    """
    ends = subtree_end_N.tolist()
    children: dict[int, list[Segment]] = {}  # by the end of their parent
    for part in segments(ends):
        children.setdefault(part.ancestors[-1][1] if part.ancestors else 0, []).append(part)

    def last_to_first(parent: int) -> list[Segment]:
        found = children.get(parent, [])
        # Of equals the first stays first.
        return sorted(found, key=lambda part: (ends[part.start] - part.start, -part.start))

    order: list[int] = []
    waiting = last_to_first(0)
    while waiting:
        part = waiting.pop()
        order += range(part.start, part.end)
        waiting += last_to_first(part.end)
    order_N = torch.tensor(order, device=subtree_end_N.device)
    place_N = torch.arange(len(ends), device=subtree_end_N.device)
    return order_N, place_N + (subtree_end_N - place_N)[order_N]


@dataclass(frozen=True, slots=True)
class RootTree:
    """The structure of a row as `FlexTree` has it, without what the first tree's other tokens see
    of its root: every one sees all of it.
    """

    rest: BlockMask
    start: int
    """Where the root ends, and those tokens begin."""
    stop: int
    """Where the first tree ends."""

    @classmethod
    def of(cls, subtree_end_N: Tensor) -> RootTree:
        start = segments(subtree_end_N.tolist())[0].end
        own_N = subtree_end_N.clone()
        own_N[:start].clamp_(max=start)
        return cls(flex.FlexTree.of(own_N).mask(), start, int(subtree_end_N[0]))

    def attend(
        self, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, *, scaling: float
    ) -> Tensor:
        """See `Forest.attend`."""
        inputs = [query_1HND, key_1KND, value_1KND]
        out, lse = run_flex(self.rest, *inputs, scaling=scaling, lse=True)
        if self.start < self.stop:
            if not query_1HND.is_cuda:  # torch's kernel for CPUs has no groups
                group = query_1HND.shape[1] // key_1KND.shape[1]
                inputs[1:] = [x.repeat_interleave(group, 1) for x in inputs[1:]]
            out = _WithRoot.apply(*inputs, out, lse, self.start, self.stop, scaling)
        whole: Tensor = out.transpose(1, 2).contiguous()
        return whole


class _WithRoot(torch.autograd.Function):
    """Add the root's rectangle to attention without it. M: queries of the rectangle.

    Softmax over all keys is the mean of both outputs, weighted by exp(lse - whole lse). A library's
    backward takes exp(scores - lse) for the probabilities and sum(grad * out) for what softmax
    subtracts: given the whole lse and output, its gradients are those of whole attention.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_1HND: Tensor,
        key_1KND: Tensor,
        value_1KND: Tensor,
        rest_1HND: Tensor,
        rest_lse_1HN: Tensor,
        start: int,
        stop: int,
        scaling: float,
    ) -> Tensor:
        rectangle = query_1HND[:, :, start:stop], key_1KND[:, :, :start], value_1KND[:, :, :start]
        root_1HMD, shaped_lse, ctx.state = _library(*rectangle, scaling)
        rest = rest_1HND[:, :, start:stop], rest_lse_1HN[:, :, start:stop]
        root_lse_1HM = shaped_lse.reshape(rest[1].shape)
        out_1HMD, lse_1HM = _fused(_merged, root_1HMD)(root_1HMD, root_lse_1HM, *rest)
        # cuDNN's is [1, H, M, 1], and another layout of it would be misread.
        shaped_lse = torch.empty_like(shaped_lse).copy_(lse_1HM.view_as(shaped_lse))
        out_1HMD = out_1HMD.contiguous()
        ctx.save_for_backward(*rectangle, *rest, out_1HMD, shaped_lse)
        ctx.bounds, ctx.scaling = (start, stop), scaling
        whole_1HND = rest_1HND.clone()
        whole_1HND[:, :, start:stop] = out_1HMD
        return whole_1HND

    @staticmethod
    def backward(ctx: Any, grad_1HND: Tensor) -> tuple[Tensor | None, ...]:
        *rectangle, rest_1HMD, rest_lse_1HM, out_1HMD, shaped_lse = ctx.saved_tensors
        (start, stop), num_tokens = ctx.bounds, grad_1HND.shape[2]
        grad_1HMD = grad_1HND[:, :, start:stop].contiguous()
        given = grad_1HMD, *rectangle, out_1HMD, shaped_lse
        query_grad, key_grad, value_grad = _library_backward(ctx.state, ctx.scaling, *given)
        rest = rest_1HMD, rest_lse_1HM, out_1HMD, shaped_lse.reshape(rest_lse_1HM.shape)
        grad_1HMD, lse_grad_1HM = _fused(_share, grad_1HMD)(grad_1HMD, *rest)
        rest_grad = grad_1HND.clone(memory_format=torch.contiguous_format)
        rest_grad[:, :, start:stop] = grad_1HMD
        behind = num_tokens - stop
        return (
            F.pad(query_grad, (0, 0, start, behind)),
            F.pad(key_grad, (0, 0, 0, num_tokens - start)),
            F.pad(value_grad, (0, 0, 0, num_tokens - start)),
            rest_grad,
            F.pad(lse_grad_1HM, (start, behind)),
            *(None, None, None),
        )


def _merged(root: Tensor, root_lse: Tensor, rest: Tensor, rest_lse: Tensor) -> tuple[Tensor, ...]:
    lse = torch.logaddexp(root_lse, rest_lse)
    weight = (root_lse - lse).exp()[..., None]
    return torch.lerp(rest.float(), root.float(), weight).to(rest.dtype), lse


def _share(
    grad: Tensor, rest: Tensor, rest_lse: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the rest's output and of its log-sum-exp."""
    weighted = grad.float() * (rest_lse - lse).exp()[..., None]
    return weighted.to(grad.dtype), (weighted * (rest.float() - out.float())).sum(-1)


def _fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    return _compiled(function) if like.is_cuda else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _library(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Any:
    """(output, log-sum-exp in the library's shape, what its backward takes besides)"""
    if not query.is_cuda:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *attend(query, key, value, scale=scaling), ()
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *state, _ = attend(query, key, value, None, True, scale=scaling)
    return out, lse, state


def _library_backward(state: Sequence[Any], scaling: float, *given: Tensor) -> Any:
    """The gradients by queries, keys and values.

    `given`: the output's gradient, queries, keys, values, the output, its log-sum-exp.
    """
    if not given[0].is_cuda:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*given, 0.0, False, scale=scaling)
    *sequences, seed, offset = state
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return backward(*given, seed, offset, None, *sequences, 0.0, False, scale=scaling)


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
