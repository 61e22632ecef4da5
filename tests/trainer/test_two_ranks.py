"""Two ranks train what one trains. Run as a script, this file is the training."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save, saved_state
from flowkernels import FutureRatio, LossSpec, future_factor
from ranks import fork, launch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

from bench.families import SHAPE
from flowtrain.records import Sample, SampleId, UserError, VersionSpan
from flowtrain.trainer import checkpoint, sharding
from flowtrain.trainer.balance import balance
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.distillation import DistillSpec
from flowtrain.trainer.distributed import World
from flowtrain.trainer.minibatch_factor import MinibatchFactor
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import PackedRow, pack_row
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.utils.commands import end_process

pytestmark = pytest.mark.dist

TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
"""Tolerance of fp32 weights of size 1 after three steps of learning rate 0.01: sums in another
order."""
CASES = {
    "whole": (LossSpec(kl_coef=0.1, entropy_coef=0.01), {}),
    "by_layer": (LossSpec(), {"rescore": True}),
    "by_layer_kl": (LossSpec(kl_coef=0.1), {"grad_clip": 0.5}),
    "by_layer_m2po": (LossSpec(clip_low=0.95, clip_high=20.0), {"m2po": 0.2}),
    "by_layer_future": (LossSpec(clip_high=0.28, dual_clip=3.0), {"grad_clip": 0.5}),
    "by_layer_windows": (LossSpec(), {}),
    "by_layer_walked": (LossSpec(kl_coef=0.1), {"grad_clip": 0.5}),
    "walked_gspo": (LossSpec("gspo", clip_low=0.01, clip_high=0.02), {"rescore": True}),
    "by_layer_taught": (LossSpec(), {"distill": DistillSpec("jsd", 0.3, "reference")}),
    "taught_by_itself": (LossSpec(), {"distill": DistillSpec("reverse_kl", 0.5, "policy")}),
}
FACTORS = {
    "by_layer_future": MinibatchFactor(
        functools.partial(
            future_factor, future=FutureRatio(low=0.5, high=2.0), dual_clip=3.0, leaves_mean=True
        ),
        joins_turns=True,
    )
}
"""The samples of a group are turns of one rollout, whose rows are balanced over the ranks."""
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
HOW: dict[str, dict[str, Any]] = {
    "by_layer_m2po": {"recompute": True},
    "by_layer_future": {"reshard": False, "offload": True},
    "by_layer_walked": {"token_budget": 5},
    "walked_gspo": {"token_budget": 3},
    "by_layer_taught": {"token_budget": 5},
}
SMALL = dict.fromkeys(("by_layer_m2po", "by_layer_walked"), 25_000)
"""Parameters that are gathered at once: both layers, and not the model."""
LAYOUTS = {
    (1, 0): tuple(CASES),
    (2, 0): tuple(CASES),
    (2, 1): ("by_layer",),
    (3, 1): ("by_layer", "by_layer_kl", "by_layer_taught"),
    (4, 0): ("by_layer_walked", "walked_gspo"),
}
"""The cases of (ranks, those of them that only sample): one, two and four ranks that train,
colocated and split."""
SPLIT = [(layout, name) for layout, names in LAYOUTS.items() if layout[1] for name in names]
GROUPS = [
    [5, 1, 4, 1],  # the second of two ranks has fewer samples, hence fewer rows
    [3, 0, 2, 0],  # and here none at all
    [0, 0, 0, 0],  # nobody has
    [2, 3, 2, 2],
]
"""Samples of each group, step by step; group i falls to sampling rank i mod size."""


def path_of(name: str, path: str) -> str:
    """The folder of a case's model: the tiny one, or a Gemma 3 beside it."""
    return f"{path}-gemma3" if name == "by_layer_windows" else path


def make_gemma3(path: str) -> None:
    tokenizer = models.load_tokenizer(path)
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": len(tokenizer), "head_dim": 8, **WINDOWS}
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**shape, initializer_range=0.2))
    folder = Path(path_of("by_layer_windows", path))
    models.export(model, tokenizer, models.full_weights(model), folder)


