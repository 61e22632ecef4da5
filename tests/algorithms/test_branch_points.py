"""Branch points: the choice by hand, and scores against those of one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import make
import pytest
import torch
from batches import random_samples
from flowkernels import LossSpec, branching_score
from hypothesis import given, settings
from hypothesis import strategies as st
from make import call, rollout
from transformers import PreTrainedModel

from flowtrain.algorithms import Algorithm, load_algorithm
from flowtrain.algorithms.branching import (
    ResponseScores,
    find_points,
    known_logprobs,
    root_samples,
    score_samples,
)
from flowtrain.config import Appo
from flowtrain.config.options import parse
from flowtrain.records import Group, SampleId, TrainBatch, Turn
from flowtrain.trainer.distributed import World
from flowtrain.trainer.minibatches import complete
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack
from flowtrain.trainer.setup.learner import optim_spec
from flowtrain.trainer.trainer import Trainer

NOT_BLANK = torch.zeros(300, dtype=torch.bool)


def turn(ids: Sequence[int], prompt: Sequence[int] = (7,), logprobs: Any = -1.0) -> Turn:
    return make.turn(call(ids, prompt, logprobs))


def scores(entropy: Sequence[float], log_ratio: Sequence[float] | None = None) -> ResponseScores:
    ratio = torch.zeros(len(entropy)) if log_ratio is None else torch.tensor(log_ratio)
    entropy_T = torch.tensor(entropy, dtype=torch.float32)
    return ResponseScores(ratio, entropy_T, torch.zeros(len(entropy)))


def points(
    groups: Sequence[Group], scores: ResponseScores, rule: Appo, num: int, blank: Sequence[int] = ()
) -> list[list[tuple[int, int, int]]]:
    samples, _ = root_samples(groups)
    assert sum(len(s.response_ids) for s in samples) == len(scores.entropy_T)
    is_blank = NOT_BLANK.clone()
    is_blank[list(blank)] = True
    found = find_points(groups, scores, rule, num_branches=num, seed=0, is_blank_V=is_blank)
    return [[(p.parent, p.turn, p.token) for p in each] for each in found]


ENTROPY = Appo(rule="entropy", spacing=1)


def test_places_are_told_by_root_turn_and_token() -> None:
    """The highest entropies of two roots of two turns each, and of a second group."""
    groups = [
        Group(0, (rollout(turn([1, 2]), turn([3])), rollout(turn([4]), turn([5, 6])))),
        Group(1, (rollout(turn([8, 9])),)),
    ]
    entropy = [0, 0, 9, 0, 0, 9, 9, 0]
    expected = [[(0, 1, 0), (1, 1, 1)], [(0, 0, 0), (0, 0, 1)]]
    assert points(groups, scores(entropy), ENTROPY, 2) == expected


def test_turns_without_tokens_shift_nothing() -> None:
    groups = [Group(0, (rollout(turn([]), turn([1, 2, 3])), rollout(turn([4, 5]))))]
    assert sorted(points(groups, scores([0, 9, 0, 9, 0]), ENTROPY, 2)[0]) == [(0, 1, 1), (1, 0, 0)]


def test_one_token_is_a_place() -> None:
    found = points([Group(0, (rollout(turn([1])),))], scores([1.0]), ENTROPY, 2)
    assert found == [[(0, 0, 0), (0, 0, 0)]]


def test_rollouts_without_tokens_give_no_place() -> None:
    assert points([Group(0, (rollout(), rollout(turn([]))))], scores([]), ENTROPY, 3) == [[]]


def test_blank_tokens_are_never_chosen_while_others_are_there() -> None:
    groups = [Group(0, (rollout(turn([1, 2, 3, 4])),))]
    assert points(groups, scores([0, 9, 8, 0]), ENTROPY, 1, blank=[2]) == [[(0, 0, 2)]]


def test_both_factors_must_be_high() -> None:
    """Token 1 has the entropy, 3 the future, 2 both, 0 neither: two negatives make none."""
    groups = [Group(0, (rollout(turn([1, 2, 3, 4])),))]
    log_ratio = [-0.5, -0.15, -0.05, 0.2]  # future from each: -0.5, 0.0, 0.15, 0.2
    score = scores([0.0, 2.0, 2.0, 0.0], log_ratio)
    assert points(groups, score, Appo(spacing=1), 1) == [[(0, 0, 2)]]
    out = branching_score(
        torch.tensor(log_ratio),
        torch.zeros(4),
        torch.tensor([0.0, 2.0, 2.0, 0.0]),
        torch.tensor([0, 4]),
    )
    assert float(out.score_T[0]) > float(out.score_T[2]), (
        "the case is one in which the product alone would choose token 0"
    )


def test_equal_policies_fall_back_to_entropy() -> None:
    groups = [Group(0, (rollout(turn([1, 2, 3])),))]
    assert (
        points(groups, scores([0, 1, 9]), Appo(spacing=1), 1)
        == points(groups, scores([0, 1, 9]), ENTROPY, 1)
        == [[(0, 0, 2)]]
    )


def test_kept_tokens_move_the_place_on_and_never_beyond_the_end() -> None:
    groups = [Group(0, (rollout(turn([1, 2, 3])),))]
    rule = Appo(rule="entropy", spacing=1, keep_token=True)
    found = points(groups, scores([0, 1, 9]), rule, 1)
    assert found == [[(0, 0, 2)]], "token 1 is kept; after token 2 there is nothing"


# ---- the budget


def test_roots_share_the_branches_out_evenly() -> None:
    groups = [Group(0, (rollout(turn([1, 2, 3])), rollout(turn([4, 5]))))]
    entropy = scores([9, 8, 0, 2, 1])  # z-scores are over a root
    wanted = [(1, 0, 0), (0, 0, 0), (0, 0, 1)]
    assert [points(groups, entropy, ENTROPY, num)[0] for num in (2, 3)] == [wanted[:2], wanted]


def test_what_candidates_lack_other_tokens_fill_and_then_the_same_again() -> None:
    """Entropies of 9 and 8 are above the mean; all are two tokens apart."""
    groups = [Group(0, (rollout(turn([1, 2, 3, 4, 5, 6])), rollout(turn([7]))))]
    rule = Appo(rule="entropy", spacing=2)
    found = points(groups, scores([9, 8.5, 0, 1, 8, 2, 5]), rule, 6)[0]
    assert found == [(0, 0, 0), (0, 0, 4), (1, 0, 0), (0, 0, 2), (0, 0, 0), (0, 0, 4)]


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 20), max_size=9), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_there_are_exactly_as_many_as_asked_for_and_all_exist(
    roots: list[list[list[int]]], num: int, spacing: int
) -> None:
    group = Group(0, tuple(rollout(*map(turn, turns)) for turns in roots))
    ids = [x for turns in roots for response in turns for x in response]
    rule = Appo(rule="entropy", spacing=spacing)
    (found,) = points([group], scores([float(x) for x in ids]), rule, num)
    assert len(found) == (num if ids else 0)
    assert all(
        token < len(group.trajectories[root].turns[index].calls["planner"].response_ids)
        for root, index, token in found
    )


# ---- the scoring pass


def test_scores_come_back_in_the_order_of_the_samples(make_trainer: Callable[..., Trainer]) -> None:
    """Rows sort samples by their tokens; each token's scores are those of its own sample."""
    trainer, samples = make_trainer(temperature=0.7), random_samples(9)
    together = score_samples(trainer, samples, against_reference=False)
    alone = [score_samples(trainer, [sample], against_reference=False) for sample in samples]
    found = together.baseline_logprob_T.tolist()
    assert found == [x for s in samples for x in torch.tensor(s.logprobs).tolist()]
    torch.testing.assert_close(
        together.logprob_T, torch.cat([each.logprob_T for each in alone]), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        together.entropy_T, torch.cat([each.entropy_T for each in alone]), rtol=1e-6, atol=1e-6
    )
    assert score_samples(trainer, [], against_reference=False).entropy_T.shape == (0,)


