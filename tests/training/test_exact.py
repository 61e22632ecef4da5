"""Log-probs of an exact sampler are those of an exact trainer, bit for bit. Run as a script, this
file is two ranks that sample and train.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from exact_cases import (
    DTYPES,
    FAMILIES,
    Pair,
    compare,
    draw_calls,
    draw_sampling,
    tiny_model,
    tiny_tokenizer,
)
from flowkernels import LossSpec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import fork, launch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING

from flowtrain.training import exact, sharding
from flowtrain.training import model as models
from flowtrain.training.balance import balance
from flowtrain.training.cost import ForwardCost
from flowtrain.training.row_loss import row_loss
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World, end_process
from flowtrain.types import Sampling, UserError

KNOWN = [family for family in FAMILIES if family in CONFIG_MAPPING]
CASES = [(family, dtype) for family in KNOWN for dtype in DTYPES]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World.join("cpu")
    yield world
    world.leave()


@functools.cache
def pair(family: str, dtype: str, is_exact: bool = True, size: float = 1.0) -> Pair:
    model = tiny_model(family, tiny_tokenizer())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(size)
    return Pair.of(model, DTYPES[dtype], World(0, 1, torch.device("cpu")), is_exact)


@pytest.mark.parametrize(("family", "dtype"), CASES)
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])  # a smaller case says no more
@given(st.randoms(use_true_random=False))
def test_trainer_and_sampler_agree_in_any_packing(
    world: World, family: str, dtype: str, rng: random.Random
) -> None:
    both, sampling = pair(family, dtype), draw_sampling(rng)
    samples = draw_calls(both.engine, sampling, rng)
    assert compare(both.model, samples, sampling, rng).num_different == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_option_they_do_not(world: World, dtype: str) -> None:
    both, rng = pair("llama", dtype, is_exact=False), random.Random(0)
    sampling = Sampling(max_new_tokens=9, ignore_end=True)
    assert compare(both.model, draw_calls(both.engine, sampling, rng), sampling, rng).num_different


@pytest.mark.parametrize("family", KNOWN)
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(st.randoms(use_true_random=False))
def test_without_the_option_they_differ_by_rounding(
    world: World, family: str, rng: random.Random
) -> None:
    """Windows and sinks too."""
    both, sampling = pair(family, "fp32", is_exact=False, size=0.5), draw_sampling(rng)
    found = compare(both.model, draw_calls(both.engine, sampling, rng), sampling, rng)
    assert found.largest < 1e-5


# ---- gradients


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_is_that_of_the_plain_model(recompute: bool) -> None:
    """A bias, grouped heads, and branches among the rows."""
    alone, rng = World(0, 1, torch.device("cpu")), random.Random(3)
    samples = draw_calls(pair("qwen2", "fp32").engine, Sampling(9, ignore_end=True), rng)
    found = []
    for is_exact in (False, True):
        spec = sharding.ShardSpec(torch.float32, recompute=recompute, exact=is_exact)
        model = sharding.shard(tiny_model("qwen2", tiny_tokenizer()), alone, spec)
        for row in pack_rows(samples, 200):
            row_loss(model, row, LossSpec(), 1.0, 1.0).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, found[0][name], rtol=1e-3, atol=1e-4)


# ---- on several ranks, as a run goes


@pytest.mark.dist
def test_every_step_on_new_weights_starts_at_a_ratio_of_1() -> None:
    launch(__file__, [(2, [dtype]) for dtype in DTYPES])


def run_steps(dtype: str) -> None:
    """Sample, exchange rows, train and load, twice; layers are sharded one by one."""
    torch.set_num_threads(1)
    world, rng = World.join("cpu"), random.Random(int(torch.distributed.get_rank()))
    sharding._SMALL = 0
    model = tiny_model("qwen3", tiny_tokenizer())
    cost = ForwardCost.of(model).flops
    engine = Pair.of(copy.deepcopy(model), DTYPES[dtype], World(0, 1, world.device), True).engine
    spec = sharding.ShardSpec(DTYPES[dtype], recompute=True, exact=True)
    trainer = Trainer(sharding.shard(model, world, spec), world, LossSpec(), OptimSpec(lr=1e-2))
    for _ in range(2):
        samples = draw_calls(engine, Sampling(9, top_k=20, ignore_end=True), rng)
        weighted = [replace(s, loss_weights=(1.0,) * len(s.response_ids)) for s in samples]
        mine = balance([pack_rows(weighted, 200)], cost, world, num_takers=world.size)
        stats = trainer.step(mine)
        assert stats["logprob_mismatch"] == 0.0 and stats["num_tokens"] > 0
        assert stats["ratio_min"] == stats["ratio_max"] == 1.0 and stats["grad_norm"] > 0
        engine_weights = dict(engine._model.named_parameters())
        for name, weight in models.named_weights(trainer.model).items():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            engine_weights[name].data.copy_(whole)
    end_process(0)


# ---- what is refused


def product_by_place(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    torch.mm(x, weight.t(), out=out)
    out[3] *= 1 + 2**-20


def blocks_that_forget(total: Tensor, weight: Tensor, value: Tensor) -> None:
    total += weight @ value
    total[:, 1] *= 1 + 2**-20


@pytest.mark.parametrize(
    ("module", "name", "broken", "message"),
    [
        (exact, "_product", product_by_place, "on cpu products of 24 x 8 in torch.float32"),
        (exact, "add_blocks", blocks_that_forget, "on cpu products of attention with heads of 12"),
    ],
)
def test_a_library_whose_products_depend_on_the_place_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, broken: object, message: str
) -> None:
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(UserError, match=message):
        if name == "_product":
            exact.check_products(24, 8, False, torch.float32, torch.device("cpu"))
        else:
            exact.check_attention(12, torch.device("cpu"))


def test_a_model_whose_tokens_see_their_neighbours_is_refused() -> None:
    model = tiny_model("llama", tiny_tokenizer())
    norm = model.get_decoder().norm
    norm.register_forward_hook(lambda _, __, out: out * (1 + out.shape[1] * 2**-20))
    with pytest.raises(UserError, match="hidden states of a 'llama' model depend"):
        exact.make_exact(model, torch.float32, model.device)


if __name__ == "__main__":
    fork(run_steps)
