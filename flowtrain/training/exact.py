"""Forward passes that give a token the same bits whatever shares its batch: `train.exact`.

Libraries choose a kernel, and with it an order of summation, by the shape of a product, and treat
the end of a vector otherwise than its middle. So a model is patched: its products run in blocks of
fixed numbers of rows, the last one filled up with zeros; its activations on whole vectors; its
rotations are read from a table; and its attention is that of `exact_attention.py`. What else a
decoder computes (sums of a row, products of single elements, roots) is the same wherever a row
stands.

None of this is taken on trust. When a model is made exact, the products of its shapes and then the
model itself are compared with themselves, rows in other places and among others.

N: tokens, I and O: inputs and outputs of a linear layer, R: rows of a block, D: head size.
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

from flowtrain.training import attention, delta_net
from flowtrain.training.exact_attention import KEYS, QUERIES, add_blocks, width, with_ones
from flowtrain.training.experts import find_routers
from flowtrain.training.lm_head import FusedLMHead
from flowtrain.types import UserError

BLOCKS = (256, 64, INVARIANT_STEP)
"""Numbers of rows of a product; the large ones are for speed."""
_WHOLE_VECTORS = 128
"""Elements that two threads share without either of them ending within a vector: torch takes two
vectors of up to 32 elements at a time."""
_ONE_THREAD = 2**15
"""Elements that torch does not spread over threads."""
_TABLE_STEP = 1024
"""Positions that are added to a rotary table at a time."""
_CHECKED_TOKENS = KEYS + 5
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


@torch.no_grad()
def make_exact(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Patch a model in place, before it is sharded; its weights and their names stay as they are.

    `dtype` and `device` are those of its forward passes. Raises UserError where a token's results
    depend on others here.
    """
    if find_routers(model):
        raise UserError(
            "train.exact=true: a mixture of experts has no exact products; set it to false"
        )
    if delta_net.find_layers(model):
        raise UserError("train.exact=true: recurrent layers have no exact sums; set it to false")
    for module in model.modules():
        kind = type(module)
        if isinstance(module, FusedLMHead):
            module.batch_invariant = True
        if isinstance(module, nn.Linear):
            has_bias = module.bias is not None
            check_products(module.in_features, module.out_features, has_bias, dtype, device)
        if kind is nn.Linear:
            module.__class__ = ExactLinear
        elif kind.__module__ in _ACTIVATIONS:
            module.__class__ = type(kind.__name__, (_WholeVectors, kind), {})
        elif kind.__name__.endswith("RotaryEmbedding"):
            module.__class__ = type(kind.__name__, (_Table, kind), {})
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    check_attention(size, device)
    model.set_attn_implementation(attention.NAMES["exact"])
    _check_model(model)


