"""Flow-GRPO by hand, from rewards down to the gradient of a policy of three parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import make
import pytest
import torch
from batches import flow_grpo
from flowkernels import LossSpec, policy_loss
from hypothesis import given
from hypothesis import strategies as st
from make import call
from torch import Tensor

from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.records import Group, Sample, SamplingMask, Trajectory, Turn, UserError

TRAJECTORIES = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0]), st.lists(st.integers(1, 5), min_size=1, max_size=4)
)
"""Reward and number of tokens of each turn."""
MODES: list[Literal["paper", "released"]] = ["paper", "released"]


def turn(ids: Sequence[int], logprobs: Any = -1.0, prompt: Sequence[int] = (7,)) -> Turn:
    return make.turn(call(ids, prompt, logprobs))


def trajectory(reward: float, *turns: Turn) -> Trajectory:
    return make.rollout(*turns, reward=reward)


def with_lengths(reward: float, *lengths: int) -> Trajectory:
    return trajectory(reward, *(turn(range(length)) for length in lengths))


def approx(value: Any) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def test_samples_keep_what_their_tokens_were_sampled_from() -> None:
    masks = [SamplingMask.of([(1, 2), (3,)]), None, SamplingMask.of([(4,), (5, 6)])]
    turns = [make.turn(call((1, 3), sampling_mask=mask)) for mask in masks]
    out = flow_grpo([Group(0, (trajectory(1, *turns[:2]), trajectory(0, turns[2])))])
    assert [sample.sampling_mask for sample in out.samples] == masks


# --- another policy ---


def judged(planner: Sequence[int], verifier: Sequence[int] | None) -> Turn:
    """A turn with tokens of both policies; None: the verifier sampled nothing."""
    one = turn(planner)
    if verifier is None:
        return one
    theirs = call(verifier, (8, 8), -2.0, sampling_mask=MASK)
    return replace(one, calls={**one.calls, "verifier": theirs})


MASK = SamplingMask.of([(5,)])


def test_the_verifiers_calls_are_its_samples() -> None:
    """Rewards 1 and 0: A = +-1. Weight of a token: 1 / (G T_i len), where T_i counts turns in which
    the verifier sampled something.
    """
    group = Group(
        3,
        (
            trajectory(1, judged((1, 2), (5, 6)), judged((3,), (7,))),
            trajectory(0, judged((4,), (9,)), judged((4,), ())),
        ),
    )
    out = flow_grpo([group], num_groups=4, policy="verifier")
    a = 0.5 / 0.500001
    expected = [((8, 8), (5, 6), (-2.0, -2.0)), ((8, 8), (7,), (-2.0,)), ((8, 8), (9,), (-2.0,))]
    assert [(s.prompt_ids, s.response_ids, s.logprobs) for s in out.samples] == expected
    assert [s.advantages[0] for s in out.samples] == approx([a, a, -a])
    assert [s.loss_weights[0] for s in out.samples] == approx([1 / 8, 1 / 4, 1 / 2])
    assert [s.sample_id for s in out.samples] == [(3, 0, 0), (3, 0, 1), (3, 1, 0)]
    assert all(s.sampling_mask is MASK for s in out.samples)
    assert out.num_filtered == {"empty": 1}


@pytest.mark.parametrize("mode", MODES)
def test_one_policy_is_trained_as_if_the_other_had_said_something_else(
    mode: Literal["paper", "released"],
) -> None:
    """So the gradient of the other's tokens is exactly zero."""

    def groups(planner: int, verifier: int) -> list[Group]:
        turns = [judged(range(planner + n), range(verifier + n)) for n in range(3)]
        return [Group(0, (trajectory(1, *turns), trajectory(0, turns[0])))]

    found = flow_grpo(groups(0, 3), mode, policy="verifier")
    assert found == flow_grpo(groups(9, 3), mode, policy="verifier")
    assert flow_grpo(groups(2, 1), mode) == flow_grpo(groups(2, 7), mode)
    found = flow_grpo(groups(1, 3), mode, policy="verifier")
    assert found != flow_grpo(groups(1, 4), mode, policy="verifier")


def test_a_verifier_that_is_no_policy_has_no_samples() -> None:
    out = flow_grpo(
        [Group(0, (trajectory(1, judged((1,), None)), trajectory(0, judged((2,), None))))],
        policy="verifier",
    )
    assert out.samples == () and out.num_filtered == {"empty": 0}, "it was not asked"


# --- advantages and weights


