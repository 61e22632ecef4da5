"""The trainer's log-probs reach the turn that they belong to, as the loss took them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from batches import flow_grpo
from transformers import AutoModelForCausalLM

from flowtrain.training.token_scores import TokenScores, with_training_stats
from flowtrain.training.trainer import Trainer
from flowtrain.training.tree import PackedRow, pack, pack_rows
from flowtrain.types import (
    Call,
    FinishReason,
    Group,
    PolicyName,
    Sample,
    SampleId,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    TurnTraining,
    Verdict,
)

MakeTrainer = Callable[..., Trainer]
MakeSamples = Callable[..., list[Sample]]


def plain_logprobs(path: str, sample: Sample) -> list[float]:
    """One sequence at a time, in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    first = len(sample.prompt_ids) - 1
    return [float(logprobs[first + n, token]) for n, token in enumerate(sample.response_ids)]


def with_ids(samples: list[Sample]) -> list[Sample]:
    return [
        replace(sample, sample_id=SampleId(n // 4, n % 4 // 2, n % 2))
        for n, sample in enumerate(samples)
    ]


def step(trainer: Trainer, *minibatches: list[PackedRow]) -> dict[SampleId, tuple[float, ...]]:
    """Train, and return the log-probs of the trained tokens by sample."""
    scores = TokenScores()
    trainer.step(minibatches, scores=scores)
    return scores.by_sample()


@pytest.mark.parametrize("token_budget", [1000, 12])
def test_scores_are_the_models_whatever_the_packing(
    tiny_path: str, make_trainer: MakeTrainer, random_samples: MakeSamples, token_budget: int
) -> None:
    samples, trainer = with_ids(random_samples(9)), make_trainer()
    found = step(trainer, pack_rows(samples[::-1], token_budget))
    ids = [s.sample_id for s in samples]
    assert list(found) != ids and set(found) == set(ids)
    for sample in samples:
        assert found[sample.sample_id] == pytest.approx(plain_logprobs(tiny_path, sample), abs=1e-5)


def test_a_token_that_does_not_count_has_none(
    make_trainer: MakeTrainer, random_samples: MakeSamples
) -> None:
    samples = [
        replace(s, loss_weights=(0.0, *s.loss_weights[1:])) for s in with_ids(random_samples(4))
    ]
    for logprobs in step(make_trainer(), pack_rows(samples, 1000)).values():
        assert math.isnan(logprobs[0]) and all(map(math.isfinite, logprobs[1:]))


def test_samples_without_an_id_have_none(
    make_trainer: MakeTrainer, random_samples: MakeSamples
) -> None:
    assert step(make_trainer(), pack_rows(random_samples(2), 1000)) == {}


def make_group(index: int, samples: list[Sample], rewards: tuple[float, float]) -> Group:
    """Two trajectories, each of a turn without tokens and two with."""

    def turn(sample: Sample) -> Turn:
        call = Call(sample.prompt_ids, sample.response_ids, sample.logprobs, (), FinishReason.STOP)
        return Turn({"planner": call}, None, "", ToolResult(), Verdict.STOP, 0.0)

    empty = Sample((1,), (), (), (), ())
    pairs = zip((samples[:2], samples[2:4]), rewards, strict=True)
    trajectories = (
        Trajectory(Task("t", "", ()), tuple(map(turn, (empty, *mine))), "", 0.0, 0, reward=reward)
        for mine, reward in pairs
    )
    return Group(index, tuple(trajectories))


def test_every_trained_turn_gets_its_own(
    tiny_path: str, make_trainer: MakeTrainer, random_samples: MakeSamples
) -> None:
    """Through advantages, packing and two optimizer steps: the second one's log-probs are those of
    weights that have moved.
    """
    samples = random_samples(12)
    groups = [
        make_group(index, samples[4 * index :], rewards)
        for index, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (1.0, 0.0)])
    ]
    batch = flow_grpo(groups, "paper", num_minibatches=2)
    scores = step(make_trainer(lr=1e-2), *pack(batch.samples, 2, 1000))
    annotated = with_training_stats(groups, batch.samples, scores)
    assert [[len(t.turns) for t in group.trajectories] for group in annotated] == [[3, 3]] * 3
    for group, before in zip(annotated, groups, strict=True):
        for trajectory, old in zip(group.trajectories, before.trajectories, strict=True):
            calls = [turn.calls["planner"] for turn in trajectory.turns]
            assert [replace(call, training=None) for call in calls] == [
                turn.calls["planner"] for turn in old.turns
            ]
            empty, *turns = (call.training for call in calls)
            assert empty is None
            if group.index == 1:
                assert turns == [None, None], "one reward only: nothing was trained"
                continue
            assert [turn.advantage for turn in turns if turn] == pytest.approx(
                [2 * trajectory.reward - 1] * 2, rel=1e-4
            )
            assert [turn.minibatch for turn in turns if turn] == [int(group.index == 2)] * 2
            for call in calls[1:]:
                assert call.training is not None
                truth = plain_logprobs(
                    tiny_path, Sample(call.prompt_ids, call.response_ids, (), (), ())
                )
                distance = max(
                    abs(a - b) for a, b in zip(call.training.logprobs, truth, strict=True)
                )
                assert distance < 1e-5 if group.index == 0 else distance > 1e-3


def test_scores_of_the_verifier_stand_in_its_calls() -> None:
    def turn(number: int) -> Turn:
        call = Call((5,), (6, 7), (-1.0, -1.0), (), FinishReason.STOP)
        calls: dict[PolicyName, Call] = {
            "planner": Call((1,), (2,), (-2.0,), (), FinishReason.STOP)
        }
        if number:
            calls["verifier"] = call
        return Turn(calls, None, "", ToolResult(), Verdict.STOP, 0.0)

    trajectories = tuple(
        Trajectory(Task("t", "", ()), (turn(0), turn(1)), "", 0.0, 0, reward=reward)
        for reward in (1.0, 0.0)
    )
    groups = [Group(4, trajectories)]
    batch = flow_grpo(groups, num_groups=8, policy="verifier")
    scores = {sample.sample_id: (-0.5, -0.25) for sample in batch.samples if sample.sample_id}
    (annotated,) = with_training_stats(groups, batch.samples, scores, "verifier")
    for trajectory, sign in zip(annotated.trajectories, (1, -1), strict=True):
        first, second = trajectory.turns
        assert first == turn(0)
        assert second.calls["planner"].training is None, "none of it is the planner's"
        assert second.calls["verifier"].training == TurnTraining(
            pytest.approx(sign * 1.0, rel=1e-4), 0, (-0.5, -0.25)
        )