class ExactLinear(nn.Linear):
    """A linear layer whose forward pass runs in blocks of fixed numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _BlockProduct.apply(x.flatten(0, -2), self.weight, self.bias)
        return out.unflatten(0, x.shape[:-1])


class _BlockProduct(torch.autograd.Function):
    """x weight^T + bias; the backward pass takes whole products, as that of a linear layer."""

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
    """Compute x weight^T + bias, [N, O], in products of `BLOCKS` rows."""
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


class _WholeVectors(nn.Module):
    """Before an activation: no element is at the end of a thread's share, which torch may compute
    by other code than the rest.
    """

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten()
        missing = -len(flat) % _WHOLE_VECTORS
        flat = F.pad(flat, (0, missing)) if missing else flat
        size = len(flat) if torch.get_num_threads() <= 2 else _ONE_THREAD
        parts = [super(_WholeVectors, self).forward(part) for part in flat.split(size)]
        out: Tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        return out[: x.numel()].view(x.shape)


class _Table(nn.Module):
    """Before a rotary embedding: cosines and sines are computed once for each position, in steps of
    one size; where layers of several types rotate, for each type.
    """

    def forward(self, x: Tensor, position_ids: Tensor, *of_type: str) -> tuple[Tensor, Tensor]:
        num_positions = int(position_ids.max()) + 1
        tables: dict[Any, tuple[Tensor, Tensor]] = vars(self).setdefault("_tables", {})
        table = tables.get(of_type)
        if table is None or len(table[0]) < num_positions or table[0].device != x.device:
            table = tables[of_type] = self._computed(num_positions, x.device, of_type)
        cos, sin = (each[position_ids].to(x.dtype) for each in table)
        return cos, sin

    @torch.inference_mode(False)  # no pass could be trained through it otherwise
    def _computed(
        self, num_positions: int, device: torch.device, of_type: tuple[str, ...]
    ) -> tuple[Tensor, Tensor]:
        num_steps = -(-num_positions // _TABLE_STEP)
        positions = torch.arange(num_steps * _TABLE_STEP, device=device)
        like = torch.empty(0, device=device)
        forward = functools.partial(super().forward, like)
        steps = [forward(s[None], *of_type) for s in positions.split(_TABLE_STEP)]
        cos, sin = (torch.cat(each, 1)[0] for each in zip(*steps, strict=True))
        return cos, sin


# ---- what is not taken on trust


@functools.lru_cache(maxsize=256)
def check_products(
    num_inputs: int, num_outputs: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare products in blocks of all sizes, rows in other places, and those of an LM head.
    Raises UserError where a bit differs.
    """
    num_rows = BLOCKS[0] + BLOCKS[-1]
    sizes = ((num_rows, num_inputs), (num_outputs, num_inputs), (1, num_outputs))
    x, weight, bias = (each.to(dtype) for each in _drawn(sizes, device))
    bias_O = bias[0] if has_bias else None
    expected = torch.cat([block_product(x_R, weight, bias_O) for x_R in x.split(BLOCKS[-1])])
    few = x[: BLOCKS[1] + BLOCKS[-1]]
    found = [block_product(each, weight, bias_O) for each in (x, few, few.roll(1, 0))]
    found[2] = found[2].roll(-1, 0)
    head = new_head(
        x,
        weight,
        bias_O,
        fp32_logits=False,
        memory_budget=None,
        batch_invariant=True,
    )
    found.append(torch.cat([head.logits(x[chunk]) for chunk in head.chunks(num_rows)]))
    if not all(torch.equal(each, expected[: len(each)]) for each in found):
        raise _depends(f"products of {num_inputs} x {num_outputs} in {dtype}", device)


@functools.lru_cache(maxsize=256)
def check_attention(size: int, device: torch.device) -> None:
    """Compare the products of attention, heads of this size, with rows in other places."""
    sizes = ((2, 16 * QUERIES, size), (2, 2 * KEYS, size), (2, 2 * KEYS, size))
    query, key, value = _drawn(sizes, device)

    def results(query: Tensor) -> tuple[Tensor, Tensor]:
        score = query @ key.mT
        total = query.new_zeros(*query.shape[:2], width(size))
        add_blocks(total, score, with_ones(value))
        return score, total

    expected = results(query)
    moved = [each.roll(-1, 1) for each in results(query.roll(1, 1))]
    few = results(query[:, :QUERIES])
    for whole, *others in zip(expected, moved, few, strict=True):
        if not all(torch.equal(each, whole[:, : each.shape[1]]) for each in others):
            raise _depends(f"products of attention with heads of {size}", device)


def _check_model(model: PreTrainedModel) -> None:
    """Compare a chain of tokens, alone, with its beginnings and with itself behind another one."""
    decoder, device = model.get_decoder(), model.device
    ids_N = torch.arange(_CHECKED_TOKENS, device=device) % model.config.vocab_size

    def hidden(*lengths: int) -> Tensor:
        ends = torch.tensor(lengths, device=device).cumsum(0)
        found: Tensor = decoder(
            input_ids=torch.cat([ids_N[:length] for length in lengths])[None],
            position_ids=torch.cat([torch.arange(n, device=device) for n in lengths])[None],
            use_cache=False,
            forest=attention.structure_of(
                attention.NAMES["exact"],
                ends.repeat_interleave(torch.tensor(lengths, device=device)),
            ),
        ).last_hidden_state[0]
        return found

    whole = hidden(_CHECKED_TOKENS)
    others = [hidden(1), hidden(KEYS - 1), hidden(3, _CHECKED_TOKENS)[3:]]
    if not all(torch.equal(each, whole[: len(each)]) for each in others):
        raise _depends(f"hidden states of a {model.config.model_type!r} model", device)


def _drawn(sizes: tuple[tuple[int, ...], ...], device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


def _depends(what: str, device: torch.device) -> UserError:
    return UserError(
        f"train.exact=true: on {device} {what} depend on the rows beside them; set it to false"
    )