def test_paper_mode_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, population std 1/2, so A = +-0.5 / (0.5 + 1e-6). Weight of a
    token: 1 / (G T_i len).
    """
    group = Group(
        0,
        (with_lengths(1, 2, 4), with_lengths(0, 5), with_lengths(0, 1, 1, 3), with_lengths(1, 10)),
    )
    out = flow_grpo([group])
    a = 0.5 / 0.500001
    assert [s.advantages[0] for s in out.samples] == approx([a, a, -a, -a, -a, -a, a])
    # G = 4. T_1 = 2: 1/(4*2*2), 1/(4*2*4); T_2 = 1: 1/(4*1*5);
    # T_3 = 3: 1/(4*3*1) twice, 1/(4*3*3); T_4 = 1: 1/(4*1*10)
    found = [s.loss_weights[0] for s in out.samples]
    assert found == approx([1 / 16, 1 / 32, 1 / 20, 1 / 12, 1 / 12, 1 / 36, 1 / 40])
    assert all(s.loss_weights == (s.loss_weights[0],) * len(s.response_ids) for s in out.samples)
    assert all(s.advantages == (s.advantages[0],) * len(s.response_ids) for s in out.samples)
    assert [len(s.response_ids) for s in out.samples] == [2, 4, 5, 1, 1, 3, 10]
    assert sum(sum(s.loss_weights) for s in out.samples) == approx(1.0)
    assert out.num_groups_dropped == 0


def test_paper_mode_takes_the_population_std() -> None:
    """Rewards 1, 0, 0: mean 1/3, variance (4/9 + 1/9 + 1/9) / 3 = 2/9. Not (N - 1), which would be
    1/3.
    """
    out = flow_grpo([Group(0, (with_lengths(1, 1, 1, 1), with_lengths(0, 1), with_lengths(0, 1)))])
    std = math.sqrt(2) / 3 + 1e-6
    # The three turns of the first trajectory count once in the statistics.
    found = [s.advantages[0] for s in out.samples]
    assert found == approx([(2 / 3) / std] * 3 + [-(1 / 3) / std] * 2)


def test_released_mode_by_hand() -> None:
    """Rewards per turn sample 1, 1, 1, 0, 0: mean 3/5, variance (3 * 0.16 + 2 * 0.36) / 4 = 0.3."""
    group = Group(0, (with_lengths(1, 2, 4, 1), with_lengths(0, 5), with_lengths(0, 7)))
    out = flow_grpo([group], "released")
    std = math.sqrt(0.3) + 1e-6
    assert [s.advantages[0] for s in out.samples] == approx([0.4 / std] * 3 + [-0.6 / std] * 2)
    assert [s.loss_weights for s in out.samples] == [(1.0,) * n for n in (2, 4, 1, 5, 7)]


def test_rewards_need_not_be_binary() -> None:
    """Rewards 0.2, 0.6: mean 0.4, population std 0.2, std of N - 1 0.2 sqrt(2)."""
    group = Group(0, (with_lengths(0.2, 1), with_lengths(0.6, 1)))
    found = [s.advantages[0] for s in flow_grpo([group]).samples]
    assert found == approx([-0.2 / 0.200001, 0.2 / 0.200001])
    std = 0.2 * math.sqrt(2) + 1e-6
    found = [s.advantages[0] for s in flow_grpo([group], "released").samples]
    assert found == approx([-0.2 / std, 0.2 / std])


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_groups_of_one_reward(reward: float) -> None:
    """The paper mode leaves them out and says how many; the released one keeps them."""
    same = Group(0, (with_lengths(reward, 2), with_lengths(reward, 1, 3)))
    mixed = Group(1, (with_lengths(1, 1), with_lengths(0, 1)))
    paper = flow_grpo([same, mixed, same])
    assert paper.num_groups_dropped == 2 and len(paper.samples) == 2
    released = flow_grpo([same, mixed, same], "released")
    assert released.num_groups_dropped == 0 and len(released.samples) == 8
    assert [s.advantages[0] for s in released.samples[:3]] == [0, 0, 0]
    assert released.samples[1].loss_weights == (1.0,)
    assert flow_grpo([same]).samples == ()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("equals", [(0.1, 0.1, 0.1), (1.0, 1.0, 1.0)])
def test_groups_of_one_reward_are_kept_or_dropped_on_request(
    mode: Any, equals: tuple[float, ...]
) -> None:
    same = Group(0, tuple(with_lengths(reward, 2) for reward in equals))
    mixed = Group(1, (with_lengths(1, 1), with_lengths(0, 1)))
    dropped = flow_grpo([same, mixed], mode, equal_groups="drop")
    assert dropped.num_groups_dropped == 1 and len(dropped.samples) == 2
    kept = flow_grpo([same, mixed], mode, equal_groups="keep")
    assert kept.num_groups_dropped == 0 and len(kept.samples) == 5
    assert kept.samples[3:] == dropped.samples, "of which nothing but the normaliser changes"
    if mode == "paper":
        assert [s.advantages for s in kept.samples[:3]] == [(0.0, 0.0)] * 3
        assert sum(sum(s.loss_weights) for s in kept.samples[:3]) == approx(1), "a whole question"
    failed = Group(0, (replace(with_lengths(0, 2), error="x"),))
    assert flow_grpo([failed], mode, equal_groups="keep").num_groups_dropped == 1


def test_rewards_that_are_not_finite_make_no_equal_group() -> None:
    group = Group(0, (with_lengths(1, 1), with_lengths(math.nan, 1)))
    assert flow_grpo([group]).num_groups_dropped == 0


def test_released_mode_keeps_the_reward_of_a_lone_sample() -> None:
    (sample,) = flow_grpo([Group(0, (with_lengths(1, 3),))], "released").samples
    assert sample.advantages[0] == approx(1 / 1.000001)
    assert flow_grpo([Group(0, (with_lengths(1, 3),))]).num_groups_dropped == 1


def test_turns_without_tokens_are_not_trained() -> None:
    """They count neither as turns (T_i) nor as turn samples; the rewards of all trajectories still
    make the paper's statistics.
    """
    group = Group(0, (with_lengths(1, 2, 0, 4), with_lengths(0, 0), with_lengths(0, 3)))
    paper = flow_grpo([group]).samples
    found = [s.loss_weights[0] for s in paper]
    assert found == approx([1 / (3 * 2 * 2), 1 / (3 * 2 * 4), 1 / (3 * 1 * 3)])
    std = math.sqrt(2) / 3 + 1e-6  # rewards 1, 0, 0
    assert [s.advantages[0] for s in paper] == approx([(2 / 3) / std] * 2 + [-(1 / 3) / std])
    released = flow_grpo([group], "released").samples  # turn samples 1, 1, 0
    std = math.sqrt(1 / 3) + 1e-6
    assert [s.advantages[0] for s in released] == approx([(1 / 3) / std] * 2 + [-(2 / 3) / std])
    nothing = Group(0, (trajectory(1), with_lengths(0, 0, 0)))
    assert flow_grpo([nothing]).samples == () and flow_grpo([nothing], "released").samples == ()
    assert flow_grpo([]).samples == ()


def test_samples_carry_the_very_tokens_of_the_turns() -> None:
    first, second = turn([5, 6, 2], [-0.1, -0.2, -0.3], [1, 2]), turn([9], [-4.0], [1, 2, 5])
    out = flow_grpo([Group(0, (trajectory(1, first, second), trajectory(0, first)))])
    assert [(s.prompt_ids, s.response_ids, s.logprobs) for s in out.samples] == [
        ((1, 2), (5, 6, 2), (-0.1, -0.2, -0.3)),
        ((1, 2, 5), (9,), (-4.0,)),
        ((1, 2), (5, 6, 2), (-0.1, -0.2, -0.3)),
    ]


@given(st.lists(st.lists(TRAJECTORIES, min_size=2, max_size=6), max_size=4))
def test_paper_weights_sum_to_the_kept_groups_and_advantages_cancel(
    batch: list[list[tuple[float, list[int]]]],
) -> None:
    groups = [
        Group(i, tuple(with_lengths(reward, *each) for reward, each in group))
        for i, group in enumerate(batch)
    ]
    out = flow_grpo(groups)
    found = sum(sum(s.loss_weights) for s in out.samples)
    assert found == pytest.approx(len(groups) - out.num_groups_dropped)
    found = sum(sum(s.loss_weights) * s.advantages[0] for s in out.samples)
    assert found == pytest.approx(0, abs=1e-9)
    released = flow_grpo(groups, "released")
    found = sum(sum(s.loss_weights) for s in released.samples)
    assert found == sum(sum(each) for group in batch for _, each in group)
    assert sum(s.advantages[0] for s in released.samples) == pytest.approx(0, abs=1e-6)


# --- mini-batches


def batch_of(num_groups: int) -> list[Group]:
    """Groups whose samples name their group in the prompt; every third has one reward only."""
    return [
        Group(
            i,
            (
                trajectory(1, turn([1], prompt=[i])),
                trajectory(float(i % 3 == 0), turn([2], prompt=[i])),
            ),
        )
        for i in range(num_groups)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_groups", [8, 7, 3])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3])
def test_minibatches_do_not_depend_on_the_ranks(
    mode: Any, num_groups: int, num_minibatches: int
) -> None:
    groups = batch_of(num_groups)

    def assignment(shares: list[list[Group]]) -> dict[int, int]:
        samples = [
            s
            for share in shares
            for s in flow_grpo(share, mode, num_minibatches, num_groups).samples
        ]
        found = {s.prompt_ids[0]: s.minibatch for s in samples}
        assert all(found[s.prompt_ids[0]] == s.minibatch for s in samples), (
            "a group belongs to one mini-batch"
        )
        return found

    alone = assignment([groups])
    assert set(alone) == (
        {i for i in range(num_groups) if i % 3} if mode == "paper" else set(range(num_groups))
    )
    assert all(
        minibatch == index * num_minibatches // num_groups for index, minibatch in alone.items()
    )
    assert set(alone.values()) <= set(range(num_minibatches))
    for num_ranks in (2, 4):
        seen = assignment(
            [[g for g in groups if g.index % num_ranks == rank] for rank in range(num_ranks)]
        )
        assert seen == alone
    assert assignment([groups[::-1]]) == alone


def test_minibatches_are_of_equal_size() -> None:
    samples = flow_grpo(batch_of(12), "released", 4).samples
    assert [sum(s.minibatch == i for s in samples) for i in range(4)] == [6, 6, 6, 6]
    assert all(s.minibatch == 0 for s in flow_grpo(batch_of(5), "released").samples)


# --- down to the gradient
#
# The policy: softmax over 3 tokens whose logits are the parameters themselves, the same for every
# token. theta = (0, ln 2, ln 3) gives p = (1/6, 2/6, 3/6). Old log-probs are set so that each token
# has the ratio p / p_old that is written beside it.

THETA = torch.tensor([0.0, math.log(2), math.log(3)], dtype=torch.float64)
PAPER_LOSS = LossSpec(clip_low=0.2, clip_high=0.2)
RELEASED_LOSS = LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=3.0)


def turn_with_ratios(ids: Sequence[int], ratios: Sequence[float]) -> Turn:
    logp = THETA.log_softmax(0)
    return turn(
        ids, [float(logp[i]) - math.log(ratio) for i, ratio in zip(ids, ratios, strict=True)]
    )


def worked_group() -> Group:
    """Reward 1 with turns of 1 and 3 tokens, reward 0 with one turn of 3 tokens."""
    good = trajectory(1, turn_with_ratios([0], [1.5]), turn_with_ratios([1, 2, 2], [1.0, 0.5, 1.1]))
    bad = trajectory(0, turn_with_ratios([2, 0, 1], [0.5, 2.0, 4.0]))
    return Group(0, (good, bad))


def loss_and_gradient(
    samples: Sequence[Sample], spec: LossSpec, ref: Tensor | None = None
) -> tuple[float, Tensor]:
    """Compute as the trainer does: token losses over the sum of the weights, in fp32."""
    theta = THETA.float().requires_grad_()
    ids = torch.tensor([i for s in samples for i in s.response_ids])
    out = policy_loss(
        theta.expand(len(ids), 3),
        ids,
        spec=spec,
        advantage_T=torch.tensor([x for s in samples for x in s.advantages]),
        weight_T=torch.tensor([w for s in samples for w in s.loss_weights]),
        old_logprob_T=torch.tensor([x for s in samples for x in s.logprobs]),
        ref_logprob_T=None if ref is None else ref.float().log_softmax(0)[ids],
    )
    normaliser = sum(sum(s.loss_weights) for s in samples)
    (gradient,) = torch.autograd.grad(out.loss / normaliser, theta)
    return out.loss.item() / normaliser, gradient.double()


def test_gradient_of_the_paper_mode_by_hand() -> None:
    """d loss / d theta_j = -sum over unclipped tokens of w A r ([y = j] - p_j).

    A = +-0.5 / (0.5 + 1e-6) = +-s, s = 1 / (1 + 2e-6). Weights: first good turn 1/(2*2*1) = 3/12,
    second 1/(2*2*3) = 1/12, bad turn 1/(2*1*3) = 2/12. good, token 0, r 1.5: above 1.2, clipped
    bad, token 2, r 0.5: below 0.8, clipped good, token 1, r 1.0: (1/12) * s * 1.0 on token 1
    bad, token 0, r 2.0: -(2/12) * s * 2.0 = -4 s/12 on token 0 good, token 2, r 0.5: (1/12) * s *
    0.5 on token 2        bad, token 1, r 4.0: -(2/12) * s * 4.0 = -8 s/12 on token 1 good, token 2,
    r 1.1: (1/12) * s * 1.1 on token 2 In units of s/12 the coefficients are c = (-4, 1 - 8, 1.6) =
    (-4, -7, 1.6), their sum C = -9.4; the gradient is -(c_j - C p_j):
        4 - 9.4/6, 7 - 9.4/3, -1.6 - 9.4/2   (they sum to 0)
    Loss: -sum w min(r A, clip(r) A), in the same units: -(3*1.2 + 1.0 + 0.5 + 1.1) + 2*(0.8 + 2 +
    4) = -6.2 + 13.6 = 7.4
    """
    out = flow_grpo([worked_group()])
    loss, gradient = loss_and_gradient(out.samples, PAPER_LOSS)
    unit = 1 / (1 + 2e-6) / 12
    expected = unit * torch.tensor([4 - 9.4 / 6, 7 - 9.4 / 3, -1.6 - 9.4 / 2], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    assert loss == pytest.approx(7.4 * unit, rel=1e-6)


def test_gradient_of_the_released_mode_by_hand() -> None:
    """Turn samples have rewards 1, 1, 0: mean 2/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3, so A =
    1/sqrt(3) and -2/sqrt(3) (but for 1e-6).

    Every one of the 7 tokens weighs 1/7. Clip at 0.8 and 1.3, dual clip at 3. In units of 1 / (7
    sqrt(3)): good, token 0, r 1.5: above 1.3, clipped                 bad, token 2, r 0.5: below
    0.8, clipped good, token 1, r 1.0: 1.0 on token 1                     bad, token 0, r 2.0: -4 on
    token 0 good, token 2, r 0.5 and 1.1: 1.6 on token 2             bad, token 1, r 4.0: above 3,
    dual clip c = (-4, 1, 1.6), C = -1.4, gradient -(c_j - C p_j): 4 - 1.4/6, -1 - 1.4/3, -1.6 -
    1.4/2   (they sum to 0) Loss: -(1.3 + 1.0 + 0.5 + 1.1) + 2 * (0.8 + 2 + 3) = -3.9 + 11.6 = 7.7
    """
    out = flow_grpo([worked_group()], "released")
    loss, gradient = loss_and_gradient(out.samples, RELEASED_LOSS)
    unit = 1 / (7 * math.sqrt(3)) * math.sqrt(1 / 3) / (math.sqrt(1 / 3) + 1e-6)
    expected = unit * torch.tensor([4 - 1.4 / 6, -1 - 1.4 / 3, -1.6 - 1.4 / 2], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    assert loss == pytest.approx(7.7 * unit, rel=1e-6)


def random_groups() -> list[Group]:
    """Groups of four with off-policy ratios; the third has one reward only."""
    rng = torch.Generator().manual_seed(3)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    def random_turn() -> Turn:
        ids = [integer(0, 2) for _ in range(integer(1, 6))]
        return turn_with_ratios(ids, torch.randn(len(ids), generator=rng).mul(0.6).exp().tolist())

    def random_trajectory(reward: float) -> Trajectory:
        return trajectory(reward, *(random_turn() for _ in range(integer(1, 3))))

    given_rewards = [[1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0.5, 1, 0, 1], [1, 0, 1, 1]]
    return [
        Group(i, tuple(random_trajectory(float(reward)) for reward in each))
        for i, each in enumerate(given_rewards)
    ]


def token_objective(
    spec: LossSpec, logp: Tensor, ref: Tensor, token: int, old: float, advantage: float
) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A), not below c A for A < 0, less beta k3."""
    ratio = torch.exp(logp[token] - old)
    value = torch.minimum(
        ratio * advantage, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage
    )
    if spec.dual_clip is not None and advantage < 0:
        value = torch.maximum(value, torch.tensor(spec.dual_clip * advantage, dtype=torch.float64))
    u = ref[token] - logp[token]
    return value - spec.kl_coef * (torch.exp(u) - u - 1)


