"""The gradient of a tree is that of its samples one by one, whatever they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flowkernels import LossSpec
from gradients import FULL_LOSS, TOLERANCE, Plain, distance, gradient_of, reference_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowtrain.records import Sample
from flowtrain.trainer import sharding
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_row, pack_rows
from flowtrain.trainer.trainer import OptimSpec, Trainer

MakeTrainer = Callable[..., Trainer]

P, Q, R = (11, 12, 13, 14, 15), (11, 12, 13, 20), (30, 31)
GROUPS: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "one sample": [(P, (5, 6, 7))],
    "one turn of four rollouts": [(P, (5, 6, 7)), (P, (5, 8)), (P, (9, 5, 6)), (P, (6, 6))],
    "identical samples": [(P, (5, 6)), (P, (5, 6)), (P, (5, 6))],
    "identical prompts of one token": [((4,), (5, 6)), ((4,), (7, 8)), ((4,), (5,))],
    "responses of one token": [(P, (5,)), (P, (6,)), (P, (5,))],
    "a response that begins another": [(P, (5, 6)), (P, (5, 6, 7, 8)), (P, (5,))],
    "a response that runs into another's prompt": [
        (P, (5, 6, 7)),
        ((*P, 5, 6), (7, 8)),
        ((*P, 5), (9,)),
    ],
    "branches within a response": [
        (P, (5, 6, 7, 8)),
        (P, (5, 6, 9, 9)),
        (P, (5, 6, 9, 4)),
        (P, (5, 3, 3, 3)),
    ],
    "turns that extend each other": [
        (P, (5, 6)),
        ((*P, 5, 6, 40, 41), (7,)),
        ((*P, 5, 6, 40, 41, 7, 42), (8, 9)),
        ((*P, 5, 6, 50), (8, 9)),
    ],
    "a memory that is empty at first": [
        (P, (5, 6)),
        ((*P, 40, 41), (7,)),
        ((*P, 40, 41, 42), (8, 9)),
        (P, (8,)),
        ((*P, 43), (9,)),
    ],
    "prompts that part in the middle": [
        (P, (5, 6)),
        (Q, (5, 6)),
        (P[:2], (13, 14)),
        (P[:1], (12,)),
    ],
    "several groups": [
        (P, (5, 6)),
        (R, (5, 6)),
        (P, (7,)),
        (R, (8, 9)),
        (Q, (5,)),
        ((60,), (61, 62)),
    ],
}


def make_samples(
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]], seed: int = 0
) -> list[Sample]:
    rng = torch.Generator().manual_seed(seed)
    samples = []
    for prompt, response in shapes:
        logprobs = tuple((-5.6 + 0.2 * torch.randn(len(response), generator=rng)).tolist())
        advantage, weight = torch.rand(2, generator=rng).tolist()
        advantages = tuple(2 * advantage - 1 + i / 8 for i in range(len(response)))
        samples.append(
            Sample(prompt, response, logprobs, advantages, (0.1 + weight,) * len(response))
        )
    return samples


@pytest.mark.parametrize("name", GROUPS)
def test_every_shape_of_group(tiny_path: str, make_trainer: MakeTrainer, name: str) -> None:
    samples, reference = make_samples(GROUPS[name]), reference_of(tiny_path)
    _, truth = Plain(tiny_path, FULL_LOSS, 0.7, reference).gradient([[s] for s in samples])
    trainer = make_trainer(FULL_LOSS, 0.7, reference, grad_clip=0.0)
    assert distance(gradient_of(trainer, [pack_row(samples)]), truth) < TOLERANCE
    found = distance(gradient_of(trainer, pack_rows(samples, 4)), truth)
    assert found < TOLERANCE, "in several rows"
    num_alone = sum(len(p) + len(r) - 1 for p, r in GROUPS[name])
    assert len(pack_row(samples).input_ids_N) < num_alone or name == "one sample"


def test_advantages_of_zero_leave_the_other_terms(
    tiny_path: str, make_trainer: MakeTrainer
) -> None:
    samples = [
        replace(s, advantages=(0.0,) * len(s.advantages))
        for s in make_samples(GROUPS["branches within a response"])
    ]
    reference = reference_of(tiny_path)
    _, truth = Plain(tiny_path, FULL_LOSS, 1.0, reference).gradient([samples])
    found = distance(
        gradient_of(make_trainer(FULL_LOSS, 1.0, reference, grad_clip=0.0), [pack_row(samples)]),
        truth,
    )
    assert found < TOLERANCE
    still = gradient_of(make_trainer(grad_clip=0.0), [pack_row(samples)])
    assert all(not g.any() for g in still.values())


tokens = st.integers(10, 12)
groups = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(groups, st.integers(1, 8))
def test_any_group(
    tiny_path: str,
    make_trainer: MakeTrainer,
    shapes: list[tuple[list[int], list[int]]],
    num_rows: int,
) -> None:
    samples = make_samples([(tuple(p), tuple(r)) for p, r in shapes])
    spec = LossSpec(entropy_coef=0.05)
    _, truth = Plain(tiny_path, spec, 1.0).gradient([samples])
    assert (
        distance(
            gradient_of(make_trainer(spec, grad_clip=0.0), pack_rows(samples, num_rows)), truth
        )
        < 2 * TOLERANCE
    )


@pytest.mark.parametrize(
    "name", ["branches within a response", "turns that extend each other", "several groups"]
)
def test_in_bf16_sharing_is_no_worse_than_not_sharing(
    tiny_path: str, alone: World, make_trainer: MakeTrainer, name: str
) -> None:
    """The error of the tree in bf16 against fp64, beside that of separate samples in bf16."""
    samples = make_samples(GROUPS[name])
    truth = gradient_of(make_trainer(grad_clip=0.0), [pack_row([s]) for s in samples])
    errors = []
    for rows in ([pack_row(samples)], [pack_row([s]) for s in samples]):
        model = models.load_model(tiny_path, torch.bfloat16)
        trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2, grad_clip=0.0))
        errors.append(
            distance({n: g.double() for n, g in gradient_of(trainer, rows).items()}, truth)
        )
    assert errors[0] <= 1.5 * errors[1] + 1e-3, errors


def test_recomputing_the_layers_changes_nothing_but_the_memory(
    tiny_path: str, alone: World
) -> None:
    samples = make_samples(GROUPS["turns that extend each other"])
    grads, calls = [], []
    for recompute in (False, True):
        model = sharding.shard(
            models.load_model(tiny_path, torch.float32),
            alone,
            sharding.ShardSpec(torch.float32, recompute),
        )
        trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2, grad_clip=0.0))
        seen: list[int] = []
        model.get_decoder().layers[0].mlp.register_forward_pre_hook(
            lambda *_, seen=seen: seen.append(0)
        )
        grads.append(gradient_of(trainer, [pack_row(samples)]))
        calls.append(len(seen))
    assert calls == [1, 2], "forward, and once more for the backward pass"
    assert all(torch.equal(grads[0][name], grad) for name, grad in grads[1].items())