def test_the_reference_is_the_other_denominator(make_trainer: Callable[..., Trainer]) -> None:
    samples, reference = random_samples(4), make_trainer().model.eval()
    trainer = make_trainer(reference=reference)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.01)
    scored = score_samples(trainer, samples, against_reference=True)
    assert not torch.allclose(scored.logprob_T, scored.baseline_logprob_T)
    torch.testing.assert_close(
        scored.baseline_logprob_T,
        score_samples(make_trainer(), samples, against_reference=False).logprob_T,
    )


RANDOM = Appo(rule="random", spacing=3)


def test_random_places_are_any_and_depend_on_the_seed_alone() -> None:
    """Whatever the entropies say; blanks and neighbours are no places here either."""
    groups = [Group(0, (rollout(turn(range(1, 9)), turn([9, 10])), rollout(turn(range(11, 21)))))]
    blank = NOT_BLANK.clone()
    blank[[1, 2]] = True

    def found(seed: int, entropy: float) -> list[tuple[int, int, int]]:
        told = scores([entropy, *[0.0] * 19])
        (each,) = find_points(groups, told, RANDOM, num_branches=4, seed=seed, is_blank_V=blank)
        return [(p.parent, p.turn, p.token) for p in each]

    draws = [found(seed, 0.0) for seed in range(200)]
    assert [found(seed, 9.0) for seed in range(200)] == draws
    places = {place for draw in draws for place in draw}
    assert places == {(0, 0, token) for token in range(2, 8)} | {(0, 1, 0), (0, 1, 1)} | {
        (1, 0, token) for token in range(10)
    }
    for draw in draws:
        assert [parent for parent, *_ in draw].count(0) == 2, "as many from every root"
        for root in (0, 1):
            at = [token + 8 * turn for parent, turn, token in draw if parent == root]
            assert abs(at[0] - at[1]) >= 3


