"""A row that is walked piece by piece has the gradient of its samples one by one."""

from __future__ import annotations

from typing import Any

import family_cases
import pytest
import torch
from family_cases import (
    CASES,
    check_equal,
    families,
    fp64_rule,
    model_of,
    on_rows,
    on_walk,
    prepare,
    sample_trees,
)
from flowkernels import LossSpec, by_autograd
from gradients import FULL_LOSS, distance, gradient_of, reference_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from flowtrain.config import Lora
from flowtrain.records import Sample
from flowtrain.trainer import sharding
from flowtrain.trainer.cost import path_bytes
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import read_row
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.packing import pack_row
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.trainer.walk import Kind, OpenPath, Pass, _common, passes
from tests.trainer.test_tree_gradient import GROUPS, make_samples

SMOKE = ("qwen2", "qwen3_next")
"""Attention alone, and recurrent layers beside it among experts."""
FAMILIES = [
    *(pytest.param(name, marks=pytest.mark.smoke) for name in SMOKE),
    *families(name for name in CASES if name not in SMOKE),
]


@settings(derandomize=True, deadline=None, max_examples=80)
@given(sample_trees(), st.integers(1, 60))
def test_a_walk_computes_each_token_once_below_what_it_follows(
    samples: list[Sample], budget: int
) -> None:
    row = pack_row(samples)
    path: list[tuple[int, ...]] = []
    tokens, targets = list[tuple[int, ...]](), list[int]()
    for step in passes(row, budget):
        ids = tuple(step.row.input_ids_N.tolist())
        assert len(ids) <= budget
        trunk = () if step.trunk_P is None else tuple(step.row.input_ids_N[step.trunk_P].tolist())
        if step.kind is Kind.LEAVE:
            assert path.pop() == trunk
        before = tuple(token for piece in path for token in piece)
        # Every token follows the path and its ancestors within the piece, as it does in the row.
        for place, (position, end) in enumerate(
            zip(step.row.position_ids_N.tolist(), step.row.subtree_end_N.tolist(), strict=True)
        ):
            above = step.row.subtree_end_N[:place] > place
            own = tuple(step.row.input_ids_N[:place][above].tolist())
            assert place < end and position == len(before) + len(own)
            if step.learns:
                tokens.append((*before, *own, ids[place]))
        if step.kind is Kind.ENTER:
            path.append(trunk)
            assert tuple(step.trunk().row.input_ids_N.tolist()) == trunk
        else:
            target_M = (
                torch.arange(len(row.target_ids_T)) if step.target_M is None else step.target_M
            )
            targets += target_M.tolist()
            taken, whole = (r.input_ids_N[r.target_row_T] for r in (step.row, row))
            assert torch.equal(taken, whole[target_M])
    assert not path and len(tokens) == len(row.input_ids_N)
    prefixes = {
        (*s.prompt_ids, *s.response_ids)[: n + 1]
        for s in samples
        for n in range(len(s.prompt_ids) + len(s.response_ids) - 1)
    }
    assert set(tokens) == prefixes
    assert sorted(targets) == list(range(len(row.target_ids_T)))


