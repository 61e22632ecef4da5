"""What the ledger itself finds in a group that a node pushes; it takes nobody's word for versions, rewards or lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from flowtrain.dataflow.contract import Refused
from flowtrain.types import Group, Trajectory, Turn, VersionSpan


@dataclass(frozen=True, slots=True)
class Trained:
    """Tokens of one policy in a group."""

    num_tokens: int
    min_version: int
    max_version: int


@dataclass(frozen=True, slots=True)
class Summary:
    rewards: tuple[float, ...]
    """Of the rollouts that finished."""
    num_tokens: int
    """Sampled ones."""
    trained: dict[str, Trained]
    """By policy; without those that have no token to train."""


def summarise(group: Group, task_id: str, group_size: int) -> Summary:
    """Raises Refused when it is not a group of `group_size` rollouts of that task, scored or failed, that can be trained."""
    if len(group.trajectories) != group_size:
        raise Refused(f"the group has {len(group.trajectories)} rollouts, this run's have {group_size}")
    for trajectory in group.trajectories:
        if trajectory.task.id != task_id:
            raise Refused(f"the unit's task is {task_id!r}, a rollout is of {trajectory.task.id!r}")
        if not trajectory.error and (trajectory.reward is None or not isfinite(trajectory.reward)):
            raise Refused(f"a rollout has the reward {trajectory.reward}: it must be scored, or say why it failed")
    trained: dict[str, Trained] = {}
    for trajectory in group.finished:
        for policy, found in _trained(trajectory):
            trained[policy] = _joined(trained[policy], found) if policy in trained else found
    rewards = tuple(float(trajectory.reward or 0) for trajectory in group.finished)
    return Summary(rewards, sum(trajectory.num_sampled_tokens for trajectory in group.trajectories), trained)


def _trained(trajectory: Trajectory) -> Iterator[tuple[str, Trained]]:
    """Of each turn and policy that sampled in it."""
    for turn in trajectory.turns:
        for policy, num_tokens, logprobs, spans in _calls(turn):
            if len(logprobs) != num_tokens or not all(map(isfinite, logprobs)):
                raise Refused(f"a response of {policy} has {num_tokens} tokens and needs as many finite log-probs")
            if num_tokens:
                _check_spans(policy, num_tokens, spans)
                versions = [span.version for span in spans]
                yield policy, Trained(num_tokens, min(versions), max(versions))


def _calls(turn: Turn) -> Iterator[tuple[str, int, tuple[float, ...], tuple[VersionSpan, ...]]]:
    yield "planner", len(turn.response_ids), turn.response_logprobs, turn.spans


def _check_spans(policy: str, num_tokens: int, spans: tuple[VersionSpan, ...]) -> None:
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start or span.version < 0:
            break
        end = span.end
    if end != num_tokens:
        raise Refused(f"a response of {policy} has {num_tokens} tokens, its version spans must cover each of them once")


def _joined(a: Trained, b: Trained) -> Trained:
    return Trained(a.num_tokens + b.num_tokens, min(a.min_version, b.min_version), max(a.max_version, b.max_version))