def test_random_places_of_a_group_do_not_depend_on_its_neighbours() -> None:
    groups = [Group(index, (rollout(turn(range(1, 13))),)) for index in range(3)]
    together = points(groups, scores([0.0] * 36), RANDOM, 2)
    assert together == [points([group], scores([0.0] * 12), RANDOM, 2)[0] for group in groups]
    assert len({tuple(each) for each in together}) > 1


@pytest.mark.parametrize("kind", ["score", "entropy", "random"])
def test_every_rule_runs_on_real_scores(make_trainer: Callable[..., Trainer], kind: str) -> None:
    trainer = make_trainer()
    turns = [turn(s.response_ids, s.prompt_ids, s.logprobs) for s in random_samples(12)]
    groups = [
        Group(g, tuple(rollout(*turns[6 * g + 2 * r : 6 * g + 2 * r + 2]) for r in range(3)))
        for g in range(2)
    ]
    rule = Appo(rule=kind, spacing=1)
    samples, _ = root_samples(groups)
    scores = score_samples(trainer, samples, against_reference=False)
    found = find_points(groups, scores, rule, num_branches=4, seed=0, is_blank_V=NOT_BLANK)
    assert [len(each) for each in found] == [4, 4]


def num_passes(model: PreTrainedModel, do: Callable[[], object]) -> int:
    passes: list[object] = []
    hook = model.register_forward_hook(lambda *_: passes.append(None))
    do()
    hook.remove()
    return len(passes)


def test_what_the_sampler_told_spares_the_policys_pass(
    make_trainer: Callable[..., Trainer],
) -> None:
    samples, reference = random_samples(5), make_trainer().model.eval()
    trainer = make_trainer(reference=reference)
    entropies = [float(n) for n, _ in enumerate(x for s in samples for x in s.response_ids)]
    found: list[ResponseScores] = []
    seen = num_passes(
        trainer.model,
        lambda: found.append(
            score_samples(trainer, samples, against_reference=False, entropies=entropies)
        ),
    )
    assert seen == 0
    assert found[0].entropy_T.tolist() == entropies
    assert (
        found[0].logprob_T.tolist()
        == found[0].baseline_logprob_T.tolist()
        == torch.tensor([x for s in samples for x in s.logprobs]).tolist()
    )
    seen = num_passes(
        reference,
        lambda: found.append(
            score_samples(trainer, samples, against_reference=True, entropies=entropies)
        ),
    )
    assert seen == 1
    assert (
        found[1].logprob_T.tolist()
        == found[0].logprob_T.tolist()
        != found[1].baseline_logprob_T.tolist()
    )


