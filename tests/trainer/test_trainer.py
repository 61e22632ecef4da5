"""One optimizer step against plain transformers, however the samples are packed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import random_samples
from flowkernels import LossSpec
from gradients import FULL_LOSS, TOLERANCE, Plain, distance, gradient_of, reference_of
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowtrain.records import Sample, UserError
from flowtrain.trainer import sharding
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import forward_rows
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_row, pack_rows
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer

MakeTrainer = Callable[..., Trainer]


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def weighing(sample: Sample, weight: float) -> Sample:
    """The sample with the same weight for each of its tokens."""
    return replace(sample, loss_weights=(weight,) * len(sample.loss_weights))


# --- the gradient


@pytest.mark.parametrize(
    ("spec", "temperature"), [(LossSpec(), 1.0), (FULL_LOSS, 0.7)], ids=["clip", "all terms"]
)
def test_packed_is_padded_is_one_at_a_time(
    tiny_path: str,
    make_trainer: MakeTrainer,
    spec: LossSpec,
    temperature: float,
) -> None:
    samples = random_samples(12)
    reference = reference_of(tiny_path) if spec.kl_coef else None
    loss, padded = Plain(tiny_path, spec, temperature, reference).gradient([samples])
    _, one_by_one = Plain(tiny_path, spec, temperature, reference).gradient([[s] for s in samples])
    assert distance(padded, one_by_one) < TOLERANCE
    trainer = make_trainer(spec, temperature, reference, grad_clip=0.0)
    sizes = []
    for num_rows in (1, 4, 99):
        rows = pack_rows(samples, num_rows)
        sizes.append(len(rows))
        assert distance(gradient_of(trainer, rows), padded) < TOLERANCE
    assert sizes[0] == 1 and sizes[2] == 12 and 1 < sizes[1] < 12
    assert trainer.step([pack_rows(samples, 4)])["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_order_of_samples_and_rows_does_not_matter(make_trainer: MakeTrainer) -> None:
    samples, trainer = random_samples(8), make_trainer(grad_clip=0.0)
    straight = gradient_of(trainer, [pack_row(samples)])
    mixed = gradient_of(trainer, [pack_row(samples[5:]), pack_row(samples[:5][::-1])])
    assert distance(mixed, straight) < TOLERANCE


def test_the_normaliser_is_the_sum_of_all_weights(make_trainer: MakeTrainer) -> None:
    """Neither scaled weights, nor a repeated batch, nor a sample of weight 0 change it."""
    samples, trainer = random_samples(6), make_trainer(grad_clip=0.0)
    truth = gradient_of(trainer, pack_rows(samples, 4))
    scaled = [replace(s, loss_weights=tuple(8 * w for w in s.loss_weights)) for s in samples]
    ignored = weighing(*random_samples(1, seed=9), 0.0)
    for others in (scaled, samples * 2, [*samples, ignored]):
        assert distance(gradient_of(trainer, pack_rows(others, 4)), truth) < TOLERANCE


def test_divisors_of_samples_take_the_place_of_their_weights(make_trainer: MakeTrainer) -> None:
    samples, trainer = random_samples(6), make_trainer(grad_clip=0.0)
    truth = gradient_of(trainer, pack_rows(samples, 4))
    weight = sum(sum(sample.loss_weights) for sample in samples)
    divided = [replace(sample, divisor=0.5) for sample in samples]
    found = gradient_of(trainer, pack_rows(divided, 4))
    assert distance({k: v * 3 / weight for k, v in found.items()}, truth) < TOLERANCE


def test_weights_decide_how_much_a_token_counts(make_trainer: MakeTrainer) -> None:
    """A sample of triple weight is three samples."""
    first, second = (weighing(sample, 1.0) for sample in random_samples(2))
    trainer = make_trainer(grad_clip=0.0)
    heavy, thrice, once = (
        gradient_of(trainer, [pack_row([*firsts, second])])
        for firsts in ([weighing(first, 3.0)], [first] * 3, [first])
    )
    assert distance(heavy, thrice) < TOLERANCE and distance(heavy, once) > 1e-2


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_an_ignored_token_poisons_nothing(
    tiny_path: str, make_trainer: MakeTrainer, broken: float
) -> None:
    samples = [replace(s, loss_weights=(0.0, *s.loss_weights[1:])) for s in random_samples(4)]
    spoiled = [replace(s, logprobs=(broken, *s.logprobs[1:])) for s in samples]
    clean, marred = (pack_rows(each, 4) for each in (samples, spoiled))
    trainer = make_trainer(FULL_LOSS, 1.0, reference_of(tiny_path), grad_clip=0.0)
    assert distance(gradient_of(trainer, marred), gradient_of(trainer, clean)) == 0
    before, after = (
        make_trainer(FULL_LOSS, 1.0, reference_of(tiny_path)).step([rows])
        for rows in (clean, marred)
    )
    assert after == before and all(map(math.isfinite, after.values()))


# --- the optimizer step


def test_learning_rate_0_moves_no_bit(tiny_path: str, alone: World) -> None:
    model = models.load_model(tiny_path, torch.float32)
    reference = models.load_model(tiny_path, torch.float32).requires_grad_(False)
    still = OptimSpec(lr=0.0, weight_decay=0)
    trainer = Trainer(model, alone, FULL_LOSS, still, reference=reference)
    before = weights_of(trainer)
    for step in range(5):
        minibatches = (random_samples(5, seed=step), random_samples(3, seed=step + 50))
        stats = trainer.step([pack_rows(samples, 4) for samples in minibatches])
        assert stats["grad_norm"] > 0 and stats["num_optim_steps"] == 2 and stats["lr"] == 0
    assert same(before, weights_of(trainer))


def test_a_step_is_adamw_on_the_clipped_gradient(tiny_path: str, make_trainer: MakeTrainer) -> None:
    """Two steps against torch's plain AdamW."""
    options = {"lr": 0.03, "betas": (0.8, 0.9), "weight_decay": 0.1}
    trainer = make_trainer(**options, decay_all=True, grad_clip=0.05)
    scout = make_trainer(grad_clip=0.0)
    plain = torch.optim.AdamW(scout.model.parameters(), **options, fused=False, foreach=False)
    for seed in range(2):
        rows = pack_rows(random_samples(5, seed=seed), 4)
        grads = gradient_of(scout, rows)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        assert norm > 0.1, "the case is to be clipped"
        assert trainer.step([rows])["grad_norm"] == pytest.approx(norm, rel=1e-4)
        for name, parameter in scout.model.named_parameters():
            parameter.grad = grads[name] * (0.05 / norm)
        plain.step()
        plain.zero_grad()
        for ours, theirs in zip(trainer.model.parameters(), scout.model.parameters(), strict=True):
            # A step is at most lr = 0.03 per weight; Adam magnifies rounding of tiny gradients.
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=3e-4)