def paper_objective(
    groups: Sequence[Group],
    spec: LossSpec,
    theta: Tensor,
    ref_theta: Tensor,
    keeps_equals: bool = False,
) -> Tensor:
    """Equation 5 of the paper as it is printed: nested means over trajectories, turns and tokens;
    mean over questions that carry signal, or with `keeps_equals` over all.
    """
    logp, ref = theta.log_softmax(0), ref_theta.log_softmax(0)
    total, num_kept = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        r = torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)
        if r.std(correction=0) == 0 and not keeps_equals:
            continue
        num_kept += 1
        for each, reward in zip(group.trajectories, r, strict=True):
            advantage = float((reward - r.mean()) / (r.std(correction=0) + 1e-6))
            for one in each.turns:
                call = one.calls["planner"]
                for token, old in zip(call.response_ids, call.logprobs, strict=True):
                    value = token_objective(spec, logp, ref, token, old, advantage)
                    total = total + value / len(group.trajectories) / len(each.turns) / len(
                        call.response_ids
                    )
    return total / num_kept


def released_objective(
    groups: Sequence[Group], spec: LossSpec, theta: Tensor, ref_theta: Tensor
) -> Tensor:
    """One mean over all tokens of all questions; the advantage is normalised over the turns of a
    question.
    """
    logp, ref = theta.log_softmax(0), ref_theta.log_softmax(0)
    values = []
    for group in groups:
        r = torch.tensor(
            [t.reward for t in group.trajectories for _ in t.turns], dtype=torch.float64
        )
        for each in group.trajectories:
            advantage = float((each.reward - r.mean()) / (r.std(correction=1) + 1e-6))
            for one in each.turns:
                call = one.calls["planner"]
                for token, old in zip(call.response_ids, call.logprobs, strict=True):
                    values.append(token_objective(spec, logp, ref, token, old, advantage))
    return torch.stack(values).mean()


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_with_groups_of_one_reward_the_gradient_is_that_of_equation_5(kl_coef: float) -> None:
    spec = LossSpec(clip_low=0.2, clip_high=0.2, kl_coef=kl_coef)
    groups, ref_theta = random_groups(), torch.tensor([0.5, -0.5, 0.2], dtype=torch.float64)
    gradients = []
    for equal_groups in ("keep", "drop"):
        theta = THETA.clone().requires_grad_()
        (-paper_objective(groups, spec, theta, ref_theta, equal_groups == "keep")).backward()
        samples = flow_grpo(groups, equal_groups=equal_groups).samples
        _, gradient = loss_and_gradient(samples, spec, ref_theta if kl_coef else None)
        torch.testing.assert_close(gradient, theta.grad, rtol=1e-5, atol=1e-6)
        gradients.append(gradient)
    if not kl_coef:  # one of five questions has one reward
        torch.testing.assert_close(gradients[0] * 5 / 4, gradients[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_that_of_the_objective(mode: Any, kl_coef: float, num_minibatches: int) -> None:
    """Against the objective written out as nested loops in fp64 and differentiated by autograd."""
    base = PAPER_LOSS if mode == "paper" else RELEASED_LOSS
    spec = LossSpec(
        clip_low=base.clip_low, clip_high=base.clip_high, dual_clip=base.dual_clip, kl_coef=kl_coef
    )
    objective = paper_objective if mode == "paper" else released_objective
    groups, ref_theta = random_groups(), torch.tensor([0.5, -0.5, 0.2], dtype=torch.float64)
    samples = flow_grpo(groups, mode, num_minibatches).samples
    for minibatch in range(num_minibatches):
        members = [g for g in groups if g.index * num_minibatches // len(groups) == minibatch]
        theta = THETA.clone().requires_grad_()
        truth = -objective(members, spec, theta, ref_theta)
        truth.backward()
        loss, gradient = loss_and_gradient(
            [s for s in samples if s.minibatch == minibatch], spec, ref_theta if kl_coef else None
        )
        assert theta.grad.abs().max() > 1e-3
        torch.testing.assert_close(gradient, theta.grad, rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(truth.item(), rel=1e-5, abs=1e-6)


def test_a_group_of_one_is_refused() -> None:
    """In mode "released" a lone rollout of one turn keeps its reward."""
    values: dict[str, Any] = {"rollout": {"group_size": 1}}
    with pytest.raises(UserError, match="group_size=1 makes every advantage 0"):
        load_algorithm(Config.model_validate(values))
    load_algorithm(Config.model_validate(values | {"algorithm": {"mode": "released"}}))