@pytest.mark.parametrize("family", FAMILIES)
@settings(derandomize=True, deadline=None, max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(samples=sample_trees(), budget=st.integers(1, 40))
def test_any_tree(family: str, samples: list[Sample], budget: int) -> None:
    with fp64_rule():
        model = model_of(family).double()
        truth = family_cases.alone(model, samples)
        prepare(model)
        row = pack_row(samples)
        check_equal(on_walk(model, [row], budget), truth, rtol=1e-4)
        check_equal(on_walk(model, [row], budget), on_rows(model, [row]), rtol=5e-6)


LOSSES: dict[str, Any] = {
    "ratio, KL and entropy": FULL_LOSS,
    "ratios of whole sequences": LossSpec("gspo", clip_low=0.01, clip_high=0.02),
    "of users": by_autograd(lambda tokens: -(tokens.advantage_T * tokens.logprob_T.exp())),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rescore", [False, True])
def test_any_loss(tiny_path: str, make_trainer: Any, name: str, rescore: bool) -> None:
    samples, loss = make_samples(GROUPS["branches within a response"]), LOSSES[name]
    spec, own = (loss, {}) if isinstance(loss, LossSpec) else (LossSpec(), {"token_loss": loss})
    has_kl = spec.kl_coef > 0
    results = []
    for budget in (None, 3):
        reference = reference_of(tiny_path) if has_kl else None
        trainer = make_trainer(spec, 0.7, reference, rescore=rescore, token_budget=budget, **own)
        rows = [pack_row(samples), pack_row(samples[:2])]
        results.append((gradient_of(trainer, rows), trainer.step([rows])))
    (whole, metrics), (walked, of_walk) = results
    assert distance(walked, whole) < 1e-6
    counts = {"num_rows", "grad_norm"}
    for key in metrics.keys() - counts:
        assert of_walk[key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-9), key
    assert of_walk["num_rows"] > metrics["num_rows"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_any_way_to_hold_the_model(
    tiny_path: str, alone: World, dtype: torch.dtype, recompute: bool, lora: bool
) -> None:
    samples = make_samples(GROUPS["turns that extend each other"])
    grads = []
    for budget in (None, 4):
        torch.manual_seed(0)
        model = models.load_model(tiny_path, dtype)
        if lora:
            add_adapter(model, Lora(rank=4), tiny_path)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        spec = sharding.ShardSpec(torch.float32, recompute, weight_dtype=torch.float32)
        model = sharding.shard(model, alone, spec)
        trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2), token_budget=budget)
        grads.append(gradient_of(trainer, [pack_row(samples)]))
    assert distance(grads[1], grads[0]) < 1e-5


def test_compiled_layers_walk_in_the_graphs_of_any_length(tiny_path: str, alone: World) -> None:
    """Deeper paths and other lengths compile nothing more."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    samples = make_samples(GROUPS["turns that extend each other"])
    truth = None
    for budget in (None, 4, 7, 3, 2):
        model = models.load_model(tiny_path, torch.float32)
        if budget is not None:
            sharding.compile_layers(model, counter)
        trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2), token_budget=budget)
        found = gradient_of(trainer, [pack_row(samples)])
        truth = truth or found
        assert distance(found, truth) < 1e-5
        if budget == 7:
            num_graphs = counter.frame_count
    assert counter.frame_count == num_graphs > 0


def test_in_bf16_a_walk_errs_no_more_than_the_whole_row(tiny_path: str, alone: World) -> None:
    samples = make_samples(GROUPS["turns that extend each other"])
    errors, truth = [], None
    for dtype, budget in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 4)):
        model = models.load_model(tiny_path, torch.float32).to(dtype)
        trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2), token_budget=budget)
        found = gradient_of(trainer, [pack_row(samples)])
        truth = truth or found
        errors.append(distance({name: g.float() for name, g in found.items()}, truth))
    assert errors[0] == 0 < errors[2] < 1.5 * errors[1] + 1e-3


def test_ranks_meet_in_every_pass() -> None:
    once, walked = [True] * 3, [False, False, True, True, True]
    assert _common([once, walked, once]) == [True] * 3 + [False, False, True, True, True]
    assert _common([walked, walked]) == walked
    assert _common([[], walked]) == walked


@pytest.mark.parametrize("family", ["qwen2", "qwen3_next", "deepseek_v3"])
def test_the_plan_counts_what_a_path_keeps(family: str) -> None:
    """Keys, values and sums of their gradients, in 16-bit passes; not states."""
    model = model_of(family)
    prepare(model)
    row = pack_row(make_samples(GROUPS["branches within a response"]))
    step = Pass(Kind.ENTER, row, None, torch.arange(3)).trunk()
    path = OpenPath()
    path.begin(step)
    read_row(model, step.row, path)
    path.enter()
    kept = path._pieces[0].tensors
    numbers = sum(x.numel() for place in kept if isinstance(place, int) for x in kept[place])
    assert path_bytes(model, 2) == (2 + 4) * numbers / 3