def test_rounding_between_sampler_and_reference_is_no_difference(
    make_trainer: Callable[..., Trainer],
) -> None:
    """Or the first step, in which both policies are the same, would branch where its noise is."""
    trainer = make_trainer(reference=make_trainer().model.eval())
    (sample,) = random_samples(1, seed=3)
    truth = score_samples(trainer, [sample], against_reference=False).logprob_T
    noise = torch.tensor([9e-6, -9e-6] * len(truth))[: len(truth)]
    noise[-1] = 3e-3
    told = replace(sample, logprobs=tuple((truth + noise).tolist()))
    scored = score_samples(trainer, [told], against_reference=True, entropies=[1.0] * len(truth))
    assert len(truth) > 2 and torch.equal(scored.logprob_T[:-1], scored.baseline_logprob_T[:-1])
    found = float(scored.logprob_T[-1] - scored.baseline_logprob_T[-1])
    assert found == pytest.approx(3e-3, rel=1e-2)


def test_what_was_scored_is_not_scored_again_and_trains_the_same(
    make_trainer: Callable[..., Trainer],
    alone: World,
    tiny_path: str,
) -> None:
    """Two mini-batches with ratios and a KL term."""
    loss = LossSpec(kl_coef=0.3)
    samples = [
        replace(s, minibatch=n % 2, sample_id=SampleId(0, n, 0))
        for n, s in enumerate(random_samples(8))
    ]
    updates = []
    for is_given in (True, False):
        reference = models.load_model(tiny_path, torch.float64).requires_grad_(False).eval()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.05)
        trainer = make_trainer(loss, reference=reference, rescore=not is_given, has_ref=is_given)
        scores = score_samples(trainer, samples, against_reference=True)
        known = known_logprobs(samples, scores, has_old=is_given, has_ref=is_given)
        batch = complete(TrainBatch(tuple(samples)), 2, 0, known, alone)
        rows, stats = pack(batch.samples, 2, 1000), dict[str, float]()
        num_scored = num_passes(reference, lambda: stats.update(trainer.step(rows)))  # noqa: B023
        assert num_scored == (0 if is_given else 2)
        updates.append((stats, [p.detach().clone() for p in trainer.model.parameters()]))
    (ours, our_weights), (theirs, their_weights) = updates
    assert ours["kl_ref"] > 1e-3 and ours["ratio_max"] > 1.001
    found = {k: v for k, v in ours.items() if k != "train_tflop"}
    assert found == pytest.approx({k: v for k, v in theirs.items() if k != "train_tflop"}, rel=1e-4)
    for a, b in zip(our_weights, their_weights, strict=True):  # what is handed on is fp32
        torch.testing.assert_close(a, b, rtol=1e-6, atol=5e-5)
    assert ours["train_tflop"] == pytest.approx(theirs["train_tflop"] * 3 / 5)


def test_branching_hands_on_the_logprobs_that_the_loss_asks_for() -> None:
    """(by the policy, by the reference policy)"""

    def algorithm(*words: str) -> Algorithm:
        config = parse(["--appo.spacing", "2", *words])
        return load_algorithm(config)

    def known(*words: str) -> tuple[bool, bool]:
        appo = algorithm("--algorithm.name", "appo", *words)
        return appo.has_old_logprobs, appo.has_ref_logprobs

    rescore = ("--train.rescore", "true")
    bf16 = ("--model.dtype", "bfloat16")
    assert known(*rescore, *bf16) == (True, True) and known(*bf16) == (False, True)
    assert known(*rescore) == (False, True), "the engine's log-probs serve: no pass of the policy"
    assert known(*rescore, *bf16, "--algorithm.kl_coef", "0") == (True, False)
    behavior = known(*rescore, *bf16, "--appo.omega", "behavior")
    assert behavior == known(*rescore, *bf16, "--appo.rule", "entropy") == (True, False)
    flow_grpo = algorithm(*rescore, *bf16)
    assert (flow_grpo.has_old_logprobs, flow_grpo.has_ref_logprobs) == (False, False)
    components: Any = SimpleNamespace(
        config=flow_grpo.config, algorithm=algorithm("--algorithm.name", "appo", *rescore, *bf16)
    )
    optim = optim_spec(components)
    assert (optim.rescore, optim.has_ref) == (False, True)