def group_samples(step: int, index: int) -> list[Sample]:
    """Two mini-batches: groups 0 and 1, then 2 and 3."""
    rng = torch.Generator().manual_seed(100 * step + index)

    def ids() -> tuple[int, ...]:
        return tuple(
            torch.randint(
                280, (int(torch.randint(1, 9, (1,), generator=rng)),), generator=rng
            ).tolist()
        )

    samples = []
    for _ in range(GROUPS[step][index]):
        prompt, response = ids(), ids()
        logprobs = tuple((-5.6 + torch.randn(len(response), generator=rng)).tolist())
        advantage, weight = torch.rand(2, generator=rng).tolist()
        advantages, weights = (2 * advantage - 1,) * len(response), (weight,) * len(response)
        samples.append(
            Sample(
                prompt,
                response,
                logprobs,
                advantages,
                weights,
                index // 2,
                SampleId(index, 0, len(samples)),
                divisor=0.25 * (index + 1) if step == len(GROUPS) - 1 else None,
                spans=(VersionSpan(0, len(response), step),),
                teacher_prompt_ids=(30, 31, *prompt) if len(samples) % 2 else (),
            )
        )
    return samples


def rows_of(step: int, rank: int, size: int) -> list[list[PackedRow]]:
    """Rows of two samples, so that ranks have different numbers of them."""
    mine = [s for index in range(4) if index % size == rank for s in group_samples(step, index)]
    each = [[s for s in mine if s.minibatch == number] for number in range(2)]
    return [[pack_row(own[n : n + 2]) for n in range(0, len(own), 2)] for own in each]


def load_model(path: str, world: World) -> PreTrainedModel:
    """Load the model where the weights are given out, and its shape alone elsewhere."""
    model = models.load_model(path, torch.float32)
    if not world.is_main:
        sharding.take_weights(model)
    return model


def make_trainer(
    path: str,
    world: World,
    loss: LossSpec,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    factor: MinibatchFactor | None = None,
    token_budget: int | None = None,
    **how: bool,
) -> Trainer:
    reference, distill = None, options.get("distill")
    if loss.kl_coef or (distill is not None and distill.teacher == "reference"):
        frozen = load_model(path, world).requires_grad_(False).eval()
        with torch.no_grad():
            for parameter in frozen.parameters():
                parameter.mul_(1.05)
        reference = sharding.shard(frozen, world, sharding.ShardSpec(dtype))
    model = sharding.shard(load_model(path, world), world, sharding.ShardSpec(dtype, **how))
    trainer = Trainer(
        model,
        world,
        loss,
        OptimSpec(lr=1e-2, **options),
        temperature=0.9,
        reference=reference,
        factor=factor,
        token_budget=token_budget,
    )
    for group in trainer.optimizer.param_groups:
        group["eps"] = (
            # Adam's own 1e-8 would blow the rounding of gradients that are 0 up to whole steps
            1e-3
        )
    return trainer


@dataclass(frozen=True)
class Ranks:
    world: World
    trainers: World
    samplers: World
    cost: Callable[[PackedRow], float]

    @classmethod
    def join(cls, path: str, num_samplers: int) -> Ranks:
        world = World.join("cpu", timeout_s=60)
        cost = ForwardCost.of(models.load_model(path, torch.float32)).flops
        if not num_samplers:
            return cls(world, world, world, cost)
        ranks = range(world.size)
        trainers = world.subworld(ranks[:-num_samplers])
        return cls(world, trainers, world.subworld(ranks[-num_samplers:]), cost)

    def rows_of(self, step: int) -> list[list[PackedRow]]:
        """The rows that this rank sampled."""
        samplers = self.samplers
        return rows_of(step, samplers.rank, samplers.size) if samplers.is_member else [[], []]

    def train(self, trainer: Trainer | None, rows: list[list[PackedRow]]) -> dict[str, float]:
        """A step of all ranks; returns its statistics."""
        balanced = balance(rows, self.cost, self.world, num_takers=self.trainers.size)
        return {} if trainer is None else trainer.step(balanced)


def run(path: str, out: Path, num_samplers: int) -> None:
    """Run the part of every rank."""
    torch.set_num_threads(1)
    ranks = Ranks.join(path, num_samplers)
    for name in LAYOUTS[ranks.world.size, num_samplers]:
        run_case(path, out, name, ranks)
    if not num_samplers:
        world = ranks.world
        sharding._SMALL = 0
        trainer = make_trainer(path, world, LossSpec(), {"grad_clip": 0.0}, torch.bfloat16)
        stats = ranks.train(trainer, ranks.rows_of(0))
        write(out / "bf16.safetensors", trainer, world)
        (out / f"bf16.{world.rank}.json").write_text(json.dumps([stats]))
        skipped = skip(make_trainer(path, world, LossSpec(), {}), ranks)
        (out / f"skipped.{world.rank}.json").write_text(json.dumps(skipped))
    end_process(0)


