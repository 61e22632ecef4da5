"""flowkernels' loss in a bare training loop:  python examples/bare_loop.py [--steps N] [--seed N]

A policy learns to count down: after the prompt 4 come 3 2 1 0, and a 0 ends the response. The
reward is the share of tokens that are one below the token before them. Eight responses to each
prompt form a group, and four optimizer steps are taken on every batch, so that ratios leave 1 and
the clip acts. Nothing is padded for the loss: the tokens of all responses lie one after the other,
as T rows of logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from flowkernels import LossSpec, logprobs, policy_loss, token_weights
from torch import Tensor, nn

VOCAB, GROUP, MAX_LENGTH, EPOCHS = 10, 8, 12, 4
SPEC = LossSpec(clip_low=0.2, clip_high=0.28, entropy_coef=0.003)


def new_policy() -> nn.Module:
    """Logits of the next token from the one before: [T] -> [T, V]."""
    return nn.Sequential(
        nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, VOCAB)
    )


@torch.no_grad()
def sample(policy: nn.Module, prompt_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the token before, the token) for all T tokens of the responses, and the bounds [S + 1] of
    the responses among them.
    """
    columns = [prompt_S]
    for _ in range(MAX_LENGTH):
        columns.append(policy(columns[-1]).softmax(-1).multinomial(1)[:, 0])
    tokens_SL = torch.stack(columns, dim=1)
    is_response_SL = (tokens_SL[:, :-1] != 0).cumprod(1).bool()  # up to the first 0, and with it
    bounds_S1 = nn.functional.pad(is_response_SL.sum(1).cumsum(0), (1, 0))
    return tokens_SL[:, :-1][is_response_SL], tokens_SL[:, 1:][is_response_SL], bounds_S1


def train(num_steps: int, seed: int) -> list[dict[str, float]]:
    """Per step: the mean reward of its responses, and the entropy and the clipped share of its
    tokens over its optimizer steps.
    """
    torch.manual_seed(seed)
    policy = new_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=4e-3)
    history = []
    for step in range(1, num_steps + 1):
        before_T, target_T, bounds_S1 = sample(
            policy, torch.arange(1, VOCAB).repeat_interleave(GROUP)
        )
        lengths_S = bounds_S1.diff()
        is_right_T = (target_T == before_T - 1).float()
        reward_S = torch.stack(
            [is_right.mean() for is_right in is_right_T.split(lengths_S.tolist())]
        )

        groups = reward_S.view(-1, GROUP)
        advantage_S = (
            (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        ).flatten()
        advantage_T = advantage_S.repeat_interleave(lengths_S)
        weight_T = token_weights(bounds_S1, len(target_T), "token")
        with torch.no_grad():
            old_T = logprobs(policy(before_T), target_T).logprob_T

        stats = []
        for _ in range(EPOCHS):
            out = policy_loss(
                policy(before_T),
                target_T,
                spec=SPEC,
                advantage_T=advantage_T,
                weight_T=weight_T,
                old_logprob_T=old_T,
                inplace=True,
            )
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            stats.append(out.stats)
        sums = {
            name: sum(s[f"{name}_sum"].item() for s in stats)
            for name in ("entropy", "clipped_low", "clipped_high")
        }
        numbers = {
            "reward": reward_S.mean().item(),
            **{name: x / (EPOCHS * len(target_T)) for name, x in sums.items()},
        }
        history.append({"step": step, **numbers})
        print(f"step {step:3d}", *(f"{name} {x:.3f}" for name, x in numbers.items()), sep="  ")
    return history


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=30, help="batches to sample and train on (default: 30)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the initial weights and of the sampling (default: 0)",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # more only slow down a model this small
    return train(args.steps, args.seed)


if __name__ == "__main__":
    main()
