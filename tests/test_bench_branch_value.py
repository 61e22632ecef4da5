"""The oracle of branch points and pass@k, against counts by hand."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
import torch

from bench import branch_value, learning, place_stats
from bench.pass_at_k import NUM_ASKED, mean_passes, pass_at_k
from bench.place_stats import Root
from flowtrain.algorithms.branching import ResponseScores

OPEN = np.array([True, True, True])


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def root(scores: list[float], flips: list[float], change: list[float] | None = None) -> Root:
    return Root(1.0, {"s": np.array(scores)}, np.array(flips), np.array(change or flips))


@pytest.mark.parametrize(
    ("num_asked", "num_right", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 0, 2)]
)
def test_pass_at_k_is_the_mean_over_all_draws(num_asked: int, num_right: int, k: int) -> None:
    answers = [n < num_right for n in range(num_asked)]
    expected = fmean(any(draw) for draw in combinations(answers, k))
    assert pass_at_k(num_asked, num_right, k) == pytest.approx(expected)


def test_passes_are_averaged_over_questions_and_runs() -> None:
    passes = mean_passes([0, NUM_ASKED, 4, 4])
    assert passes[1] == 0.5 and passes[NUM_ASKED] == 0.75 and 0.5 < passes[4] < 0.75
    columns = learning.pass_columns([{1: 0.2}, {1: 0.4}])
    assert columns["pass@1"] == pytest.approx(0.3)
    assert columns["pass@1 +-"] == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert learning.pass_columns([]) == {}


def test_flips_and_change_of_a_rollout_that_one_token_decides() -> None:
    """Before the second token all is open, after it nothing: it takes the whole variance."""
    sampled = np.array([[1.0, 0.0] * 8, [0.0, 1.0] * 8, [1.0] * 16])
    flips, change = branch_value.values(sampled, OPEN, reward=1.0)
    assert flips.tolist() == [0.5, 0.5, 0.0]
    noise = sampled[0].var(ddof=1) / 16
    assert change == pytest.approx([-2 * noise, 0.25 - noise, 0.0])


def test_a_token_without_branches_has_those_of_the_next_and_changes_nothing() -> None:
    is_open = np.array([False, True, False])
    flips, change = branch_value.values(np.array([[0.0, 0.0, 0.0, 1.0]]), is_open, reward=1.0)
    assert flips.tolist() == [0.75, 0.75, 0.0] and change[0] == change[2] == 0 < change[1]


def test_changes_of_noise_sum_to_the_variance_of_the_reward() -> None:
    """Rollouts of three coins, of which two heads win."""
    draw, changes = rng(), []
    for _ in range(4000):
        coins = draw.integers(2, size=3)
        sampled = np.array(
            [
                [sum(coins[:i]) + draw.integers(2, size=3 - i).sum() >= 2 for _ in range(4)]
                for i in range(3)
            ],
            dtype=float,
        )
        changes.append(branch_value.values(sampled, OPEN, float(coins.sum() >= 2))[1])
    assert np.mean(changes, axis=0) == pytest.approx([1 / 16, 1 / 16, 1 / 8], abs=0.02)


def test_auc_counts_pairs_of_branches() -> None:
    assert place_stats.auc(np.array([3.0, 2.0, 1.0]), np.array([1.0, 0.0, 0.0])) == (2, 2)
    assert place_stats.auc(np.array([1.0, 2.0, 2.0]), np.array([0.0, 1.0, 0.0])) == (1.5, 2)
    above, below = place_stats.auc(np.array([0.0, 1.0]), np.array([0.25, 0.75]))
    assert (above, below) == pytest.approx((9 / 16 + 3 / 16, 2 * 3 / 16 + 10 / 16))


def test_ranks_share_ties_and_deciles_hold_a_tenth_each() -> None:
    assert place_stats.ranks(np.array([5.0, 1.0, 5.0, 9.0])).tolist() == [1.5, 0, 1.5, 3]
    deciles = place_stats.deciles_of(rng().permutation(40).astype(float))
    assert np.bincount(deciles).tolist() == [4] * 10
    assert place_stats.deciles_of(np.arange(10.0)).tolist() == list(range(10))


def test_rank_correlation() -> None:
    up = np.array([0.1, 0.2, 0.9])
    assert place_stats.rank_correlation(up, up**3) == (pytest.approx(1), 1)
    assert place_stats.rank_correlation(up, -up) == (pytest.approx(-1), 1)
    assert place_stats.rank_correlation(up, np.zeros(3)) == (0, 0)


def test_a_ratio_lies_in_its_interval_and_alike_rollouts_leave_none() -> None:
    value, low, high = place_stats.ratio([(0.0, 1.0), (1.0, 1.0)] * 20, rng())
    assert value == 0.5 and 0.3 < low < 0.5 < high < 0.7
    assert place_stats.ratio([(1.0, 4.0)] * 5, rng()) == (0.25, 0.25, 0.25)
    assert place_stats.ratio([(0.0, 0.0), (1.0, 4.0)], rng()) == (0.25, 0.25, 0.25)
    assert place_stats.ratio([(0.0, 0.0)] * 5, rng()) == (None, None, None)


def test_a_summary_takes_the_place_of_the_highest_score() -> None:
    roots = [root([1, 3, 2], [0, 0.5, 1]), root([9, 0, 0], [0.25, 0, 0], [0.75, 0, 0])]
    (row,) = place_stats.summary(roots, rng())
    assert (row["flips there"], row["change there"]) == (0.375, 0.625)
    deciles = place_stats.by_decile([root(list(range(20)), [n / 20 for n in range(20)])] * 3, rng())
    assert [row["flips"] for row in deciles] == pytest.approx([(4 * n + 1) / 40 for n in range(10)])


def test_scores_put_candidates_first_and_fall_back_to_entropy() -> None:
    """Two rollouts of two turns; equal policies in the second one alone."""
    entropy_T = torch.tensor([0.0, 2.0, 2.0, 0.0, 0.5, 0.1, 0.9, 0.2])
    logprob_T = torch.tensor([-0.5, -0.15, -0.05, 0.2, 0.0, 0.0, 0.0, 0.0])
    found = ResponseScores(logprob_T, entropy_T, torch.zeros(8))
    is_first = np.array([True, False, True, False] * 2)
    scores = branch_value.all_scores(found, torch.tensor([0, 4, 8]), is_first)
    assert scores["score, gamma 1"][:4].argmax() == 2 and scores["score, gamma 1"][0] < 0
    assert np.argsort(scores["score, gamma 0"][4:]).tolist() == np.argsort(entropy_T[4:]).tolist()
    assert scores["early"].tolist() == [0, -1, -2, -3] * 2
    assert scores["after tools"].tolist() == pytest.approx([0, 0, 2.0, 0, 0, 0, 1.55, 0])
