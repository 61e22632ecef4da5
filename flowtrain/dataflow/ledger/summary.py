"""What the ledger itself finds in a group that a node pushes; it takes nobody's word for versions,
rewards or lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from flowtrain.dataflow.contract import Refused
from flowtrain.types import Call, Group, PolicyName, Trajectory


@dataclass(frozen=True, slots=True)
class Trained:
    """Tokens of one policy in a group."""

    num_tokens: int
    min_version: int
    max_version: int


@dataclass(frozen=True, slots=True)
class Summary:
    task_id: str
    rewards: tuple[float, ...]
    """Of the rollouts that finished."""
    num_tokens: int
    """Sampled ones."""
    trained: dict[PolicyName, Trained]
    """By policy; without those that have no token to train."""


def summarise(group: Group, group_size: int, policies: Sequence[PolicyName]) -> Summary:
    """Raises Refused when it is not a group of `group_size` rollouts of one task, scored or failed,
    that can be trained.
    """
    if len(group.trajectories) != group_size:
        raise Refused(
            f"the group has {len(group.trajectories)} rollouts, this run's have {group_size}"
        )
    task = group.trajectories[0].task
    for trajectory in group.trajectories:
        if trajectory.task != task:
            raise Refused(f"rollouts of one group are of {task.id!r} and of {trajectory.task.id!r}")
        if any("planner" not in turn.calls for turn in trajectory.turns):
            raise Refused("a turn has no call of the planner")
        if not trajectory.error and (trajectory.reward is None or not isfinite(trajectory.reward)):
            raise Refused(
                f"a rollout has the reward {trajectory.reward}: it must be scored, or say why it "
                "failed"
            )
    trained: dict[PolicyName, Trained] = {}
    for trajectory in group.finished:
        for policy, found in _trained(trajectory, policies):
            trained[policy] = _joined(trained[policy], found) if policy in trained else found
    rewards = tuple(float(trajectory.reward or 0) for trajectory in group.finished)
    return Summary(
        task.id,
        rewards,
        sum(trajectory.num_sampled_tokens for trajectory in group.trajectories),
        trained,
    )


def _trained(
    trajectory: Trajectory, policies: Sequence[PolicyName]
) -> Iterator[tuple[PolicyName, Trained]]:
    """Of each turn and policy that sampled in it."""
    for turn in trajectory.turns:
        for policy in policies:
            call = turn.calls.get(policy)
            if call is None or not call.response_ids:
                continue
            _check(policy, call)
            versions = [span.version for span in call.spans]
            yield policy, Trained(len(call.response_ids), min(versions), max(versions))


def _check(policy: str, call: Call) -> None:
    """A log-prob per token, and spans that cover each token once."""
    num_tokens, end = len(call.response_ids), 0
    if len(call.logprobs) != num_tokens or not all(map(isfinite, call.logprobs)):
        raise Refused(
            f"a response of {policy} has {num_tokens} tokens and needs as many finite log-probs"
        )
    for span in call.spans:
        if span.start != end or span.end <= span.start or span.version < 0:
            break
        end = span.end
    if end != num_tokens:
        raise Refused(
            f"a response of {policy} has {num_tokens} tokens, its version spans must cover each of "
            "them once"
        )


def _joined(a: Trained, b: Trained) -> Trained:
    return Trained(
        a.num_tokens + b.num_tokens,
        min(a.min_version, b.min_version),
        max(a.max_version, b.max_version),
    )
