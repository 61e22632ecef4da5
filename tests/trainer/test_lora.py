"""An adapter is trained as peft trains it. Run as a script, this file is two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import random_samples
from checkpoints import save
from flowkernels import LossSpec
from peft import PeftModel
from ranks import fork, launch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from flowtrain.config import Lora
from flowtrain.records import Sample, UserError
from flowtrain.trainer import checkpoint, sharding
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model import lora
from flowtrain.trainer.packing import PackedRow, pack_rows
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.utils.commands import end_process

LORA = Lora(rank=4, alpha=8.0)


def adapted(path: str, options: Lora = LORA, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder with an adapter whose B is not 0, so that it matters."""
    model = models.load_model(path, dtype)
    torch.manual_seed(3)
    lora.add_adapter(model, options, path)
    with torch.no_grad():
        for name, weight in lora.adapter_weights(model).items():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    return model


def trainer_of(model: PreTrainedModel, world: World, **loss: Any) -> Trainer:
    reference = model if loss else None
    optim = OptimSpec(lr=1e-2, weight_decay=0.0)
    return Trainer(model, world, LossSpec(**loss), optim, reference=reference)


def cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture
def rows() -> list[list[PackedRow]]:
    return [pack_rows(random_samples(6), 4)]


def test_at_first_the_model_is_what_it_was(
    tiny_path: str, alone: World, rows: list[list[PackedRow]]
) -> None:
    plain = models.load_model(tiny_path, torch.float32)
    model = models.load_model(tiny_path, torch.float32)
    lora.add_adapter(model, LORA, tiny_path)
    ours, theirs = (Trainer(m, alone, LossSpec(), OptimSpec(lr=1e-2)) for m in (model, plain))
    for found, expected in zip(
        ours.score(model, rows[0]), theirs.score(plain, rows[0]), strict=True
    ):
        assert torch.equal(found.logprob_T, expected.logprob_T)
    weights = models.named_weights(model)
    expected_weights = models.named_weights(plain)
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def test_a_step_moves_the_adapter_alone_along_the_gradient_of_the_merged_weights(
    tiny_path: str, alone: World, rows: list[list[PackedRow]]
) -> None:
    """dB = s dW A^T and dA = s B^T dW, with dW of the model with merged weights."""
    model = adapted(tiny_path)
    trainer = trainer_of(model, alone)
    plain = models.load_model(tiny_path, torch.float32)
    plain.load_state_dict(models.named_weights(model), strict=False)
    whole = Trainer(plain, alone, LossSpec(), OptimSpec(lr=1e-2))
    frozen = cloned(lora.frozen_weights(model))
    for each in (trainer, whole):
        each.forward_backward(rows[0], 1.0, StepMetrics())
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert len(layers) == 14
    for name, layer in layers.items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        dw = gradients[f"{name}.weight"]
        for found, expected in ((b.grad, 2.0 * dw @ a.T), (a.grad, 2.0 * b.T @ dw)):
            atol = 2e-5 * float(expected.abs().max())  # of sums in another order
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)
    before = cloned(lora.adapter_weights(model))
    trainer.optim_step(torch.tensor(0.0))
    after = lora.adapter_weights(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(w, frozen[n]) for n, w in lora.frozen_weights(model).items())


def test_the_reference_is_the_model_without_its_adapter(
    tiny_path: str, alone: World, rows: list[list[PackedRow]]
) -> None:
    """And the next pass has the adapter again."""
    model, plain = adapted(tiny_path), models.load_model(tiny_path, torch.float32)
    trainer = trainer_of(model, alone, kl_coef=0.1)
    with_adapter = trainer.score(model, rows[0])
    with trainer.reference() as reference:
        found = trainer.score(reference, rows[0])
    for ours, theirs in zip(found, trainer.score(plain, rows[0]), strict=True):
        assert torch.equal(ours.logprob_T, theirs.logprob_T)
    again = trainer.score(model, rows[0])
    assert all(
        torch.equal(x.logprob_T, y.logprob_T) for x, y in zip(with_adapter, again, strict=True)
    )
    assert not torch.equal(found[0].logprob_T, again[0].logprob_T)
    assert trainer.step(rows)["kl_ref"] > 1e-3, "the KL term is to the frozen weights"


