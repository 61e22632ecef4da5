"""How much does the clip leave of Omega, the second factor of APPO's branching score?

SYNTHETIC long rollouts, by how far the policy is from the one that Omega divides by, and by the
decay gamma.
"""

from __future__ import annotations

import torch
from flowkernels import branch_points, branching_score

GAMMAS = (0.0, 0.9, 2 ** (-1 / 64), 0.99, 0.999, 1.0)
DRIFTS = (1e-5, 1e-4, 1e-3, 1e-2)
"""KL per token, in nats, of the policy to the one that Omega divides by."""
NUM_POINTS = 8


def rows() -> list[dict[str, float]]:
    return [omega_row(drift, gamma) for drift in DRIFTS for gamma in GAMMAS]


def omega_row(
    drift: float, gamma: float, num_rollouts: int = 32, num_tokens: int = 4096
) -> dict[str, float]:
    """Where Omega lies in rollouts of a policy that has moved by `drift` nats per token, and which
    share of the branch points is that of entropy alone.

    Entropies are log-normal, so that few tokens have most of it. A token's log-ratio is normal with
    a variance in proportion to its entropy, and a mean of half the variance: then the other
    policy's probabilities sum to 1, and the mean over tokens is `drift`.
    """
    rng = torch.Generator().manual_seed(0)
    shape = (num_rollouts, num_tokens)
    entropy = (1.5 * torch.randn(shape, generator=rng) - 2).exp()
    variance = 2 * drift * entropy / entropy.mean()
    log_ratio_T = (variance / 2 + variance.sqrt() * torch.randn(shape, generator=rng)).flatten()
    entropy_T, zeros_T = entropy.flatten(), torch.zeros(num_rollouts * num_tokens)
    bounds = torch.arange(num_rollouts + 1) * num_tokens
    scores = branching_score(log_ratio_T, zeros_T, entropy_T, bounds, gamma=gamma)
    alone = branching_score(zeros_T, zeros_T, entropy_T, bounds)
    ours, theirs = (branch_points(s, bounds, num_points=NUM_POINTS) for s in (scores, alone))
    same = (ours[:, :, None] == theirs[:, None, :]).any(-1)
    low, high = (scores.omega_T <= 0.8).float().mean(), (scores.omega_T >= 1.2).float().mean()
    return {
        "KL per token": drift,
        "gamma": gamma,
        "at 0.8": float(low),
        "at 1.2": float(high),
        "between": float(1 - low - high),
        "places of entropy": float(same.float().mean()),
    }