def run_case(path: str, out: Path, name: str, ranks: Ranks) -> None:
    path, (loss, options) = path_of(name, path), CASES[name]
    sharding._SMALL = SMALL.get(name, 0) if name.startswith("by_layer") else 50_000_000
    trainer, tokenizer = None, models.load_tokenizer(path)
    stats: list[dict[str, float]] = []
    passes = [0] * len(GROUPS)
    if ranks.trainers.is_member:
        how = HOW.get(name, {})
        trainer = make_trainer(path, ranks.trainers, loss, options, factor=FACTORS.get(name), **how)
        trainer.model.register_forward_hook(
            lambda *_: passes.__setitem__(len(stats), passes[len(stats)] + 1)
        )
    for step in range(len(GROUPS)):
        if trainer is not None and step == len(GROUPS) - 1:
            folder, state = out / f"{name}.checkpoints", {"cursor": 7}
            save(folder, step, trainer, tokenizer, ranks.trainers, state=state, keep=1)
        stats.append(ranks.train(trainer, ranks.rows_of(step)))
    if trainer is not None:
        write(out / f"{name}.safetensors", trainer, ranks.trainers)
    rank = ranks.world.rank
    (out / f"{name}.{rank}.json").write_text(json.dumps(stats))
    (out / f"{name}.{rank}.passes").write_text(json.dumps(passes))


def skip(trainer: Trainer, ranks: Ranks) -> list[bool | float]:
    """A step that is not finite on the last rank alone, then three times an infinite loss there."""
    is_last = ranks.world.rank == ranks.world.size - 1
    ranks.train(trainer, ranks.rows_of(1))
    before = state_of(trainer)
    first, _ = ranks.rows_of(0)
    factor = math.nan if is_last else 1.0
    spoiled = [replace(row, advantage_T=row.advantage_T * factor) for row in first]
    stats = ranks.train(trainer, [spoiled])
    told: list[bool | float] = [
        stats["num_steps_skipped"],
        stats["num_optim_steps"],
        same(state_of(trainer), before),
    ]
    ranks.train(trainer, ranks.rows_of(0))
    before = state_of(trainer)
    for _ in range(3):
        try:
            trainer.forward_backward(first, 1.0, StepMetrics())
            told.append(trainer.optim_step(torch.tensor(math.inf if is_last else 0.0), 9) is None)
        except UserError as error:
            told.append(str(error).startswith("step 9: 3 optimizer steps in a row"))
    return [*told, same(state_of(trainer), before)]


def state_of(trainer: Trainer) -> list[Tensor]:
    """This rank's shards of weights and moments, copied."""
    moments = [x for state in trainer.optimizer.state.values() for x in state.values()]
    return [
        (x.to_local() if isinstance(x, DTensor) else x).detach().clone()
        for x in [*trainer.model.parameters(), *moments]
    ]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def write(path: Path, trainer: Trainer, world: World) -> None:
    weights = models.full_weights(trainer.model)
    if world.is_main:
        save_file(weights, path)


