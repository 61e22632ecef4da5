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
    num_tokens = sum(each.num_tokens(policy) for each in rollouts)
    shared = sum(each.num_shared(policy) for each in rollouts)
    failed = sum(each.num_tokens(policy) for each in rollouts if each.error)
    samples = sum(len(sample.response_ids) for sample in batch.samples)
    packed = sum(len(row.target_ids_T) for part in rows for row in part)
    left_out = {str(reason): batch.num_filtered_tokens.get(reason, 0) for reason in FilterReason}
    fates = {
        FAILED: failed,
        NO_SIGNAL: num_tokens - failed - samples - sum(left_out.values()),
        NO_WEIGHT: packed,  # until it is known what was trained
        **left_out,
        LOST: 0 if sampled is None else sampled - (num_tokens - shared),
    }
    own = num_tokens - shared if sampled is None else sampled
    tally.add({"tokens/sampled": own, "tokens/shared": shared})
    tally.add({f"tokens/to/{name}": num for name, num in fates.items()})


def account(total: Tally, trained: int, skipped: int) -> TokenAccount:
    """Make the account of what all ranks have counted.

    Args:
        trained: tokens with a weight in optimizer steps that were taken.
        skipped: those in optimizer steps that were not, because something was not finite.
    """
    counted = account_of(total.sums)
    rest = counted.fates.get(NO_WEIGHT, 0) - trained - skipped
    fates = {**counted.fates, TRAINED: trained, SKIPPED: skipped, NO_WEIGHT: rest}
    # Fewer than 0 are lost where an agent has recorded tokens that no engine returned.
    positive = {name: num for name, num in fates.items() if num > 0}
    found = TokenAccount(counted.sampled, counted.shared, 0, positive)
    if found.difference:
        _log.warning("the tokens of this step do not add up: %s", found.text())
    return found


def versions(group: Group, policy: PolicyName) -> Iterator[tuple[int, int]]:
    """Yield (weight version, number of tokens) of the policy in rollouts that finished."""
    for trajectory in group.finished:
        for turn in trajectory.turns:
            if (call := turn.calls.get(policy)) is not None:
                yield from ((span.version, span.end - span.start) for span in call.spans)
