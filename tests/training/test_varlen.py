"""Attention by variable lengths: its lists of keys on the CPU, and every kind of attention that a
GPU has against that of the CPU.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_flex import FORESTS
from torch import Tensor, nn

from flowtrain.training import attention, varlen
from flowtrain.training.attention import Forest, forest_attention, name_of, structure_of
from flowtrain.training.flex import BLOCK
from flowtrain.training.varlen import VarlenTree
from flowtrain.types import UserError


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What `varlen_attn` is documented to compute, sequence by sequence."""
    assert window_size == (-1, 0) and cu_queries.dtype == cu_keys.dtype == torch.int32
    assert int(cu_queries.diff().max()) == most_queries and int(cu_keys.diff().max()) == most_keys
    outs = []
    bounds = zip(*(_pairs(cu) for cu in (cu_queries, cu_keys)), strict=True)
    for (first, last), (begin, end) in bounds:
        q, k, v = query[first:last], key[begin:end], value[begin:end]
        num_before = len(k) - len(q)
        mask = torch.arange(len(k)) <= num_before + torch.arange(len(q))[:, None]
        heads = (x.transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, mask, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def _pairs(bounds: Tensor) -> list[tuple[int, int]]:
    values = bounds.tolist()
    return list(itertools.pairwise(values))


def attended(
    kinds: Sequence[Any], ends: Tensor, dtype: torch.dtype, heads: tuple[int, int, int]
) -> list[tuple[Tensor, ...]]:
    """(output, gradients by query, key and value) of each kind, on the device of the ends."""
    num_heads, num_kv_heads, size = heads
    rng = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, number, len(ends), size, generator=rng).to(ends.device, dtype)
        for number in (num_heads, num_kv_heads, num_kv_heads)
    ]
    upstream = torch.randn(1, len(ends), num_heads, size, generator=rng).to(ends.device, dtype)
    found = []
    for kind in kinds:
        inputs = [x.clone().requires_grad_() for x in tensors]
        out = forest_attention(nn.Module(), *inputs, None, forest=kind(ends), scaling=0.3)[0]
        found.append((out.detach(), *torch.autograd.grad(out, inputs, upstream)))
    return found


@pytest.mark.parametrize("name", FORESTS)
def test_gathered_keys_are_those_that_each_segment_sees(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    ours, truth = attended((VarlenTree.of, Forest.of), FORESTS[name], torch.float32, (4, 2, 16))
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def test_a_kind_for_gpus_is_refused_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert name_of("auto", cpu) == attention.NAME and name_of("sdpa", cpu) == "flowtrain_sdpa"
    for kind in ("flex", "flash", "varlen"):
        with pytest.raises(UserError, match=f"train.attention = '{kind}' needs a GPU"):
            name_of(kind, cpu)
    with pytest.raises(AssertionError, match="N x N"):
        structure_of("eager", torch.arange(1, BLOCK + 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 2, 128)])
@pytest.mark.parametrize("kind", ["flex", "flash", "varlen"])
def test_every_kind_on_a_gpu_is_the_attention_of_the_cpu(
    kind: str, heads: tuple[int, int, int]
) -> None:
    """Within a few roundings to bf16 of the same in fp32."""
    if kind == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    torch._dynamo.reset()
    for ends in FORESTS.values():
        (truth,) = attended((Forest.of,), ends, torch.float32, heads)
        on_gpu = ends.cuda()
        (ours,) = attended(
            (lambda x: structure_of(attention.NAMES[kind], x),), on_gpu, torch.bfloat16, heads
        )
        (plain,) = attended((Forest.of,), on_gpu, torch.bfloat16, heads)
        for mine, other, true in zip(ours, plain, truth, strict=True):
            scale = true.abs().max()
            error = (mine.cpu().float() - true).abs().max() / scale
            rounding = (other.cpu().float() - true).abs().max() / scale
            assert error <= 2 * rounding + 2**-8, (kind, float(error), float(rounding))