@pytest.fixture(scope="module")
def places(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """The folder that the ranks of each layout filled."""
    places = {
        (size, num_samplers): tmp_path_factory.mktemp(f"ranks{size}.{num_samplers}")
        for size, num_samplers in LAYOUTS
    }
    make_gemma3(tiny_path)
    launch(
        __file__,
        [
            (size, (tiny_path, str(place), str(num_samplers)))
            for (size, num_samplers), place in places.items()
        ],
    )
    return places


@pytest.fixture(scope="module")
def results(places: dict[tuple[int, int], Path]) -> dict[int, Path]:
    """The folder that one rank and that two ranks filled, each of which trains what it samples."""
    return {size: places[size, 0] for size in (1, 2)}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def stats_of(
    results: dict[int, Path], size: int, name: str, rank: int = 0
) -> list[dict[str, float]]:
    return json.loads((results[size] / f"{name}.{rank}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_get_the_weights_of_one(
    results: dict[int, Path], tiny_path: str, name: str
) -> None:
    one, two = (load_file(results[size] / f"{name}.safetensors") for size in (1, 2))
    close(two, one)
    start = load_file(Path(path_of(name, tiny_path)) / "model.safetensors")
    assert all((one[key] - start[key]).abs().max() > 1e-4 for key in start), (
        "every weight was trained"
    )


@pytest.mark.parametrize("name", LAYOUTS[4, 0])
def test_four_ranks_walk_to_the_weights_of_one(
    places: dict[tuple[int, int], Path], name: str
) -> None:
    """Most of them have nothing to walk in some steps."""
    ours, truth = (load_file(places[size, 0] / f"{name}.safetensors") for size in (4, 1))
    close(ours, truth)


@pytest.mark.parametrize(("layout", "name"), SPLIT)
def test_ranks_that_only_train_get_the_weights_of_one(
    places: dict[tuple[int, int], Path], name: str, layout: tuple[int, int]
) -> None:
    ours, truth = (load_file(places[each] / f"{name}.safetensors") for each in (layout, (1, 0)))
    close(ours, truth)
    num_ranks = layout[0]
    stats = [
        json.loads((places[layout] / f"{name}.{rank}.json").read_text())
        for rank in range(num_ranks)
    ]
    assert stats[-1] == [{}] * len(GROUPS) and [step["num_optim_steps"] for step in stats[0]] == [
        2,
        2,
        0,
        2,
    ]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_report_the_statistics_of_one(results: dict[int, Path], name: str) -> None:
    one, two = stats_of(results, 1, name), stats_of(results, 2, name)
    assert two == stats_of(results, 2, name, rank=1), "every rank has the numbers of all"
    assert [step["num_optim_steps"] for step in one] == [2, 2, 0, 2]
    for ours, theirs in zip(two, one, strict=True):
        # Filling rows for a rank that has run out count as packed tokens.
        assert ours.pop("num_packed_tokens") >= theirs.pop("num_packed_tokens")
        assert ours.pop("num_rows") >= theirs.pop("num_rows")
        found = ours.pop("train_tflop")
        assert found >= theirs.pop("train_tflop") * 0.999, "what ranks hold apart is computed twice"
        assert 0 <= ours.pop("repeated_token_share") < 1 > theirs.pop("repeated_token_share")
        assert 0 <= ours.pop("shared_token_share") <= theirs.pop("shared_token_share") + 1e-6 < 1, (
            "what ranks hold apart is not shared"
        )
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def test_ranks_take_the_same_number_of_passes_and_no_more_than_it_takes(
    results: dict[int, Path],
) -> None:
    """A rank that runs out of rows would leave the other waiting."""
    taken = [
        json.loads((results[2] / f"by_layer_kl.{rank}.passes").read_text()) for rank in range(2)
    ]
    rows = [
        [[len(minibatch) for minibatch in rows_of(step, rank, 2)] for rank in range(2)]
        for step in range(len(GROUPS))
    ]
    needed = [
        sum((first + second + 1) // 2 for first, second in zip(*step, strict=True)) for step in rows
    ]
    assert taken[0] == taken[1] == needed
    as_they_were = [sum(map(max, *step)) for step in rows]
    assert sum(needed) < sum(as_they_were), "the case is one in which rows move"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_restores_on_another_number_of_ranks(
    results: dict[int, Path], alone: World, tiny_path: str, name: str, size: int
) -> None:
    """One rank resumes the checkpoint of two ranks and ends with their weights."""
    loss, options = CASES[name]
    trainer = make_trainer(path_of(name, tiny_path), alone, loss, options)
    path = checkpoint.latest(results[size] / f"{name}.checkpoints")
    assert path is not None and checkpoint.load_state(path) == {"step": 3, "cursor": 7}
    checkpoint.restore(path, trainer.model, trainer.optimizer, alone)
    for group in trainer.optimizer.param_groups:
        group["eps"] = 1e-3
    trainer.step(rows_of(3, 0, 1))
    close(models.full_weights(trainer.model), load_file(results[size] / f"{name}.safetensors"))


def test_checkpoints_of_one_and_two_ranks_hold_the_same(results: dict[int, Path]) -> None:
    for name in CASES:
        one, two = (checkpoint.latest(results[size] / f"{name}.checkpoints") for size in (1, 2))
        close(saved_state(two), saved_state(one))
        close(*(load_file(each / "model" / "model.safetensors") for each in (two, one)))


def test_bf16_keeps_fp32_master_weights(
    results: dict[int, Path], tiny_path: str, alone: World
) -> None:
    """Forward and backward pass are rounded; the gradient is that of fp32 but for a few percent."""
    exact = make_trainer(tiny_path, alone, LossSpec(), {"grad_clip": 0.0}).step(rows_of(0, 0, 1))
    for size in (1, 2):
        weights = load_file(results[size] / "bf16.safetensors")
        assert {w.dtype for w in weights.values()} == {torch.float32}
        (stats,) = stats_of(results, size, "bf16")
        assert stats["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
        assert stats["loss"] == pytest.approx(exact["loss"], rel=0.05, abs=0.01)
        assert stats["num_tokens"] == exact["num_tokens"]


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_step_that_is_not_finite_for_one_rank_is_skipped_by_all(
    results: dict[int, Path], size: int, rank: int
) -> None:
    found = json.loads((results[size] / f"skipped.{rank}.json").read_text())
    assert found == [1, 0, True, True, True, True, True]


if __name__ == "__main__":
    fork(lambda path, out, num_samplers: run(path, Path(out), int(num_samplers)))
