"""Forward passes that give a token the same bits whatever shares its batch: `train.exact`.

Libraries choose a kernel, and with it an order of summation, by the shape of a product, and treat
the end of a vector otherwise than its middle. So the model is patched in three places. Products run
in blocks of fixed numbers of rows, the last one filled up with zeros. Activations run on whole
vectors. Rotations are read from a table. Attention is that of `exact_attention.py`. Everything else
that the supported models compute (sums of a row, sums and products of single elements, square
roots) is one and the same wherever a row stands, which the tests hold them to.

What is trusted of a library is checked when a model is made exact, for every shape of its products:
a row's result depends neither on its place in the block nor on which of the sizes the block has.

N: tokens, I and O: inputs and outputs of a linear layer, R: rows of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from flowkernels.lm_head import INVARIANT_STEP, new_head
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowtrain.training.lm_head import FusedLMHead
from flowtrain.types import UserError

BLOCKS = (256, 64, INVARIANT_STEP)
"""Numbers of rows of a product. Large blocks are for speed."""
_WHOLE_VECTORS = 128
"""Elements that two threads share without either of them ending within a vector: torch takes two
vectors of up to 32 elements at a time."""
_ONE_THREAD = 2**15
"""Elements that torch does not spread over threads."""
_TABLE_STEP = 1024
"""Positions that are added to a rotary table at a time."""


def make_exact(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Patch a model in place, before it is sharded; its weights and their names stay as they are.

    `dtype` and `device`: of its forward passes. Raises UserError where this machine's products depend on the
    place of a row.
    """
    for module in model.modules():
        kind = type(module)
        if isinstance(module, FusedLMHead):
            module.batch_invariant = True
        if isinstance(module, nn.Linear):
            has_bias = module.bias is not None
            check_products(module.in_features, module.out_features, has_bias, dtype, device)
        if kind is nn.Linear:
            module.__class__ = ExactLinear
        elif kind.__module__ in ("transformers.activations", "torch.nn.modules.activation"):
            module.__class__ = type(kind.__name__, (_WholeVectors, kind), {})
        elif kind.__name__.endswith("RotaryEmbedding"):
            module.__class__ = type(kind.__name__, (_Table, kind), {})


class ExactLinear(nn.Linear):
    """A linear layer whose forward pass runs in blocks of fixed numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _BlockProduct.apply(x.flatten(0, -2), self.weight, self.bias)
        return out.unflatten(0, x.shape[:-1])


class _BlockProduct(torch.autograd.Function):
    """x weight^T + bias; the backward pass takes whole products, as of a plain linear layer."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return block_product(x_NI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, dout_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            dout_NO @ weight_OI if needs_x else None,
            dout_NO.mT @ x_NI if needs_weight else None,
            dout_NO.sum(0) if needs_bias else None,
        )


def block_product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x weight^T + bias, [N, O], in products of `BLOCKS` rows."""
    num_rows, x_NI = len(x_NI), x_NI.contiguous()
    out_NO = x_NI.new_empty(num_rows, len(weight_OI))
    for start, size in _blocks(num_rows):
        x_RI, out_RO = x_NI[start : start + size], out_NO[start : start + size]
        if len(x_RI) == size:
            _product(x_RI, weight_OI, bias_O, out_RO)
        else:
            filled_RO = out_NO.new_empty(size, len(weight_OI))
            _product(F.pad(x_RI, (0, 0, 0, size - len(x_RI))), weight_OI, bias_O, filled_RO)
            out_RO.copy_(filled_RO[: len(x_RI)])
    return out_NO


def _blocks(num_rows: int) -> Iterator[tuple[int, int]]:
    """(first row, size) of blocks that cover the rows; the last may reach beyond them."""
    start = 0
    for size in BLOCKS:
        while num_rows - start >= size or (size == BLOCKS[-1] and start < num_rows):
            yield start, size
            start += size


def _product(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_RO: Tensor) -> None:
    if bias_O is None:
        torch.mm(x_RI, weight_OI.t(), out=out_RO)
    else:
        torch.addmm(bias_O, x_RI, weight_OI.t(), out=out_RO)


@functools.lru_cache(maxsize=256)
def check_products(
    num_inputs: int, num_outputs: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare the products of all sizes of blocks, rows in any place, and those of the LM head's
    chunks. Raises UserError where a bit differs.
    """
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight = (
        draw(n, num_inputs).to(device, dtype) for n in (BLOCKS[0] + BLOCKS[-1], num_outputs)
    )
    bias = draw(num_outputs).to(device, dtype) if has_bias else None
    expected = torch.cat([block_product(rows, weight, bias) for rows in x.split(BLOCKS[-1])])
    found = [block_product(rows, weight, bias) for rows in (x, x[: BLOCKS[1]], x.roll(-1, 0))]
    budget = BLOCKS[-1] * num_outputs * 4
    for memory_budget in (budget, None):
        head = new_head(
            x,
            weight,
            bias,
            fp32_logits=False,
            memory_budget=memory_budget,
            batch_invariant=True,
            shard=None,
        )
        found.append(torch.cat([head.logits(x[chunk]) for chunk in head.chunks(len(x))]))
    found[2] = found[2].roll(1, 0)
    if not all(torch.equal(each, expected[: len(each)]) for each in found):
        raise UserError(
            f"train.exact=true: products of {num_inputs} x {num_outputs} in {dtype} on {device} "
            "depend on a row's place here; set train.exact = false"
        )


class _WholeVectors(nn.Module):
    """Before an activation: no element is at the end of a thread's share, which torch may compute
    by other code than the rest.
    """

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten()
        missing = -len(flat) % _WHOLE_VECTORS
        flat = F.pad(flat, (0, missing)) if missing else flat
        if torch.get_num_threads() <= 2:
            out = super().forward(flat)
        else:
            out = torch.cat(
                [super(_WholeVectors, self).forward(x) for x in flat.split(_ONE_THREAD)]
            )
        return (out[:-missing] if missing else out).view(x.shape)


class _Table(nn.Module):
    """Before a rotary embedding: cosines and sines are computed once for each position, in steps of
    one size.
    """

    _table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        num_positions = int(position_ids.max()) + 1
        table = self._table
        if table is None or len(table[0]) < num_positions or table[0].device != x.device:
            with torch.inference_mode(False):  # or no later pass could be trained through it
                num_steps = -(-num_positions // _TABLE_STEP)
                positions = torch.arange(num_steps * _TABLE_STEP, device=x.device)
                parts = [
                    super(_Table, self).forward(x.new_empty(0, dtype=torch.float32), step[None])
                    for step in positions.split(_TABLE_STEP)
                ]
                table = self._table = tuple(torch.cat(each, 1)[0] for each in zip(*parts))
        return tuple(each[position_ids].to(x.dtype) for each in table)
