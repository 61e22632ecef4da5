"""What training made of a turn reaches the turn that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from batches import flow_grpo

from flowtrain.training.token_scores import with_training_stats
from flowtrain.types import (
    Call,
    FinishReason,
    Group,
    PolicyName,
    Sample,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    TurnTraining,
    Verdict,
)

MakeSamples = Callable[..., list[Sample]]


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


def test_every_trained_turn_gets_its_own(random_samples: MakeSamples) -> None:
    samples = random_samples(12)
    groups = [
        make_group(index, samples[4 * index :], rewards)
        for index, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (1.0, 0.0)])
    ]
    batch = flow_grpo(groups, "paper", num_minibatches=2)
    annotated = with_training_stats(groups, batch.samples)
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


def test_the_training_of_the_verifier_stands_in_its_calls() -> None:
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
    (annotated,) = with_training_stats(groups, batch.samples, "verifier")
    for trajectory, sign in zip(annotated.trajectories, (1, -1), strict=True):
        first, second = trajectory.turns
        assert first == turn(0)
        assert second.calls["planner"].training is None, "none of it is the planner's"
        assert second.calls["verifier"].training == TurnTraining(
            pytest.approx(sign * 1.0, rel=1e-4), 0
        )
