"""Recurrent layers on packed rows: a segment goes on from its parent, and nothing else is read."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import sampled
from family_cases import (
    RECURRENT,
    Found,
    alone,
    by_token,
    check_equal,
    fp64_rule,
    model_of,
    on_rows,
    prepare,
    sample_trees,
)
from flowkernels import LossSpec
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import fork, launch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from bench.families import samples
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import Sample, UserError
from flowtrain.trainer import sharding
from flowtrain.trainer.attention.flex import padded
from flowtrain.trainer.attention.registration import NAME, structure_of
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import score_row
from flowtrain.trainer.model import delta_net
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.check import check_config
from flowtrain.trainer.model.delta_net import DeltaTree
from flowtrain.trainer.packing import pack_row, pack_rows
from flowtrain.trainer.setup import simulation
from flowtrain.trainer.setup.simulation import activations
from flowtrain.trainer.toy import new_model
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.utils.commands import end_process

FAMILY = "qwen3_5_text"


def on_tree(family: str, dtype: torch.dtype = torch.float32) -> tuple[Found, Found]:
    """(alone, on a tree)"""
    model, every = model_of(family).to(dtype), samples()
    truth = alone(model, every)
    prepare(model)
    return truth, on_rows(model, pack_rows(every, 1))


def error(found: Found, truth: Found) -> float:
    """The worst of a gradient's errors, by the largest of the gradient."""
    return max(
        float((found[1][name] - each).abs().max() / each.abs().max())
        for name, each in truth[1].items()
    )


# ---- the tree


@pytest.mark.parametrize("family", [name for name in RECURRENT if name != "qwen3_5_moe_text"])
@settings(derandomize=True, deadline=None, max_examples=6)
@given(every=sample_trees(), num_rows=st.integers(1, 8))
def test_any_tree(family: str, every: list[Sample], num_rows: int) -> None:
    with fp64_rule():
        model = model_of(family).double()
        truth = alone(model, every)
        prepare(model)
        whole = [padded(row) for row in pack_rows(every, 1)]
        for rows in (pack_rows(every, num_rows), whole):
            check_equal(on_rows(model, rows), truth, rtol=1e-4)  # norms and routers stay in fp32


@pytest.mark.parametrize("family", RECURRENT)
def test_transformers_own_rule_errs_on_a_tree_as_it_does_alone(family: str) -> None:
    """Its rule runs in fp32 whatever the dtype of the model is."""
    with fp64_rule():
        truth, _ = on_tree(family, torch.float64)
    each, tree = on_tree(family)
    assert error(tree, truth) < 4 * error(each, truth) + 1e-6


def test_rows_by_transformers_alone_leak() -> None:
    """The smallest case of what a row without `recurrence` does: two texts in one row."""
    model = model_of(FAMILY)
    one, two = torch.arange(5, 25), torch.arange(30, 40)
    with torch.no_grad():
        right = model(input_ids=two[None], use_cache=False).logits[0]
        place = torch.cat([torch.arange(20), torch.arange(10)])[None]
        both = torch.cat([one, two])[None]
        leaked = model(input_ids=both, position_ids=place, use_cache=False).logits[0, 20:]
        prepare(model)
        ends = torch.tensor([20] * 20 + [30] * 10)
        options = {"forest": structure_of(NAME, ends), **delta_net.recurrence_of(model, ends)}
        ours = model(input_ids=both, position_ids=place, use_cache=False, **options).logits[0, 20:]
    assert (leaked - right).abs().max() > 0.1
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)


def test_segments_of_a_depth_run_side_by_side() -> None:
    """A root of 4 tokens, with children of 30, 2 and 29 tokens, of which the second has two."""
    lengths = [(4, 68), (30, 34), (2, 39), (1, 37), (2, 39), (29, 68)]
    ends = [end for length, end in lengths for _ in range(length)]
    tree = DeltaTree.of(torch.tensor(ends), ends={3, 34})
    shapes = [[tuple(group.token_SL.shape) for group in groups] for groups in tree.depths]
    assert shapes == [[(1, 4)], [(2, 30), (1, 1)], [(1, 1)], [(2, 2)]]
    assert tree.kept_P.tolist() == [3, 34, 35]
    assert tree.depths[3][0].parent_S.tolist() == [0, 0]
    found = tree.path(torch.tensor([0, 34, 36, 39]), 4).tolist()
    assert found == [[68, 68, 68, 0], [1, 2, 3, 34], [3, 34, 35, 36], [1, 2, 3, 39]]


