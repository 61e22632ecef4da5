"""The account of a step's tokens: what was sampled, and what became of it, exact to the token."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from flowtrain.logging.tally import Tally
from flowtrain.records import FilterReason, Group, PolicyName, TokenAccount, TrainBatch, account_of
from flowtrain.records.token_account import (
    FAILED,
    LOST,
    NO_SIGNAL,
    NO_WEIGHT,
    SKIPPED,
    TRAINED,
)
from flowtrain.trainer.packing import PackedRow

_log = logging.getLogger(__name__)


def count_tokens(
    tally: Tally,
    groups: Sequence[Group],
    batch: TrainBatch,
    rows: Sequence[Sequence[PackedRow]],
    *,
    policy: PolicyName,
    sampled: int | None,
) -> None:
    """Count this rank's tokens of a policy.

    Args:
        groups: this rank's rollouts, `batch` what is trained of them, `rows` what was packed of
            that, by mini-batch.
        sampled: tokens that this rank's engine has returned for these rollouts; None: nodes have
            sampled, and their tokens are taken from the rollouts.
    """
    rollouts = [trajectory for group in groups for trajectory in group.trajectories]
    num_tokens = sum(rollout.num_tokens(policy) for rollout in rollouts)
    num_shared = sum(rollout.num_shared(policy) for rollout in rollouts)
    num_failed = sum(rollout.num_tokens(policy) for rollout in rollouts if rollout.error)
    num_in_samples = sum(len(sample.response_ids) for sample in batch.samples)
    num_packed = sum(len(row.target_ids_T) for minibatch in rows for row in minibatch)
    excluded = {str(reason): batch.num_filtered_tokens.get(reason, 0) for reason in FilterReason}
    fates = {
        FAILED: num_failed,
        NO_SIGNAL: num_tokens - num_failed - num_in_samples - sum(excluded.values()),
        NO_WEIGHT: num_packed,  # until it is known what was trained
        **excluded,
        LOST: 0 if sampled is None else sampled - (num_tokens - num_shared),
    }
    num_sampled = num_tokens - num_shared if sampled is None else sampled
    tally.add({"tokens/sampled": num_sampled, "tokens/shared": num_shared})
    tally.add({f"tokens/to/{name}": num for name, num in fates.items()})


def account(total: Tally, trained: int, skipped: int) -> TokenAccount:
    """Make the account of what all ranks have counted.

    Args:
        trained: tokens with a weight in optimizer steps that were taken.
        skipped: those in optimizer steps that were not, because something was not finite.
    """
    counted = account_of(total.sums)
    num_no_weight = counted.fates.get(NO_WEIGHT, 0) - trained - skipped
    fates = {**counted.fates, TRAINED: trained, SKIPPED: skipped, NO_WEIGHT: num_no_weight}
    # Fewer than 0 are lost where an agent has recorded tokens that no engine returned.
    positive = {name: num for name, num in fates.items() if num > 0}
    token_account = TokenAccount(counted.sampled, counted.shared, 0, positive)
    if token_account.difference:
        _log.warning("the token counts of this step are inconsistent: %s", token_account.text())
    return token_account


def versions(group: Group, policy: PolicyName) -> Iterator[tuple[int, int]]:
    """Yield (weight version, number of tokens) of the policy in rollouts that finished."""
    for trajectory in group.finished:
        for turn in trajectory.turns:
            if (call := turn.calls.get(policy)) is not None:
                yield from ((span.version, span.end - span.start) for span in call.spans)
