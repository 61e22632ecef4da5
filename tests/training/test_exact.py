"""Log-probs of an exact sampler are those of an exact trainer, bit for bit. Run as a script, this
file is two ranks that sample and train.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flowkernels import LossSpec
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import fork, launch
from torch.distributed.tensor import DTensor

from bench.exact_cases import (
    DTYPES,
    FAMILIES,
    Pair,
    compare,
    draw_calls,
    draw_sampling,
    tiny_model,
    tiny_tokenizer,
)
from flowtrain.training import exact, exact_attention
from flowtrain.training import model as models
from flowtrain.training.balance import balance
from flowtrain.training.cost import ForwardCost
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World, end_process
from flowtrain.types import Sampling, UserError

CASES = [(family, dtype) for family in FAMILIES for dtype in DTYPES]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World.join("cpu")
    yield world
    world.leave()


@functools.cache
def pair(family: str, dtype: str, exact: bool = True) -> Pair:
    model = tiny_model(family, tiny_tokenizer())
    return Pair.of(model, DTYPES[dtype], World(0, 1, torch.device("cpu")), exact)


@pytest.mark.parametrize(("family", "dtype"), CASES)
@settings(max_examples=16)
@given(st.randoms(use_true_random=False))
def test_trainer_and_sampler_agree_in_any_packing(
    world: World, family: str, dtype: str, rng: random.Random
) -> None:
    both, sampling = pair(family, dtype), draw_sampling(rng)
    samples = draw_calls(both.engine, sampling, rng)
    assert compare(both.model, samples, sampling, rng).num_different == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_option_they_do_not(world: World, dtype: str) -> None:
    both, rng = pair("llama", dtype, exact=False), random.Random(0)
    sampling = Sampling(max_new_tokens=9, ignore_end=True)
    assert compare(both.model, draw_calls(both.engine, sampling, rng), sampling, rng).num_different