def test_segments_of_other_lengths_have_states_of_their_own() -> None:
    """A root of 2 tokens, and children of 30 and 2 tokens with two children each."""
    lengths = [(2, 38), (30, 34), (1, 33), (1, 34), (2, 38), (1, 37), (1, 38)]
    ends = [end for length, end in lengths for _ in range(length)]
    tree = DeltaTree.of(torch.tensor(ends))
    assert [len(groups) for groups in tree.depths] == [1, 2, 1]
    assert tree.kept_P.tolist() == [1, 31, 35]
    assert tree.depths[2][0].parent_S.tolist() == [0, 0, 1, 1]


def test_a_state_in_the_middle_of_a_segment_is_kept() -> None:
    tree = DeltaTree.of(torch.tensor([6] * 6), ends={2, 5})
    assert [len(groups) for groups in tree.depths] == [1, 1] and tree.kept_P.tolist() == [2, 5]
    assert tree.parent_N1.tolist() == [6, 0, 1, 2, 3, 4, 6]


# ---- a model


def test_only_layers_that_hear_where_tokens_come_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = model_of(FAMILY).config
    check_config(config, "PATH")
    monkeypatch.setattr(delta_net, "_is_known", lambda module: False)
    with pytest.raises(UserError, match="has layers with a recurrent state"):
        check_config(config, "PATH")


def test_a_layer_that_was_not_equipped_reads_no_row() -> None:
    with pytest.raises(AssertionError, match="was not equipped"):
        delta_net.recurrence_of(model_of(FAMILY), torch.tensor([1]))


def test_a_recurrent_layer_costs_its_weights_and_its_state() -> None:
    model = model_of(FAMILY)
    weights = sum(p.numel() for p in model.get_decoder().layers.parameters())
    cost = ForwardCost.of(model)
    assert cost.per_token == 2 * weights + 2 * 6 * 4 * 8 * 8
    assert cost.per_pair == 4 * 4 * 8, "one layer of three has attention"


