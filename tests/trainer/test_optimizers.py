"""The optimizers, their checkpoints and moments on the CPU. As a script, this is the ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import save as save_checkpoint
from checkpoints import saved_state
from flowkernels import LossSpec
from ranks import fork, launch
from safetensors.torch import load as unpack_tensors
from safetensors.torch import load_file, save_file
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn

from flowtrain.config import Config
from flowtrain.records import Sample, UserError
from flowtrain.trainer import checkpoint, sharding, toy
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.optimizers import KINDS, Part, ShardOptimizer
from flowtrain.trainer.packing import pack_rows
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.utils.commands import end_process

NUM_STEPS = 4


@pytest.fixture(autouse=True)
def _torchao() -> None:
    pytest.importorskip("torchao")


# ---- one rank


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter(torch.randn(64, 128).to(dtype))
        self.small = nn.Parameter(torch.randn(10).to(dtype))


def optimizer_of(kind: str, model: nn.Module, decay_all: bool = True) -> ShardOptimizer:
    world = World(0, 1, torch.device("cpu"))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "decay_all": decay_all}
    return ShardOptimizer(model, world, kind=kind, **options)


def step(optimizer: ShardOptimizer, model: nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def trained(kind: str, num_steps: int = 5) -> Weights:
    model = Weights(KINDS[kind].weight_dtype)
    optimizer = optimizer_of(kind, model)
    for seed in range(num_steps):
        step(optimizer, model, seed)
    return model


@pytest.mark.parametrize(("kind", "tolerance"), [("adamw", 0), ("adamw_8bit", 0.01)])
def test_steps_are_those_of_torchs_adamw(kind: str, tolerance: float) -> None:
    ours, theirs = trained(kind), Weights(torch.float32)
    optimizer = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        for parameter in theirs.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        optimizer.step()
    moved = (theirs.large - Weights(torch.float32).large).abs().mean()
    assert (ours.large - theirs.large).abs().mean() <= tolerance * moved
    torch.testing.assert_close(ours.small, theirs.small, rtol=1e-6, atol=1e-7)
    assert kind == "adamw" or not torch.equal(ours.large, theirs.large), "8 bits round"


def test_stochastic_rounding_keeps_on_average_what_nearest_rounding_loses() -> None:
    """100 steps of 2^-12 from 1, where the next number of bf16 is 2^-7 above."""
    model = nn.Linear(4096, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = ShardOptimizer(
        model,
        World(0, 1, torch.device("cpu")),
        kind="adamw_bf16_sr",
        lr=2**-12,
        betas=(0.0, 0.0),
        weight_decay=0.0,
    )
    for _ in range(100):
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
    expected = 100 * 2**-12
    assert float(model.weight.detach().float().mean()) - 1 == pytest.approx(expected, rel=0.1)
    assert len(model.weight.unique()) > 3, "each weight has random bits of its own"
    nearest = torch.ones(1).bfloat16()
    for _ in range(100):
        nearest += 2**-12
    assert float(nearest) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_does_not_touch_the_random_state_of_the_process(kind: str) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    model = Weights(KINDS[kind].weight_dtype)
    torch.random.set_rng_state(before)
    step(optimizer_of(kind, model), model, 0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_takes_the_bytes_that_the_plan_counts(kind: str) -> None:
    model = nn.Linear(256, 256, bias=False).to(KINDS[kind].weight_dtype)
    optimizer = optimizer_of(kind, model)
    step(optimizer, model, 0)
    sizes = [x.numel() * x.element_size() for x, _ in optimizer.tensors().values() if x.dim()]
    assert sum(sizes) == KINDS[kind].moment_bytes * 256 * 256


@pytest.mark.parametrize("kind", KINDS)
def test_a_learning_rate_that_falls_is_followed(kind: str) -> None:
    model = Weights(KINDS[kind].weight_dtype)
    optimizer = optimizer_of(kind, model)
    step(optimizer, model, 0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.set_lr(0.0)
    step(optimizer, model, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.set_lr(1e-2)
    step(optimizer, model, 2)
    assert not torch.equal(before[0], model.large)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay_all", [False, True])
def test_of_a_layer_only_matrices_decay_unless_all_are_to(kind: str, decay_all: bool) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.ones(2, 4, 8))
            self.up_proj_bias = nn.Parameter(torch.ones(2, 8))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.experts = nn.RMSNorm(8), nn.Linear(8, 4), Experts()

    layer = Layer().to(KINDS[kind].weight_dtype)
    before = {name: x.detach().clone() for name, x in layer.named_parameters()}
    optimizer = optimizer_of(kind, layer, decay_all)
    optimizer.set_lr(0.9)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    fallen = {name for name, x in layer.named_parameters() if not torch.equal(x, before[name])}
    assert fallen == (set(before) if decay_all else {"linear.weight", "experts.up_proj"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_has_gradients_of_one_parameter_at_a_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Weights(KINDS[kind].weight_dtype)
    saved, resumed = optimizer_of(kind, model), optimizer_of(kind, model)
    step(saved, model, 0)
    inner, seen = resumed._inner, []

    def watched(*_: object) -> None:
        shards = [x for group in inner.param_groups for x in group["params"]]
        seen.append(sum(x.grad is not None for x in shards))

    inner.register_step_pre_hook(watched)
    before = [x.detach().clone() for x in model.parameters()]
    hand_over(saved, resumed)
    assert seen == [1, 1]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def hand_over(saved: ShardOptimizer, loaded: ShardOptimizer) -> None:
    """Load the state of an optimizer into another, as from a checkpoint."""
    tensors = {name: part.clone() for name, (part, _) in saved.tensors().items()}

    def read(parts: Mapping[str, Part]) -> None:
        for name, (part, _) in parts.items():
            part.copy_(tensors[name])

    loaded.load({name: tensor.shape for name, tensor in tensors.items()}, read)


def test_weights_in_bf16_go_on_from_the_same_moments_in_fp32() -> None:
    model = Weights(torch.bfloat16)
    optimizer = optimizer_of("adamw_bf16_sr", model)
    for seed in range(3):
        step(optimizer, model, seed)
    resumed = optimizer_of("adamw", Weights(torch.float32))
    hand_over(optimizer, resumed)
    truth = optimizer.state["large"]["exp_avg"].float()
    assert torch.equal(resumed.state["large"]["exp_avg"], truth)
    assert int(resumed.state["small"]["step"]) == 3


@pytest.mark.parametrize(("saved", "loaded"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_moments_of_another_layout_are_refused(saved: str, loaded: str) -> None:
    model = Weights(torch.float32)
    optimizers = [optimizer_of(saved, model), optimizer_of(loaded, Weights(torch.float32))]
    step(optimizers[0], model, 0)
    with pytest.raises(UserError, match=r"the checkpoint has no 'large\.exp_avg.* wrote it"):
        hand_over(*optimizers)


def test_a_bf16_optimizer_needs_bf16_passes() -> None:
    with pytest.raises(ValueError, match=r"train.optimizer='adamw_bf16_sr' needs model.dtype"):
        Config.model_validate({"train": {"optimizer": "adamw_bf16_sr"}})


def test_a_machine_without_torchao_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"adamw_8bit' needs torchao: pip install -e '\.\["):
        optimizer_of("adamw_8bit", Weights(torch.float32))


# ---- checkpoints of one rank and of two


def rows_of(seed: int) -> list:
    rng = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(4):
        prompt, response = (
            tuple(torch.randint(280, (6,), generator=rng).tolist()) for _ in range(2)
        )
        samples.append(Sample(prompt, response, (-5.6,) * 6, (1.0 - seed % 2,) * 6, (1.0,) * 6))
    return [pack_rows(samples, 1)]


def new_trainer(path: str, world: World, kind: str) -> Trainer:
    spec = sharding.ShardSpec(torch.bfloat16, weight_dtype=KINDS[kind].weight_dtype)
    model = sharding.shard(models.load_model(path, torch.float32), world, spec)
    return Trainer(model, world, LossSpec(), OptimSpec(lr=1e-2, kind=kind))


REFERENCES = {
    "fp32": {},
    "bf16": {"weight_dtype": torch.bfloat16},
    "on the cpu": {"weight_dtype": torch.bfloat16, "offload": True},
}
"""Ways to hold a reference whose passes are in bf16."""


def with_reference(path: str, world: World, how: dict) -> Trainer:
    spec = sharding.ShardSpec(torch.bfloat16)
    frozen = models.load_model(path, torch.float32).requires_grad_(False).eval()
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.mul_(1.05)
    reference = sharding.shard(frozen, world, replace(spec, **how))
    model = sharding.shard(models.load_model(path, torch.float32), world, spec)
    optim = OptimSpec(lr=1e-2)
    return Trainer(model, world, LossSpec(kl_coef=0.5), optim, reference=reference)


def save(trainer: Trainer, path: str, folder: Path, world: World) -> None:
    tokenizer = models.load_tokenizer(path)
    save_checkpoint(folder, 2, trainer, tokenizer, world)


def run(path: str, out: str) -> None:
    """Train with each optimizer; again from the checkpoint in the middle, and from one rank's."""
    torch.set_num_threads(1)
    world = World.join("cpu", timeout_s=60)
    sharding._SMALL = 0
    for kind in KINDS:
        folder = Path(out) / kind
        trainer = new_trainer(path, world, kind)
        for number in range(NUM_STEPS):
            if number == 2:
                save(trainer, path, folder, world)
            trainer.step(rows_of(number))
        write(folder / "whole.safetensors", trainer, world)
        resumed = new_trainer(path, world, kind)
        resume(resumed, folder, world)
        write(folder / "resumed.safetensors", resumed, world)
    for name, how in REFERENCES.items():
        trainer = with_reference(path, world, how)
        for number in range(NUM_STEPS):
            trainer.step(rows_of(number))
        write(Path(out) / f"reference {name}.safetensors", trainer, world)
    end_process(0)


