"""The account of a step's tokens: what was sampled, and what became of it, exact to the token."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flowtrain.training.tree import PackedRow
from flowtrain.training.world import World
from flowtrain.types import FilterReason, Group, PolicyName, TokenAccount, TrainBatch
from flowtrain.types.token_account import FAILED, LOST, NO_SIGNAL, NO_WEIGHT, TRAINED

_log = logging.getLogger(__name__)


def account(
    groups: Sequence[Group],
    batch: TrainBatch,
    rows: Sequence[Sequence[PackedRow]],
    *,
    policy: PolicyName,
    sampled: int | None,
    world: World,
) -> TokenAccount:
    """Account for the tokens of a policy in a step's rollouts, over all ranks; collective.

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
    trained = sum(int((row.loss_weight_T != 0).sum()) for part in rows for row in part)
    packed = sum(len(row.target_ids_T) for part in rows for row in part)
    left_out = [batch.num_filtered_tokens.get(reason, 0) for reason in FilterReason]
    fates = {
        TRAINED: trained,
        FAILED: failed,
        NO_SIGNAL: num_tokens
        - failed
        - sum(len(s.response_ids) for s in batch.samples)
        - sum(left_out),
        NO_WEIGHT: packed - trained,
        **dict(zip((str(reason) for reason in FilterReason), left_out, strict=True)),
        LOST: 0 if sampled is None else sampled - (num_tokens - shared),
    }
    own = [num_tokens - shared if sampled is None else sampled, shared, *fates.values()]
    every = [int(number) for number in world.sum(own)]
    totals = dict(zip(fates, every[2:], strict=True))
    # Fewer than 0 are lost where an agent has recorded tokens that no engine returned.
    found = TokenAccount(every[0], every[1], 0, {name: n for name, n in totals.items() if n > 0})
    if found.difference:
        _log.warning("the tokens of this step do not add up: %s", found.text())
    return found