def test_grad_clip_bounds_the_norm_and_0_turns_it_off(make_trainer: MakeTrainer) -> None:
    rows = pack_rows(random_samples(5), 4)
    free = gradient_of(make_trainer(grad_clip=0.0), rows)
    norm = math.sqrt(sum(float(g.square().sum()) for g in free.values()))
    for limit in (norm / 10, norm / 2, norm * 2):
        clipped = gradient_of(make_trainer(grad_clip=limit), rows)
        expected = {name: g * min(limit / norm, 1) for name, g in free.items()}
        assert distance(clipped, expected) < 1e-5


def test_set_lr(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(weight_decay=0.0)
    trainer.set_lr(0.0)
    before = weights_of(trainer)
    assert trainer.step([pack_rows(random_samples(3), 4)])["lr"] == 0
    assert same(before, weights_of(trainer))


def test_minibatches_step_one_after_another(make_trainer: MakeTrainer) -> None:
    """Each with its own normaliser: two in one call are two calls."""
    first, second = (pack_rows(random_samples(num, seed=num), 4) for num in (5, 3))
    together, apart = make_trainer(), make_trainer()
    stats = together.step([first, second])
    one, two = apart.step([first]), apart.step([second])
    assert same(weights_of(together), weights_of(apart))
    assert stats["num_optim_steps"] == 2
    assert stats["grad_norm"] == pytest.approx((one["grad_norm"] + two["grad_norm"]) / 2)
    assert stats["loss"] == pytest.approx((one["loss"] + two["loss"]) / 2)
    assert stats["num_tokens"] == one["num_tokens"] + two["num_tokens"]
    mismatch = one["logprob_mismatch"]
    assert stats["logprob_mismatch"] == mismatch, "the sampler's weights are those of before"


def test_batches_without_samples_move_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    rows = pack_rows(random_samples(3), 4)
    trainer.step([rows])  # there is momentum now
    before = weights_of(trainer)
    ignored = [pack_row([weighing(sample, 0.0) for sample in random_samples(2)])]
    for minibatches in ([], [[]], [[], []], [ignored]):
        stats = trainer.step(minibatches)
        assert same(before, weights_of(trainer))
        none = ("num_optim_steps", "num_tokens", "loss", "grad_norm")
        assert [stats[name] for name in none] == [0] * 4
        assert stats["ratio_mean"] == stats["ratio_max"] == stats["ratio_min"] == 1
        assert all(map(math.isfinite, stats.values()))
    skipping, plain = make_trainer(), make_trainer()
    assert skipping.step([[], rows, []]) == plain.step([rows])
    assert same(weights_of(skipping), weights_of(plain))


# --- what is not finite


def broken(samples: Sequence[Sample]) -> list[Sample]:
    """One advantage among them is not a number."""
    return [*samples[1:], replace(samples[0], advantages=(math.nan,) * len(samples[0].advantages))]


def state_of(trainer: Trainer) -> list[Tensor]:
    """Weights and moments, copied."""
    moments = [x.clone() for state in trainer.optimizer.state.values() for x in state.values()]
    return [*weights_of(trainer), *moments]


def test_a_step_that_is_not_finite_leaves_no_trace(make_trainer: MakeTrainer) -> None:
    """Alone and among mini-batches; what follows goes on as if it had not been."""
    first, second = (pack_rows(random_samples(5, seed=seed), 4) for seed in (1, 2))
    bad = pack_rows(broken(random_samples(5, seed=3)), 4)
    marred, plain = make_trainer(), make_trainer()
    assert marred.step([first]) == plain.step([first])
    before = state_of(marred)
    stats = marred.step([bad])
    assert same(state_of(marred), before)
    assert all(p.grad is None or not p.grad.any() for p in marred.model.parameters())
    told = ("num_steps_skipped", "num_optim_steps", "loss", "grad_norm")
    assert [stats[name] for name in told] == [1, 0, 0, 0]
    among, without = marred.step([first, bad, second]), plain.step([first, second])
    assert (among["num_steps_skipped"], among["num_optim_steps"]) == (1, 2)
    assert all(map(math.isfinite, (*stats.values(), *among.values())))
    assert stats["num_tokens_skipped"] == among["num_tokens_skipped"] > 0
    of_batch = "num_steps_skipped num_tokens_skipped num_rows num_packed_tokens train_tflop "
    of_batch += "shared_token_share repeated_token_share"
    rest = set(among) - set(of_batch.split())
    assert {name: among[name] for name in rest} == {name: without[name] for name in rest}
    assert same(state_of(marred), state_of(plain))


@pytest.mark.parametrize(
    ("factor", "loss"),
    [(math.inf, 0.5), (1.0, math.nan), (1.0, math.inf)],
    ids=["gradient", "loss nan", "loss inf"],
)
def test_gradient_and_loss_are_both_looked_at(
    make_trainer: MakeTrainer,
    factor: float,
    loss: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer()
    rows = pack_rows(random_samples(4), 4)
    trainer.step([rows])
    before = state_of(trainer)
    trainer.forward_backward(rows, 1.0, StepMetrics())
    parameter = next(trainer.model.parameters())
    parameter.grad *= factor
    assert trainer.optim_step(torch.tensor(loss), 7) is None
    assert same(state_of(trainer), before)
    assert "step 7" in caplog.text and str(loss) in caplog.text
    trainer.forward_backward(rows, 1.0, StepMetrics())
    norm = trainer.optim_step(torch.tensor(0.5))
    assert norm is not None and norm > 0


def test_a_few_in_a_row_end_the_run(make_trainer: MakeTrainer) -> None:
    good, bad = pack_rows(random_samples(4), 4), pack_rows(broken(random_samples(4)), 4)
    trainer = make_trainer()
    for _ in range(2):
        trainer.step([bad, good, bad], 40)
        trainer.step([good], 41)
    trainer.step([bad, bad], 42)
    told = "^step 43: 3 optimizer steps in a row were skipped.* norm of nan and a loss of nan"
    with pytest.raises(UserError, match=told):
        trainer.step([bad], 43)


# --- other policies: the sampler, the one before the batch, the reference


def scored(trainer: Trainer, samples: Sequence[Sample]) -> list[Sample]:
    """The samples as if this very policy had sampled them."""
    scores = trainer.score(trainer.model, [pack_row([s]) for s in samples])
    return [
        replace(s, logprobs=tuple(each.logprob_T.tolist()))
        for s, each in zip(samples, scores, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_transformers(
    tiny_path: str, make_trainer: MakeTrainer, temperature: float
) -> None:
    samples, plain = random_samples(7), Plain(tiny_path, LossSpec(), temperature)
    truth = [
        logits.log_softmax(-1).gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
        for s, logits in zip(samples, plain.logits(plain.model, samples), strict=True)
    ]
    trainer = make_trainer(temperature=temperature)
    for ours, theirs in zip(scored(trainer, samples), truth, strict=True):
        assert ours.logprobs == pytest.approx(theirs.tolist(), abs=2e-6)
    packed = trainer.score(trainer.model, [pack_row(samples[:3]), pack_row(samples[3:])])
    torch.testing.assert_close(
        torch.cat([each.logprob_T for each in packed]).double(),
        torch.cat(truth).detach(),
        rtol=0,
        atol=2e-6,
    )


def test_only_target_rows_reach_the_head(make_trainer: MakeTrainer) -> None:
    trainer, row = make_trainer(), pack_row(random_samples(4))
    sizes = []
    trainer.model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, _output: sizes.append(inputs[0].shape[-2])
    )
    assert forward_rows(trainer.model, row).shape == (len(row.target_ids_T), 280)
    assert sizes == [len(row.target_ids_T)]


def test_rescoring_an_on_policy_batch_changes_nothing(make_trainer: MakeTrainer) -> None:
    rows = pack_rows(scored(make_trainer(), random_samples(6)), 4)
    sampler, rescored = make_trainer(grad_clip=0.0), make_trainer(grad_clip=0.0, rescore=True)
    assert distance(gradient_of(rescored, rows), gradient_of(sampler, rows)) < 1e-5
    stats = rescored.step([rows])
    for name in ("ratio_mean", "ratio_max", "ratio_min"):  # with and without autograd
        assert stats[name] == pytest.approx(1, abs=1e-6), name
    assert stats["logprob_mismatch"] < 1e-5
    stats = sampler.step([rows])
    assert stats["ratio_min"] == pytest.approx(1, abs=1e-5)
    assert stats["ratio_max"] == pytest.approx(1, abs=1e-5)


def test_rescoring_takes_ratios_against_the_policy_before_the_batch(
    make_trainer: MakeTrainer,
) -> None:
    """For the second mini-batch too."""
    samples = [random_samples(5, seed=1), random_samples(5, seed=2)]
    wrong = [pack_rows(each, 4) for each in samples]
    right = [pack_rows(scored(make_trainer(), each), 4) for each in samples]
    options = {"lr": 0.1, "rescore": True}
    stats, truth = make_trainer(**options).step(wrong), make_trainer(lr=0.1).step(right)
    for name in ("loss", "ratio_mean", "ratio_max", "ratio_min", "clip_fraction", "kl_old"):
        assert stats[name] == pytest.approx(truth[name], rel=1e-3), name
    assert stats["ratio_max"] > 1.1, "the first step has moved the policy away"
    assert truth["logprob_mismatch"] < 1e-5 < 0.5 < stats["logprob_mismatch"], (
        "the mismatch is still that to the sampler"
    )


def test_the_kl_is_zero_until_the_policy_moves(tiny_path: str, make_trainer: MakeTrainer) -> None:
    reference = models.load_model(tiny_path, torch.float64).requires_grad_(False)
    before = [p.clone() for p in reference.parameters()]
    trainer = make_trainer(LossSpec(kl_coef=0.5), reference=reference)
    plain = make_trainer(LossSpec())
    rows = pack_rows(random_samples(6), 4)
    assert distance(gradient_of(trainer, rows), gradient_of(plain, rows)) < TOLERANCE
    first, second = trainer.step([rows])["kl_ref"], trainer.step([rows])["kl_ref"]
    assert first == pytest.approx(0, abs=1e-10) and second > 1e-4
    assert same(before, reference.parameters())


def test_a_kl_term_without_a_reference_is_our_mistake(make_trainer: MakeTrainer) -> None:
    with pytest.raises(AssertionError, match="reference"):
        make_trainer(LossSpec(kl_coef=0.1))


# --- statistics


def flops(sample: Sample) -> float:
    """Count the FLOPs of the tiny model's forward pass, product by product."""
    num_targets = len(sample.response_ids)
    num_tokens = len(sample.prompt_ids) + num_targets - 1
    norms = 2 * 32 + 2 * 8  # of a layer; their parameters count as if they were of a product
    products = num_tokens * 2 * (4 * 32 * 32 + 3 * 32 * 85 + norms)
    layer = products + 2 * 2 * 32 * num_tokens * (num_tokens + 1) / 2
    return 2 * layer + 2 * 32 * 280 * num_targets


def test_statistics_are_means_over_the_trained_tokens(
    tiny_path: str, make_trainer: MakeTrainer
) -> None:
    """Whatever the packing; each is computed here from the log-probs of plain transformers."""
    samples = random_samples(10)
    samples[3] = replace(samples[3], loss_weights=(0.0,) * len(samples[3].loss_weights))
    reference = reference_of(tiny_path)
    spec = replace(FULL_LOSS, entropy_coef=0.0)
    plain = Plain(tiny_path, spec, 1.0, reference)
    ratios, entropies, kls, clipped, clipped_low = [], [], [], [], []
    with torch.no_grad():
        for sample, logits, ref in zip(
            samples,
            plain.logits(plain.model, samples),
            plain.logits(plain.reference, samples),
            strict=True,
        ):
            if sample.loss_weights[0] == 0:
                continue
            targets = torch.tensor(sample.response_ids)[:, None]
            logp = logits.log_softmax(-1).gather(1, targets)[:, 0]
            u = ref.log_softmax(-1).gather(1, targets)[:, 0] - logp
            ratio = torch.exp(logp - torch.tensor(sample.logprobs).double())
            is_clipped = ratio > 1.3 if sample.advantages[0] > 0 else (ratio < 0.8) | (ratio > 3)
            clipped_low += (is_clipped & (ratio < 1)).tolist()
            ratios += ratio.tolist()
            entropies += torch.distributions.Categorical(logits=logits).entropy().tolist()
            kls += (u.exp() - 1 - u).tolist()
            clipped += is_clipped.tolist()
    num_tokens = len(ratios)
    loss, _ = plain.gradient([samples])
    for num_rows in (1, 4, 99):
        rows = pack_rows(samples, num_rows)
        stats = make_trainer(spec, 1.0, reference).step([rows])
        expected = {
            "num_tokens": num_tokens,
            "num_packed_tokens": sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples),
            "shared_token_share": 0.0,
            "repeated_token_share": 0.0,
            "num_rows": len(rows),
            # Forward, twice as much backward, and the reference.
            "train_tflop": 4 * sum(map(flops, samples)) / 1e12,
            "num_optim_steps": 1,
            "num_steps_skipped": 0,
            "loss": loss,
            "grad_norm": stats["grad_norm"],
            "lr": 1e-2,
            "kl_ref": sum(kls) / num_tokens,
            "entropy": sum(entropies) / num_tokens,
            "clip_fraction": sum(clipped) / num_tokens,
            "clip_fraction_low": sum(clipped_low) / num_tokens,
            "clip_fraction_high": (sum(clipped) - sum(clipped_low)) / num_tokens,
            "ratio_mean": sum(ratios) / num_tokens,
            "ratio_max": max(ratios),
            "ratio_min": min(ratios),
            "logprob_mismatch": sum(abs(math.log(r)) for r in ratios) / num_tokens,
        }
        assert stats == pytest.approx(expected, rel=1e-4)
        assert 0.1 < stats["clip_fraction"] < 0.9 and stats["ratio_max"] > 1.3


def test_an_optimizer_step_asks_nothing_of_each_parameter_in_turn(tiny_path: str) -> None:
    """Hundreds of small questions to the host take longer than a GPU steps."""
    alone = World.join("cpu")
    try:
        spec = sharding.ShardSpec(torch.bfloat16)
        model = sharding.shard(models.load_model(tiny_path, torch.float32), alone, spec)
        trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizer.step()  # which makes the moments
        with Dispatched() as asked:
            trainer.optimizer.step()
        assert 0 < asked.num < 2 * len(trainer.optimizer.state)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with Dispatched() as asked:
            norm = trainer.optim_step(torch.zeros(()))  # whose gradients are clipped
        assert norm == pytest.approx(math.sqrt(model.num_parameters()))
        assert 0 < asked.num < 2 * len(trainer.optimizer.state) and not asked.num_of_dtensors
    finally:
        alone.leave()


class Dispatched(TorchDispatchMode):
    """Counts the operators that are called meanwhile."""

    num = num_of_dtensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        self.num_of_dtensors += DTensor in types
        return func(*args, **kwargs or {})


def test_layers_are_gathered_together_as_far_as_they_are_small(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = models.load_model(tiny_path, torch.float32).get_decoder().layers[0]
    size = sum(parameter.numel() for parameter in layer.parameters())
    model = models.load_model(tiny_path, torch.float32)
    layers = model.get_decoder().layers
    layers.extend(copy.deepcopy(layers[0]) for _ in range(7 - len(layers)))
    for most, sizes in ((0, [1] * 7), (3.5 * size, [3, 3, 1]), (99 * size, [7])):
        monkeypatch.setattr(sharding, "_SMALL", most)
        units = sharding.units_of(model, num_ranks=2)
        assert [len(unit) for unit in units] == sizes
        assert [each for unit in units for each in unit] == list(layers)
    monkeypatch.setattr(sharding, "_SMALL", 0.9 * size)
    assert [len(unit) for unit in sharding.units_of(model, num_ranks=1)] == [3, 3, 1]
