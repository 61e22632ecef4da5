"""GRPO's relatives, turns with advantages of their own and what DAPO adds, worked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flowtrain.algorithms import Algorithm, load_algorithm
from flowtrain.algorithms.advantages import reward_of, whitened
from flowtrain.algorithms.dynamic_sampling import joined, mixed_first
from flowtrain.config import Config
from flowtrain.records import FinishReason, Group, Rollouts, TrainBatch, Trajectory, UserError
from flowtrain.trainer.distillation import DistillSpec
from flowtrain.trainer.distributed import World
from tests.algorithms.test_flow_grpo import approx, with_lengths
from tests.trainer.conftest import alone

__all__ = ["alone"]


def made(name: str, **options: Any) -> Algorithm:
    config = {
        "algorithm": {"name": name} | options.pop("algorithm", {}),
        "rollout": {"num_questions": 2, "group_size": 4, "max_new_tokens": 10},
        "agent": {"max_turns": 2},
        "train": {"num_minibatches": 1},
    }
    return load_algorithm(Config.model_validate(config | options))


def batch(name: str, *groups: Sequence[Trajectory], **options: Any) -> TrainBatch:
    numbered = [Group(index, tuple(group)) for index, group in enumerate(groups)]
    return made(name, **options).advantages(numbered)


MIXED = [with_lengths(1, 2, 4), with_lengths(0, 5), with_lengths(0, 1), with_lengths(0.6, 3)]
"""Rewards 1, 0, 0, 0.6: mean 0.4, population variance (0.36 + 0.16 + 0.16 + 0.04) / 4 = 0.18."""
EQUAL = [with_lengths(1, 1), with_lengths(1, 1)]


def test_dr_grpo_has_no_std_and_a_constant_divisor() -> None:
    """C = 2 turns of 10 tokens. Each rollout counts 1 in the divisor, which is 6."""
    out = batch("dr_grpo", MIXED, EQUAL)
    assert [s.advantages[0] for s in out.samples] == approx([0.6, 0.6, -0.4, -0.4, 0.2, 0.0, 0.0])
    assert {w for s in out.samples for w in s.loss_weights} == {1 / 20}
    assert [s.divisor for s in out.samples] == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert out.num_groups_dropped == 0


def test_rloo_takes_the_mean_of_the_others() -> None:
    """1 - 0.6/3, 0 - 1.6/3, the same, 0.6 - 1/3; a mean over tokens."""
    out = batch("rloo", MIXED)
    first = [0.8, 0.8, -1.6 / 3, -1.6 / 3, 0.6 - 1 / 3]
    assert [s.advantages[0] for s in out.samples] == approx(first)
    assert {w for s in out.samples for w in s.loss_weights} == {1.0}
    assert all(s.divisor is None for s in out.samples)


def test_dapo_leaves_out_what_teaches_nothing() -> None:
    out = batch("dapo", MIXED, EQUAL)
    std = math.sqrt(0.18) + 1e-6
    expected = [0.6 / std, 0.6 / std, -0.4 / std, -0.4 / std, 0.2 / std]
    assert [s.advantages[0] for s in out.samples] == approx(expected)
    assert {w for s in out.samples for w in s.loss_weights} == {1.0}
    assert out.num_groups_dropped == 1
    a = made("dapo").config.algorithm
    found = (a.clip_low, a.clip_high, a.dual_clip, a.kl_coef, a.dynamic_sampling)
    assert found == (*(0.2, 0.28, None, 0.0, 9),)
    assert made("dapo", algorithm={"kl_coef": 0.1, "clip_high": 0.4}).loss_spec().kl_coef == 0.1


def test_reinforce_plus_plus_normalises_over_the_batch(alone: World) -> None:
    """Tokens: 6 of A = 0.6, 5 + 1 of -0.4, 3 of 0.2, and 2 of 0 of the group of one reward.

    Mean (3.6 - 2.4 + 0.6) / 17 = 1.8 / 17; mean square (2.16 + 0.96 + 0.12) / 17 = 3.24 / 17.
    """
    algorithm = made("reinforce_plus_plus")
    assert algorithm.whitens and not made("rloo").whitens
    out = whitened(algorithm.advantages([Group(0, tuple(MIXED)), Group(1, tuple(EQUAL))]), alone)
    mean = 1.8 / 17
    std = math.sqrt(3.24 / 17 - mean**2) + 1e-6
    expected = [(a - mean) / std for a in (0.6, 0.6, -0.4, -0.4, 0.2, 0.0, 0.0)]
    assert [s.advantages[0] for s in out.samples] == pytest.approx(expected, rel=1e-9)
    assert made("reinforce_plus_plus").credit([0.7]) == [0.7], "one rollout has no baseline"


def test_one_mode_of_two_and_an_algorithm_that_makes_its_samples_itself() -> None:
    with pytest.raises(UserError, match="mode='released' stands for AgentFlow's averages"):
        made("rloo", algorithm={"mode": "released"})
    for options in ({"overlong": "mask"}, {"overlong_buffer": 2}, {"dynamic_sampling": 1}):
        with pytest.raises(UserError, match=r"cannot be combined with algorithm\.name='infoflow'"):
            made("infoflow", algorithm=options)
    with pytest.raises(UserError, match=r"overlong_buffer=11 must be at most rollout\.max_new"):
        made("flow_grpo", algorithm={"overlong_buffer": 11})
    with pytest.raises(UserError, match=r"dynamic_sampling=1 must be 0 with dataflow\.url"):
        made("rloo", algorithm={"dynamic_sampling": 1}, dataflow={"url": "http://x:1"})
    beside = {
        "roles": {"verifier": "own"},
        "policies": {"verifier": {"path": "v", "trained": True}},
    }
    made("infoflow", **beside)
    with pytest.raises(UserError, match=r"trained=true cannot be combined with algorithm\.name"):
        made("appo", appo={"num_roots": 2}, **beside)
    told = r"dynamic_sampling=1 requires algorithm\.equal_groups = 'drop'"
    with pytest.raises(UserError, match=told):
        made("rloo", algorithm={"dynamic_sampling": 1})
    with pytest.raises(UserError, match=r"does not implement credit\(rewards\)"):
        made("flowtrain.algorithms:Algorithm")
    assert not made("dapo", dataflow={"url": "http://x:1"}).config.algorithm.dynamic_sampling


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "flow_grpo"])
@pytest.mark.parametrize("turn_credit", ["rollout", "to_go"])
def test_a_group_whose_rollouts_all_failed_is_dropped(name: str, turn_credit: str) -> None:
    failed = [replace(each, error="down", reward=None) for each in MIXED]
    out = batch(name, failed, algorithm={"turn_credit": turn_credit})
    assert out.samples == () and out.num_groups_dropped == 1


class PerTurn(Algorithm):
    """The number of the turn, and token by token in the last one."""

    def token_credit(self, group: Group) -> list[list[Any]]:
        return [
            [*range(len(t.turns) - 1), [0.5] * len(t.turns[-1].calls["planner"].response_ids)]
            for t in group.finished
        ]


def test_a_turn_and_a_token_may_have_advantages_of_their_own() -> None:
    config = made("flow_grpo").config
    group = Group(0, (with_lengths(1, 2, 1, 2), with_lengths(0, 3)))
    out = PerTurn(config).advantages([group])
    assert [s.advantages for s in out.samples] == [(0, 0), (1,), (0.5, 0.5), (0.5, 0.5, 0.5)]
    assert [s.loss_weights[0] for s in out.samples] == approx([1 / 12, 1 / 6, 1 / 12, 1 / 6])


def cut(trajectory: Trajectory) -> Trajectory:
    """Let the first response end at its limit."""
    first = trajectory.turns[0]
    call = replace(first.calls["planner"], finish_reason=FinishReason.LENGTH)
    return replace(trajectory, turns=(replace(first, calls={"planner": call}),))


def test_overlong_rollouts_count_in_the_statistics_but_are_not_trained() -> None:
    group = [with_lengths(1, 2), cut(with_lengths(0, 7)), with_lengths(0, 3)]
    group.append(replace(with_lengths(0, 4), truncated="prompt"))
    out = batch("dr_grpo", group, algorithm={"overlong": "mask"})
    assert [(len(s.response_ids), s.advantages[0]) for s in out.samples] == [(2, 0.75), (3, -0.25)]
    assert (out.num_filtered["overlong"], out.num_filtered_tokens["overlong"]) == (2, 11)
    assert len(batch("dr_grpo", group).samples) == 4


def test_soft_punishment_of_long_responses() -> None:
    """Limit 10, buffer 4: R - 0, 1/4, 4/4 for a longest response of 6, 7, 10 tokens."""
    group = [with_lengths(1, 2, 6), with_lengths(1, 7, 1), with_lengths(1, 10)]
    out = batch("dr_grpo", group, algorithm={"overlong_buffer": 4})
    mean = (1 + 0.75 + 0) / 3
    of_turns = [1 - mean, 1 - mean, 0.75 - mean, 0.75 - mean, -mean]
    assert [s.advantages[0] for s in out.samples] == approx(of_turns)


def test_mixed_groups_come_first_and_later_rounds_have_other_numbers(alone: World) -> None:
    first = [Group(0, tuple(EQUAL)), Group(1, tuple(MIXED))]
    failed = Group(1, tuple(replace(t, error="x", reward=None) for t in MIXED))
    more = [Group(0, tuple(MIXED[:2])), failed]
    begun = joined(Rollouts((), {}, {}), Rollouts(first, {}, {}), 0)
    rollouts, num = mixed_first(begun, alone, "planner")
    assert num == 1 and [g.index for g in rollouts.groups] == [1, 0]
    rollouts, num = mixed_first(joined(rollouts, Rollouts(more, {}, {}), 2), alone, "planner")
    assert num == 2 and [g.index for g in rollouts.groups] == [2, 0, 1, 3]
    assert rollouts.metrics == {"num_questions_sampled": 4.0}


def test_groups_are_mixed_by_the_rewards_of_the_policy_that_is_trained(alone: World) -> None:
    def paid(trajectory: Trajectory) -> Trajectory:
        turns = [replace(t, calls={**t.calls, "verifier": t.call}) for t in trajectory.turns]
        own = {"planner": 1.0, "verifier": reward_of(trajectory)}
        return replace(trajectory, turns=tuple(turns), policy_rewards=own)

    groups = Rollouts([Group(0, tuple(map(paid, MIXED)))], {}, {})
    assert mixed_first(groups, alone, "planner")[1] == 0
    assert mixed_first(groups, alone, "verifier")[1] == 1


def earned(trajectory: Trajectory, *of_turns: float) -> Trajectory:
    return replace(trajectory, turn_rewards=of_turns)


def test_a_turn_is_credited_with_what_is_left_to_earn() -> None:
    """Rewards 1, 0.5 and 0; to go after the first turn 0.8 and 0.5, and there are no others."""
    group = [
        earned(with_lengths(1, 2, 4), 0.2, 0.3),
        earned(with_lengths(0.5, 3, 1), 0.0, 0.5),
        with_lengths(0, 5),
    ]
    out = batch("dr_grpo", group, algorithm={"turn_credit": "to_go"})
    assert [s.advantages[0] for s in out.samples] == approx([0.5, 0.15, 0.0, -0.15, -0.5])
    whole = batch("dr_grpo", group)
    assert [s.advantages[0] for s in whole.samples] == approx([0.5, 0.5, 0.0, 0.0, -0.5])
    with pytest.raises(UserError, match=r"to_go' cannot be combined with algorithm\.mode='rel"):
        made("flow_grpo", algorithm={"turn_credit": "to_go", "mode": "released"})


def test_rollouts_of_one_reward_teach_where_their_turns_differ() -> None:
    group = [earned(with_lengths(1, 2, 4), 1.0, 0.0), earned(with_lengths(1, 2, 4), 0.0, 1.0)]
    drops = {"equal_groups": "drop"}
    out = batch("flow_grpo", group, algorithm={"turn_credit": "to_go", **drops})
    a = 0.5 / 0.500001
    assert [s.advantages[0] for s in out.samples] == approx([0, -a, 0, a])
    assert batch("flow_grpo", group, algorithm=drops).num_groups_dropped == 1
    assert batch("flow_grpo", group).num_groups_dropped == 0, "the paper's equation 5"


# ---- one rollout of a question


def asked(*earned: tuple[str, float]) -> list[Group]:
    """A question of this id each, with one rollout that earned so much."""
    return [
        Group(index, (replace(rollout, task=replace(rollout.task, id=name)),))
        for index, (name, reward) in enumerate(earned)
        for rollout in [with_lengths(reward, 2)]
    ]


def advantages(algorithm: Algorithm, groups: list[Group], world: World) -> list[float]:
    found = [s.advantages[0] for s in algorithm.advantages(groups).samples]
    algorithm.observe(groups, world)
    return found


def test_a_question_is_compared_with_what_it_has_earned(alone: World) -> None:
    """Of its own rewards each counts 0.9 of the next, and the mean of all counts as one more."""
    spo = made("spo", rollout={"num_questions": 2, "group_size": 1})
    assert spo.whitens and spo.average == "token" and spo.config.algorithm.kl_coef == 0
    assert advantages(spo, asked(("a", 1.0), ("b", 0.5)), alone) == approx([1.0, 0.5])
    # The mean of all is 0.75.
    own = [(1.0 + 0.75) / 2, (0.5 + 0.75) / 2, 0.75]
    found = advantages(spo, asked(("a", 0.0), ("b", 0.5), ("c", 0.5)), alone)
    assert found == approx([0.0 - own[0], 0.5 - own[1], 0.5 - own[2]])
    mean = (0.9 + 0.95 + 0.5) / (1.9 + 1.9 + 1.0)
    assert advantages(spo, asked(("a", 1.0)), alone) == approx([1.0 - (0.9 + mean) / 2.9])


def test_what_was_observed_goes_on_from_a_checkpoint(alone: World) -> None:
    first, second = made("spo"), made("spo")
    assert made("rloo").state() == ""
    advantages(first, asked(("a", 1.0), ("b", 0.5)), alone)
    second.restore(first.state())
    groups = asked(("a", 0.25), ("c", 1.0))
    assert advantages(second, groups, alone) == advantages(first, groups, alone)
    assert second.state() == first.state()


def test_questions_of_one_rollout_are_not_dropped() -> None:
    with pytest.raises(UserError, match=r"algorithm.equal_groups='drop' .* requires 'keep'"):
        made("spo", algorithm={"equal_groups": "drop"})


# ---- distillation


class Words:
    """A tokenizer of one word each, for a test of what is put where."""

    bos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) + 100 for word in text.split()]


def test_a_teacher_reads_the_hint_of_its_question_after_the_first_token() -> None:
    distill = {"hint": "It is {answer} .", "reward_coef": 0.5}
    algorithm = made("distill", distill=distill)
    groups = [Group(0, tuple(MIXED)), Group(1, tuple(EQUAL))]
    tasks = [replace(t.task, answers=(word,)) for t, word in ((MIXED[0], "abc"), (EQUAL[0], "z"))]
    groups = [
        replace(g, trajectories=tuple(replace(t, task=task) for t in g.trajectories))
        for g, task in zip(groups, tasks, strict=True)
    ]
    plain = algorithm.advantages(groups)
    grpo = made("flow_grpo").advantages(groups)
    halves = [tuple(a / 2 for a in s.advantages) for s in grpo.samples]
    assert [s.advantages for s in plain.samples] == halves
    for first in (1, 7):
        samples = tuple(replace(s, prompt_ids=(first, 9)) for s in plain.samples)
        batch = algorithm.for_teacher(replace(plain, samples=samples), groups, Words())
        for sample in batch.samples:
            assert sample.sample_id is not None and sample.prompt_ids == (first, 9)
            hint = (102, 102, 103 if sample.sample_id.group == 0 else 101, 101)
            wanted = (1, *hint, 9) if first == 1 else (*hint, 7, 9)
            assert sample.teacher_prompt_ids == wanted


def test_a_teacher_without_a_hint_reads_the_prompts() -> None:
    algorithm = made("distill", distill={"teacher": "start"})
    assert algorithm.needs_reference and algorithm.reference_path == ""
    assert made("distill", distill={"teacher": "a/b"}).reference_path == "a/b"
    assert not made("distill", distill={"hint": "x"}).needs_reference
    out = algorithm.advantages([Group(0, tuple(MIXED))])
    assert algorithm.for_teacher(out, [Group(0, tuple(MIXED))], Words()) is out
    assert {a for s in out.samples for a in s.advantages} == {0.0}


def test_a_teacher_behind_an_endpoint_is_no_reference() -> None:
    """What it says of sampled tokens is in the advantages, so that the trainer needs no teacher."""
    big = {"engines": {"big": {"model": "x"}}}
    algorithm = made("distill", distill={"teacher": "big"}, **big)
    assert not algorithm.needs_reference and algorithm.reference_path == ""
    assert algorithm.distill_spec() is None
    with_kl = made("distill", distill={"teacher": "big"}, algorithm={"kl_coef": 0.1}, **big)
    assert with_kl.needs_reference, "a KL term has one of its own"
    told = made("distill", distill={"teacher": "big", "top_k": 5, "divergence": "jsd"}, **big)
    assert told.distill_spec() == DistillSpec("jsd", 0.5, "endpoint") and not told.needs_reference
    assert made("distill", distill={"teacher": "small"}, **big).reference_path == "small"
    assert made("flow_grpo", distill={"teacher": "big"}, **big).config.teacher_engine == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "distill.teacher='policy' .* distill.hint"),
        (
            {"distill": {"hint": "x"}, "algorithm": {"equal_groups": "drop"}},
            "algorithm.equal_groups='drop' .* requires 'keep'",
        ),
        (
            {"distill": {"teacher": "a/b"}, "algorithm": {"kl_coef": 0.1}},
            "algorithm.kl_coef=0.1 must be 0 with distill.teacher='a/b'",
        ),
    ],
)
def test_what_a_teacher_cannot_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        made("distill", **options)