def test_peft_reads_a_checkpoint_and_merges_it_as_we_do(
    tiny_path: str, alone: World, rows: list[list[PackedRow]], tmp_path: Path
) -> None:
    model = adapted(tiny_path)
    trainer = trainer_of(model, alone)
    trainer.step(rows)
    path = saved(trainer, tiny_path, tmp_path, alone) / "model"
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    theirs = PeftModel.from_pretrained(base, str(path)).merge_and_unload().state_dict()
    ours = models.named_weights(models.load_model(str(path), torch.float32))
    for name, weight in models.named_weights(model).items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-7)
        torch.testing.assert_close(weight, ours[name], rtol=0, atol=1e-7)
    second = adapted(str(path))
    assert lora.base_of(str(path)) == tiny_path
    assert torch.equal(
        lora.frozen_weights(second)["model.layers.0.mlp.up_proj.weight"],
        ours["model.layers.0.mlp.up_proj.weight"],
    ), "an adapter over a merged one"


def saved(trainer: Trainer, model_path: str, root: Path, world: World) -> Path:
    tokenizer = models.load_tokenizer(model_path)
    return save(root, 1, trainer, tokenizer, world, dtype=torch.bfloat16)


def test_restore_is_exact_and_so_are_the_steps_after_it(
    tiny_path: str, alone: World, rows: list[list[PackedRow]], tmp_path: Path
) -> None:
    trainer = trainer_of(adapted(tiny_path), alone, kl_coef=0.1)
    trainer.step(rows)
    path = saved(trainer, tiny_path, tmp_path, alone)
    files = {file.name for file in (path / "model").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    model = models.load_model(tiny_path, torch.float32)
    torch.manual_seed(9)
    lora.add_adapter(model, LORA, tiny_path)
    restored = trainer_of(model, alone, kl_coef=0.1)
    checkpoint.restore(path, model, restored.optimizer, alone)
    for _ in range(2):
        assert restored.step(rows) == trainer.step(rows)
    ours, theirs = lora.adapter_weights(model), lora.adapter_weights(trainer.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_another_kind_is_refused(
    tiny_path: str, alone: World, tmp_path: Path
) -> None:
    trainer = trainer_of(adapted(tiny_path), alone)
    path = saved(trainer, tiny_path, tmp_path, alone)
    other = trainer_of(adapted(tiny_path, Lora(rank=2)), alone)
    with pytest.raises(UserError, match=r"another adapter.*lora\.rank"):
        checkpoint.restore(path, other.model, other.optimizer, alone)
    plain = models.load_model(tiny_path, torch.float32)
    whole = Trainer(plain, alone, LossSpec(), OptimSpec(lr=1e-2))
    with pytest.raises(UserError, match=r"holds an adapter: lora\.rank"):
        checkpoint.restore(path, plain, whole.optimizer, alone)


def test_targets(tiny_path: str) -> None:
    model = adapted(tiny_path, Lora(rank=2, targets=("q_proj", "down_proj")))
    assert {name.split(".")[-3] for name in lora.adapter_weights(model)} == {"q_proj", "down_proj"}
    with pytest.raises(UserError, match=r"'lm_head' is not a linear layer.*down_proj, gate_proj"):
        adapted(tiny_path, Lora(rank=2, targets=("q_proj", "lm_head")))


def test_a_sum_of_bf16_weights_is_rounded_once(tiny_path: str) -> None:
    """What is merged is the nearest bf16 to the sum in fp64, or its neighbour at a tie."""
    model = adapted(tiny_path, dtype=torch.bfloat16)
    frozen, adapter = lora.frozen_weights(model), lora.adapter_weights(model)
    name = "model.layers.1.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    exact = frozen[f"{name}.weight"].double() + 2.0 * b @ a
    merged = models.named_weights(model)[f"{name}.weight"]
    assert merged.dtype == torch.bfloat16
    rounded = exact.to(torch.bfloat16)
    assert (merged != rounded).float().mean() < 0.01
    # A sum of two roundings, as of bf16 tensors, would differ far more often.
    twice = frozen[f"{name}.weight"] + (2.0 * b @ a).to(torch.bfloat16)
    assert (twice != rounded).float().mean() > 0.02


def test_a_backward_pass_spares_the_products_of_frozen_weights(
    tiny_path: str, rows: list[list[PackedRow]]
) -> None:
    (row, *_) = rows[0]
    plain, model = models.load_model(tiny_path, torch.float32), adapted(tiny_path)
    whole, ours = ForwardCost.of(plain), ForwardCost.of(model)
    assert whole.training_flops(row) == 3 * whole.flops(row)
    spared = 3 * ours.flops(row) - ours.training_flops(row)
    frozen = sum(p.numel() for p in plain.get_decoder().layers.parameters())
    head = plain.config.vocab_size * plain.config.hidden_size
    expected = 2 * frozen * len(row.input_ids_N) + 2 * head * len(row.target_ids_T)
    assert spared == pytest.approx(expected)


# ---- two ranks


@pytest.mark.dist
def test_two_ranks_train_save_and_merge_what_one_does(tiny_path: str, tmp_path: Path) -> None:
    """Weights of size 1 after three steps of learning rate 0.01."""
    tolerances = {"float32": 2e-5, "bfloat16": 2e-2}
    places = {
        (size, dtype): tmp_path / f"{size} {dtype}" for size in (1, 2) for dtype in tolerances
    }
    launch(
        __file__,
        [(size, [tiny_path, str(place), dtype]) for (size, dtype), place in places.items()],
    )
    for dtype, tolerance in tolerances.items():
        one, two = (load_file(places[size, dtype] / "result.safetensors") for size in (1, 2))
        assert one.keys() == two.keys() and any("lora_B" in name for name in one)
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=tolerance, atol=tolerance)


def train(path: str, folder: str, dtype: str) -> None:
    """Train, save, restore into a fresh model, train on; write what came out."""
    world = World.join("cpu")
    root = Path(folder)
    spec = sharding.ShardSpec(getattr(torch, dtype))
    options = OptimSpec(lr=1e-2, weight_decay=0.0)

    def fresh() -> Trainer:
        # Layers are sharded one by one, as those of large models are.
        model = sharding.shard(adapted(path, dtype=spec.dtype), world, spec)
        trainer = Trainer(model, world, LossSpec(kl_coef=0.1), options, reference=model)
        for group in trainer.optimizer.param_groups:
            group["eps"] = 1e-3
        return trainer

    sharding._SMALL = 0
    samples = [s for s in every_sample() if (s.minibatch, s.minibatch) == (0, 0)]
    mine = [pack_rows(samples[world.rank :: world.size], 4)]
    first = fresh()
    first.step(mine)
    path_1 = saved(first, path, root, world)
    second = fresh()
    checkpoint.restore(path_1, second.model, second.optimizer, world)
    for _ in range(2):
        assert second.step(mine) == first.step(mine), "a restored trainer goes on exactly"
    assert world.size == 1 or isinstance(
        lora.merged_weights(second.model)["model.layers.0.mlp.up_proj.weight"], DTensor
    )
    merged = models.full_weights(second.model)
    adapter = models.whole(lora.adapter_weights(second.model))
    if world.is_main:
        result = {n: t.float() for n, t in (merged | adapter).items()}
        save_file(result, root / "result.safetensors")
    end_process(0)


def every_sample() -> list[Sample]:
    rng = torch.Generator().manual_seed(0)

    def ids() -> tuple[int, ...]:
        return tuple(torch.randint(280, (6,), generator=rng).tolist())

    made = Sample((), (), (), (), ())
    return [
        replace(
            made,
            prompt_ids=ids(),
            response_ids=ids(),
            logprobs=(-5.6,) * 6,
            advantages=(float(index % 2) - 0.5,) * 6,
            loss_weights=(1.0,) * 6,
        )
        for index in range(6)
    ]


if __name__ == "__main__":
    fork(train)