@pytest.mark.parametrize(("dtype", "recompute"), [(torch.float32, False), (torch.bfloat16, True)])
def test_memory_of_layers_of_both_kinds_is_planned(
    dtype: torch.dtype, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention"]
    config = model_of(FAMILY, num_hidden_layers=5, layer_types=kinds).config
    planned = activations(config, dtype, 128, recompute)
    how = {"layers": [*range(5)], "lora": None, "fused": True}
    counted = simulation._simulate(config, dtype, 128, recompute, **how)
    assert planned[0] == pytest.approx(counted[0], rel=0.01)
    assert planned[1] == pytest.approx(counted[1], rel=0.2)
    if not recompute:
        monkeypatch.setattr(simulation, "_RECURRENT_TOKENS", 192)
        found = activations(config, dtype, 1024, recompute)[0]
        assert found == pytest.approx(8 * planned[0], rel=0.02), "of a part of the row"


# ---- the sampler


def tiny(tokenizer: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return new_model(tokenizer, 48, 4, 4, 256, "qwen3_5").eval()


def test_the_engine_samples_what_transformers_and_the_trainer_read(tiny_path: str) -> None:
    tokenizer = models.load_tokenizer(tiny_path)
    engine = TorchEngine(tiny(tokenizer), tokenizer, store=None)
    # One of them is the beginning of what others share.
    prompts = [(5, 6, 7, 8, 9), (5, 6), (5, 6, 7, 4), (5, 6, 7, 8, 9), (7,), (5, 6)]
    every = sampled(engine, prompts, 4)
    model = tiny(tokenizer)
    model.set_attn_implementation("eager")
    for each in every:
        ids = torch.tensor(each.prompt_ids + each.response_ids)
        with torch.no_grad():
            logprob_NV = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        own = logprob_NV[len(each.prompt_ids) - 1 : -1].gather(1, ids[len(each.prompt_ids) :, None])
        torch.testing.assert_close(own[:, 0], torch.tensor(each.logprobs), rtol=0, atol=1e-5)
    prepare(model)
    row = pack_row(every)
    mismatch = score_row(model, row, 1.0).logprob_T - row.sampler_logprob_T
    assert mismatch.abs().max() < 1e-5
    _, scores = asyncio.run(engine.score(every, 1.0))
    for each, score in zip(every, scores, strict=True):
        assert score == pytest.approx(each.logprobs, abs=1e-5)
    engine.close()


# ---- several ranks


def step_of(world: World, how: dict[str, Any]) -> Trainer:
    """Take an optimizer step in layers that are sharded one by one."""
    model = sharding.shard(model_of(FAMILY), world, sharding.ShardSpec(**how))
    trainer = Trainer(model, world, LossSpec(), OptimSpec(lr=1e-2, grad_clip=0.0))
    every = samples()
    rows = [pack_row(every[:3]), pack_row(every[3:])]
    trainer.step([rows[world.rank :: world.size]])
    return trainer


RANKED: dict[str, dict[str, Any]] = {
    "plain": {"dtype": torch.float32},
    "recomputed": {"dtype": torch.float32, "recompute": True},
}


def run(out: str) -> None:
    """Run the part of every rank."""
    torch.set_num_threads(1)
    sharding._SMALL = 0
    world = World.join("cpu", timeout_s=120)
    for name, how in RANKED.items():
        weights = models.full_weights(step_of(world, how).model)
        if world.is_main:
            save_file(weights, Path(out) / f"{name}.{world.size}.safetensors")
    end_process(0)


@pytest.mark.dist
def test_ranks_train_what_one_rank_trains(tmp_path: Path) -> None:
    """Bit for bit, because a sum has two terms, and whether or not layers are computed again."""
    launch(__file__, [(size, (str(tmp_path),)) for size in (1, 2)])
    start = model_of(FAMILY).state_dict()
    one, *more = (
        load_file(tmp_path / f"{name}.{size}.safetensors") for name in RANKED for size in (1, 2)
    )
    for name, weight in one.items():
        assert all(torch.equal(weight, each[name]) for each in more), name
        assert not torch.equal(weight, start[name]), name


if __name__ == "__main__":
    fork(run)


def check_rule(device: torch.device, dtype: torch.dtype, rtol: float) -> None:
    """What runs on a device, depth by depth, against the rule token by token in fp64."""
    module = inspect.getmodule(type(model_of(FAMILY)))
    here = delta_net.Functions(*(getattr(module, name) for name in delta_net._NAMES))
    # A root of 90 tokens; children of 70, 20 and 130, the first with two of its own; another root.
    segments = [(90, 340), (70, 190), (15, 175), (15, 190), (20, 210), (130, 340), (60, 400)]
    end_N = torch.cat([torch.full((number,), end) for number, end in segments])
    rng = torch.Generator().manual_seed(0)
    shape = (1, len(end_N), 2, 64)
    query, key, value, weight = (torch.randn(shape, generator=rng).to(dtype) for _ in range(4))
    beta = torch.rand(shape[:3], generator=rng).to(dtype)
    drawn = (query, key, value, -torch.rand(shape[:3], generator=rng), beta)

    def results(functions: delta_net.Functions, device: torch.device, double: bool) -> Any:
        row = [x.to(device, torch.float64 if double else x.dtype).requires_grad_() for x in drawn]
        tree = DeltaTree.of(end_N.to(device))
        out, states = tree.run(functions, *row, use_qk_l2norm_in_kernel=True)
        ((out * weight.to(out)).double().sum() + states.double().square().sum()).backward()
        return [x.detach().double().cpu() for x in (out, states, *(each.grad for each in row))]

    truth = results(replace(here, rule=by_token), torch.device("cpu"), double=True)
    for found, expected in zip(results(here, device, double=False), truth, strict=True):
        atol = rtol * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_the_rule_of_transformers_follows_the_tree() -> None:
    check_rule(torch.device("cpu"), torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu_follow_the_tree() -> None:
    """Those of flash-linear-attention, with the states of parents and their gradients."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    check_rule(torch.device("cuda"), torch.bfloat16, 2e-2)