def resume(trainer: Trainer, folder: Path, world: World) -> None:
    checkpoint.restore(checkpoint.place(folder, 2), trainer.model, trainer.optimizer, world)
    for number in range(2, NUM_STEPS):
        trainer.step(rows_of(number))


def write(path: Path, trainer: Trainer, world: World) -> None:
    tensors: dict[str, Tensor] = models.full_weights(trainer.model)
    moments = {f"moments.{n}": x for n, (x, _) in trainer.optimizer.tensors().items()}
    every = world.gather_bytes(pack_tensors({n: x.clone() for n, x in moments.items()}))
    for rank, data in enumerate(every):
        tensors |= {f"{name}@{rank}": x for name, x in unpack_tensors(data).items()}
    if world.is_main:
        save_file(tensors, path)


@pytest.fixture(scope="module")
def wide_path(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layers are quantised on two ranks too, but not its embedding."""
    tokenizer = models.load_tokenizer(tiny_path)
    torch.manual_seed(0)
    model = toy.new_model(tokenizer, hidden_size=96, num_layers=2, num_heads=4, max_positions=64)
    path = tmp_path_factory.mktemp("wide")
    models.export(model, tokenizer, models.full_weights(model), path)
    return str(path)


@pytest.fixture(scope="module")
def places(wide_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    pytest.importorskip("torchao")
    places = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (1, 2)}
    launch(__file__, [(size, (wide_path, str(place))) for size, place in places.items()])
    return places


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    places: dict[int, Path], size: int, kind: str
) -> None:
    whole, resumed = (
        load_file(places[size] / kind / f"{name}.safetensors") for name in ("whole", "resumed")
    )
    assert set(whole) == set(resumed)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    has_codes = any(".codes@" in name for name in whole)
    assert has_codes == KINDS[kind].is_8bit, "the model has tensors that are quantised"
    assert whole["model.embed_tokens.weight"].dtype == KINDS[kind].weight_dtype


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["bf16", "on the cpu"])
def test_a_reference_in_fewer_bytes_or_elsewhere_changes_nothing(
    places: dict[int, Path], size: int, name: str
) -> None:
    ours, theirs = (
        load_file(places[size] / f"reference {each}.safetensors") for each in (name, "fp32")
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    without = load_file(places[size] / "adamw" / "whole.safetensors")
    assert any(not torch.equal(without[key], theirs[key]) for key in theirs), "the KL term counts"


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_from_a_checkpoint_of_two(
    places: dict[int, Path], wide_path: str, alone: World, kind: str
) -> None:
    """But not from moments of 8 bits, whose blocks are each rank's own."""
    path = checkpoint.place(places[2] / kind, 2)
    spec = sharding.ShardSpec(torch.float32, weight_dtype=KINDS[kind].weight_dtype)
    model = sharding.shard(models.load_model(wide_path, torch.float32), alone, spec)
    trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2, kind=kind))
    if KINDS[kind].is_8bit:
        with pytest.raises(UserError, match="for 8-bit moments, with the same number of ranks"):
            checkpoint.restore(path, trainer.model, trainer.optimizer, alone)
        return
    checkpoint.restore(path, trainer.model, trainer.optimizer, alone)
    saved = saved_state(path)
    for name, state in trainer.optimizer.state.items():
        for key, value in state.items():
            assert torch.equal(value, saved[f"optimizer.{name}.{key}"]), (name, key)
    trainer.step(rows_of(2))


if __name__ == "__main__":
    fork(run)
