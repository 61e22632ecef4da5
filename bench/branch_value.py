"""Does a branching score find the tokens at which outcomes turn?  python -m bench.branch_value
--policies warm=runs/warm/model --reference runs/warm/model [--json F] [--plot PNG]

An oracle of APPO's branch points. Every token of a rollout is sampled again several times, each
time to the end of the rollout: its "flips" are the share of these branches whose reward differs
from the rollout's. Flips are rarer the later a token stands, whatever the token decides, because
less is left to go wrong. What the token itself decides is its "change": the square of how much the
expected reward changes with it, from the branches that sample it again to those that keep it and
sample the next one. Estimates subtract the variance of the branches, so that noise has a mean of 0;
over a rollout, changes sum to the variance of its reward.

A token whose entropy is below --least-entropy has the branches of the next one, for hardly any of
its own would differ. Tokens of white space and punctuation, where APPO never branches, are left
out. `bench/place_stats.py` compares scores. Other options are those of a run, by default the ones
of the study `branching`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
import torch
from flowkernels import LossSpec, branching_score
from numpy.typing import NDArray
from tqdm import tqdm

from bench.measure import print_table, write_json
from bench.place_stats import Floats, Root, by_decile, summary
from bench.sampling import open_agent
from bench.studies import STUDIES
from flowtrain.agents.base import Agent
from flowtrain.agents.collect import collect, collect_branches
from flowtrain.algorithms.branching import (
    ResponseScores,
    blank_tokens,
    root_samples,
    score_samples,
)
from flowtrain.rewards import score
from flowtrain.run.components import RunComponents
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training.model import load_model
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.types import BranchPoint, Group
from flowtrain.utils.seeds import derive_seed

GAMMAS = {"1": 1.0, "2^(-1/64)": 2 ** (-1 / 64), "0.99": 0.99, "0": 0.0}
DRAWN = ("score, gamma 1", "score, gamma 0.99", "entropy", "early", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--policies", nargs="+", required=True, metavar="NAME=FOLDER", help="model folders")
    add("--reference", required=True, help="model folder: the policy that Omega divides by")
    add("--rollouts", type=int, default=64, help="of a question each (default: 64)")
    add("--branches", type=int, default=8, help="of each token, an even number (default: 8)")
    add("--least-entropy", type=float, default=0.01, help="in nats (default: 0.01)")
    add("--json", metavar="F", help="write the rows to this file")
    add("--plot", metavar="PNG", help="draw flips and change by decile into this file")
    args, options = parser.parse_known_args()
    rows, deciles = [], []
    for name, _, folder in (each.partition("=") for each in args.policies):
        roots, kl = measure(folder, args, options)
        rng = np.random.default_rng(0)
        oracles = [r.oracles for r in roots if r.oracles is not None]
        found = [*summary(roots, rng), *summary(oracles, rng)]
        reward = fmean(r.reward for r in roots)
        about = {"policy": name, "KL per token": kl, "rollouts": len(roots), "reward": reward}
        rows += [about | row for row in found]
        deciles += [{"policy": name, **row} for row in by_decile(roots, rng)]
    print_table(rows)
    if args.json:
        write_json(args.json, [*rows, *deciles])
    if args.plot:
        plot(deciles, args.plot)


def measure(policy: str, args: argparse.Namespace, more: Sequence[str]) -> tuple[list[Root], float]:
    """Roll out, score and branch from every token; return also an estimate of the KL per token to
    the reference, in nats.
    """
    options = [
        *("--config", "configs/quickstart.toml", *STUDIES["branching"]["appo"]),
        *("--model.path", policy, "--eval.num_tasks", str(args.rollouts)),
        *more,
    ]
    with open_agent(options, branches=True) as (components, agent):
        tasks = components.tasks.held_out[MAIN_SPLIT]
        groups = score(collect(agent, tasks, group_size=1, seed=0))
        tokens, kl = scored_tokens(components, groups, args.reference)
        rollouts = zip(tqdm(groups, desc=policy), tokens, strict=True)
        return [root(agent, group, *mine, args) for group, mine in rollouts], kl


def scored_tokens(
    components: RunComponents, groups: Sequence[Group], reference: str
) -> tuple[list[tuple[dict[str, Floats], Floats, NDArray[np.bool_]]], float]:
    """(scores by name, entropies, which tokens are no blanks) of each rollout, and the KL."""
    samples, entropies = root_samples(groups)
    frozen = load_model(reference, torch.float32).requires_grad_(False).eval()
    trainer = Trainer(
        components.model, components.world, LossSpec(), OptimSpec(lr=0.0), reference=frozen
    )
    found = score_samples(trainer, samples, 16384, against_reference=True, entropies=entropies)
    blank_V = blank_tokens(components.tokenizer, components.model.config.vocab_size)
    ids = torch.tensor([token for sample in samples for token in sample.response_ids])
    lengths = [
        sum(len(turn.calls["planner"].response_ids) for turn in group.trajectories[0].turns)
        for group in groups
    ]
    starts = [n == 0 for sample in samples for n in range(len(sample.response_ids))]
    bounds = [0, *accumulate(lengths)]
    scores = all_scores(found, torch.tensor(bounds), np.array(starts))
    tokens = [
        (
            {name: values[start:end] for name, values in scores.items()},
            found.entropy_T[start:end].double().numpy(),
            ~blank_V[ids[start:end]].numpy(),
        )
        for start, end in pairwise(bounds)
    ]
    return tokens, float((found.logprob_T - found.baseline_logprob_T).mean())


def all_scores(
    found: ResponseScores, bounds_S1: torch.Tensor, is_first: NDArray[np.bool_]
) -> dict[str, Floats]:
    """The scores of all tokens by name, of which a rule takes the highest.

    Args:
        is_first: tokens that begin a turn.
    """
    scores = {}
    for name, gamma in GAMMAS.items():
        args = (found.logprob_T, found.baseline_logprob_T, found.entropy_T, bounds_S1)
        product = branching_score(*args, gamma=gamma)
        # Candidates first: a product of two negatives is none.
        ranked_T = torch.where(product.is_candidate_T, product.score_T, -product.score_T.abs())
        scores[f"score, gamma {name}"] = ranked_T.double().numpy()
    entropy = found.entropy_T.double().numpy()
    position = np.concatenate(
        [np.arange(end - start) for start, end in pairwise(bounds_S1.tolist())]
    )
    later_turn = is_first & (position > 0)
    return scores | {
        "entropy": entropy,
        "after tools": np.where(later_turn, 1 + turn_means(entropy, is_first), 0.0),
        "early": -position.astype(float),
        "random": np.random.default_rng(0).random(len(entropy)),
    }


def turn_means(entropy: Floats, is_first: NDArray[np.bool_]) -> Floats:
    """The mean entropy of each token's turn, which ARPO's rule goes by."""
    turn = is_first.cumsum() - 1
    return (np.bincount(turn, entropy) / np.bincount(turn))[turn]


def root(
    agent: Agent,
    group: Group,
    scores: Mapping[str, Floats],
    entropy: Floats,
    is_allowed: NDArray[np.bool_],
    args: argparse.Namespace,
) -> Root:
    """Branch from every token of a rollout."""
    (rollout,) = group.trajectories
    places = [
        BranchPoint(0, turn, token, 0.0)
        for turn, each in enumerate(rollout.turns)
        for token in range(len(each.calls["planner"].response_ids))
    ]
    is_open = entropy >= args.least_entropy
    points = [p for p, is_one in zip(places, is_open, strict=True) if is_one] * args.branches
    seed, size = derive_seed("branch value", group.index), 1 + len(points)
    (filled,) = score(collect_branches(agent, [group], [points], group_size=size, seed=seed))
    assert rollout.reward is not None
    rewards = [t.reward for t in filled.trajectories[1:]]
    sampled = np.array(rewards, dtype=float).reshape(args.branches, -1).T
    mine = {name: each[is_allowed] for name, each in scores.items()}
    whole, first, second = (
        [each[is_allowed] for each in values(branches, is_open, rollout.reward)]
        for branches in (sampled, *np.hsplit(sampled, 2))
    )
    oracles = {"oracle of flips": first[0], "oracle of change": first[1]}
    halved = Root(rollout.reward, oracles, flips=second[0], change=second[1])
    return Root(rollout.reward, mine, flips=whole[0], change=whole[1], oracles=halved)


def values(sampled: Floats, is_open: NDArray[np.bool_], reward: float) -> tuple[Floats, Floats]:
    """(flips, change) of every token of a rollout.

    Args:
        sampled: [open tokens, branches] rewards.
        is_open: tokens that have branches of their own.
        reward: of the rollout, which is what is left when all of its tokens are kept.
    """
    num_branches = sampled.shape[1]
    rewards = np.full((len(is_open) + 1, num_branches), reward)
    rewards[:-1][is_open] = sampled
    for token in reversed(np.flatnonzero(~is_open)):
        rewards[token] = rewards[token + 1]
    noise = rewards.var(axis=1, ddof=1) / num_branches
    change = np.diff(rewards.mean(axis=1)) ** 2 - noise[1:] - noise[:-1]
    return (rewards[:-1] != reward).mean(axis=1), np.where(is_open, change, 0.0)


def plot(deciles: Sequence[Mapping[str, Any]], path: str) -> None:
    """Flips and change by decile, a row of panels per policy."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    policies = list(dict.fromkeys(row["policy"] for row in deciles))
    figure, grid = pyplot.subplots(
        len(policies), 2, figsize=(9, 3.2 * len(policies)), layout="constrained", squeeze=False
    )
    for policy, axes in zip(policies, grid, strict=True):
        for column, panel in zip(("flips", "change"), axes, strict=True):
            for name in DRAWN:
                rows = [r for r in deciles if (r["policy"], r["score"]) == (policy, name)]
                x = [row["decile"] for row in rows]
                (line,) = panel.plot(x, [row[column] for row in rows], label=name, marker=".")
                low, high = ([row[f"{column} {end}"] for row in rows] for end in ("low", "high"))
                panel.fill_between(x, low, high, color=line.get_color(), alpha=0.12, lw=0)
            panel.set(xlabel="decile of the score", ylabel=column, title=policy)
            panel.spines[["top", "right"]].set_visible(False)
    grid[0, 0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
