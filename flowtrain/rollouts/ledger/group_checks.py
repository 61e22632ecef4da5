"""Checks on a pushed group: a batch is chosen once and served again to a trainer that resumes, so
what training cannot digest must not get in.

The ledger computes versions, rewards and lengths itself and trusts no node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from flowtrain.config import Config
from flowtrain.records import (
    MAX_TOOL_CALLS,
    BranchPoint,
    Call,
    Group,
    PolicyName,
    Task,
    Trajectory,
    Turn,
)
from flowtrain.records.checks import length_problem, logprob_problem, part_problem, token_problem
from flowtrain.rollouts.codec import MAX_GROUP_BYTES
from flowtrain.rollouts.contract import EvalSettings, Refused

_BYTES_PER_TOKEN = 40
"""With its log-prob, its entropy and its text; without those that it was sampled among."""
_BYTES_PER_TURN = 1 << 20
"""Texts of tools and of modules that are no policies."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Tokens of one policy in a group."""

    num_tokens: int
    min_version: int
    max_version: int

    def __add__(self, other: TrainedTokens) -> TrainedTokens:
        return TrainedTokens(
            self.num_tokens + other.num_tokens,
            min(self.min_version, other.min_version),
            max(self.max_version, other.max_version),
        )


NO_TOKENS = TrainedTokens(0, 0, 0)


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """Tokens of one policy in a group, for the account."""

    num_tokens: int
    num_shared: int
    """Of these, those that branches have in common with the rollout they left."""
    num_failed: int
    """Of all, those in rollouts that failed."""

    @classmethod
    def of(cls, group: Group, policy: PolicyName) -> GroupTokens:
        rollouts = group.trajectories
        return cls(
            sum(rollout.num_tokens(policy) for rollout in rollouts),
            sum(rollout.num_shared(policy) for rollout in rollouts),
            sum(rollout.num_tokens(policy) for rollout in rollouts if rollout.error),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Facts that the ledger keeps about a group that passed."""

    task: Task
    rewards: tuple[float, ...]
    """Rewards of the rollouts that finished, as shares of `reward.low` to `reward.high`: so rules
    see them from 0 to 1."""
    num_tokens: int
    """Number of sampled tokens."""
    trained: dict[PolicyName, TrainedTokens]
    """By policy; without the policies that have no token to train."""
    checked: frozenset[str]
    """The policies whose models can read their tokens."""
    tokens: dict[str, GroupTokens]
    """By policy, of all that the flow has."""


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The bounds of what this run can train."""

    config: Config
    models: Mapping[str, tuple[int, int]]
    """By registered policy, the size of its vocabulary and its number of positions."""
    settings: EvalSettings | None = None
    """Settings of the group's evaluation; None for a group to train on."""

    @property
    def _group_size(self) -> int:
        return self.config.rollout.group_size if self.settings is None else self.settings.trials

    @property
    def _max_turns(self) -> int:
        return self.config.agent.max_turns if self.settings is None else self.settings.max_turns

    @property
    def max_bytes(self) -> int:
        """Return the bytes of the largest group that this run can produce, without the compression:
        a bound for what a few bytes of a stranger may grow to.
        """
        num_turns = self._group_size * self._max_turns
        num_positions = sum(positions for _, positions in self.models.values())
        if len(self.models) < len(self.config.policy_names):  # of the others only the form is known
            return MAX_GROUP_BYTES
        options = self.config.rollout
        num_kept = options.num_kept
        tokens = num_positions * (_BYTES_PER_TOKEN + 4 * num_kept)
        return min(MAX_GROUP_BYTES, num_turns * (tokens + _BYTES_PER_TURN))

    @property
    def _reward_bounds(self) -> tuple[float, float]:
        """Return the bounds of rewards; benchmarks have rules, not functions: from 0 to 1."""
        if self.settings is not None and self.settings.is_benchmark:
            return 0.0, 1.0
        return self.config.reward.low, self.config.reward.high

    def check(self, group: Group) -> Summary:
        """Raises Refused unless this is a group of one task, its rollouts scored or failed, that
        can be trained.
        """
        if len(group.trajectories) != self._group_size:
            raise Refused(
                f"the group has {len(group.trajectories)} rollouts, but groups of this run have "
                f"{self._group_size}"
            )
        task = group.trajectories[0].task
        for number, trajectory in enumerate(group.trajectories):
            if trajectory.task != task:
                raise Refused(
                    f"the group has rollouts of both {task.id!r} and {trajectory.task.id!r}"
                )
            if problem := self._problem(number, trajectory) or self._branch_problem(group, number):
                raise Refused(f"rollout {number}: {problem}")
        trained: dict[PolicyName, TrainedTokens] = {}
        for trajectory in group.trajectories:
            for policy, tokens in self._sampled(trajectory):
                if not trajectory.error:
                    trained[policy] = trained[policy] + tokens if policy in trained else tokens
        scored_version = max((t.branch.version for t in group.trajectories if t.branch), default=0)
        chooser = self.config.train.policy  # of branch points, by one of its versions
        if chooser in trained:
            newest = max(trained[chooser].max_version, scored_version)
            trained[chooser] = replace(trained[chooser], max_version=newest)
        return Summary(
            task=task,
            rewards=tuple(
                self.config.reward.share(trajectory.reward or 0) for trajectory in group.finished
            ),
            num_tokens=sum(trajectory.num_sampled_tokens for trajectory in group.trajectories),
            trained=trained,
            checked=frozenset(self.models),
            tokens={name: GroupTokens.of(group, name) for name in self.config.policy_names},
        )

    def _problem(self, number: int, trajectory: Trajectory) -> str:
        """Say what is wrong with the rollout `number` of its group, tokens apart; "" if nothing."""
        turns = trajectory.turns
        if len(turns) > self._max_turns:
            name = "agent.max_turns" if self.settings is None else "max_turns"
            return f"{len(turns)} turns, {name}={self._max_turns}"
        if any(not turn.calls for turn in turns):
            return "a turn has no call of a policy"
        if not trajectory.error:  # a failed rollout has no reward
            low, high = self._reward_bounds
            if trajectory.reward is None or not low <= trajectory.reward <= high:
                return f"the reward is {trajectory.reward}, it must be from {low:g} to {high:g}"
            rewards = trajectory.policy_rewards
            if not all(low <= reward <= high for reward in rewards.values()):
                return f"policy_rewards are {rewards}, they must be from {low:g} to {high:g}"
            if strangers := rewards.keys() - set(self.config.policy_names):
                return f"it has a reward of {strangers.pop()!r}, which is no policy of this run"
            for parts in (trajectory.reward_parts, trajectory.reported):
                if problem := part_problem(parts):
                    return f"the reward: {problem}"
            if problem := _turn_rewards_problem(trajectory):
                return problem
            sub_goals = trajectory.sub_goals
            is_missing = sub_goals is None and self.config.algorithm.scores_sub_goals
            if is_missing or not _is_share(sub_goals or 0.0):
                return f"sub_goals is {sub_goals}, it must be from 0 to 1"
        if any(len(turn.tool_calls) > MAX_TOOL_CALLS for turn in turns):
            return f"a turn has more than {MAX_TOOL_CALLS} tool calls"
        durations = [trajectory.seconds, *(s for turn in turns for s in _seconds(turn))]
        if not all(isfinite(s) and s >= 0 for s in durations):
            return "a duration is negative or not finite"
        return ""

    def _branch_problem(self, group: Group, number: int) -> str:
        """Say why a rollout cannot have left another one where it says; "" when it can."""
        rollout = group.trajectories[number]
        if (branch := rollout.branch) is None:
            return ""
        if not (0 <= branch.parent < number and _shares_tokens(rollout, group, branch)):
            return f"its branch point {branch} is impossible"
        newest = _newest_version(group.trajectories[branch.parent], self.config.train.policy)
        scorer = self.config.appo.node_scorer
        if self.config.algorithm.places_branches and branch.scorer != scorer:
            return (
                f"the scorer {branch.scorer!r} chose its branch point, but this run uses {scorer!r}"
            )
        if branch.version < newest:
            return (
                f"it branches from tokens of version {newest}, but version {branch.version} "
                "scored them"
            )
        return ""

    def _sampled(self, trajectory: Trajectory) -> Iterator[tuple[PolicyName, TrainedTokens]]:
        """Yield the tokens of each turn and policy that sampled in it."""
        for turn in trajectory.turns:
            for policy, call in turn.calls.items():
                if problem := self._call_problem(policy, call):
                    raise Refused(f"a call of {policy} cannot be trained: {problem}")
                if call.response_ids:
                    versions = [span.version for span in call.spans]
                    yield (
                        policy,
                        TrainedTokens(len(call.response_ids), min(versions), max(versions)),
                    )

    def _call_problem(self, policy: str, call: Call) -> str:
        """Say why the call cannot be trained; "" when it can. Of a policy without a trainer only
        the form is known.
        """
        num_tokens = len(call.response_ids)
        if not call.prompt_ids and not num_tokens:
            return ""
        if policy not in self.config.policy_names:
            return "it has tokens but belongs to no policy of this run"
        vocab_size, max_positions = self.models.get(policy, (1 << 31, 1 << 31))
        if len(call.logprobs) != num_tokens or len(call.entropies) not in (0, num_tokens):
            return f"it has {num_tokens} tokens and needs as many log-probs (and entropies, if any)"
        if call.entropies and not all(map(isfinite, call.entropies)):
            return "an entropy is not finite"
        end = 0
        for span in call.spans:
            if span.start != end or span.end <= span.start or span.version < 0:
                break
            end = span.end
        if end != num_tokens:
            return (
                f"it has {num_tokens} tokens, and its version spans must cover each of them "
                "exactly once"
            )
        return (
            length_problem(call, max_positions)
            or token_problem(call, vocab_size)
            or logprob_problem(call.logprobs)
        )


def _shares_tokens(rollout: Trajectory, group: Group, branch: BranchPoint) -> bool:
    """Return whether the tokens up to the branch are the parent's, which they give credit to."""
    turns = group.trajectories[branch.parent].turns
    if not (0 <= branch.turn < min(len(rollout.turns), len(turns))):
        return False
    if not (branch.token >= 0 and isfinite(branch.score)):
        return False
    calls = [[turn.call for turn in t[: branch.turn + 1]] for t in (rollout.turns, turns)]
    pairs = list(zip(*calls, strict=True))
    if any(call.prompt_ids != parent_call.prompt_ids for call, parent_call in pairs):
        return False
    *earlier_calls, (call, parent_call) = pairs
    if branch.token > min(len(call.response_ids), len(parent_call.response_ids)):
        return False
    shared = [(a.response_ids, b.response_ids) for a, b in earlier_calls]
    shared.append((call.response_ids[: branch.token], parent_call.response_ids[: branch.token]))
    return all(a == b for a, b in shared)


def _newest_version(trajectory: Trajectory, policy: PolicyName) -> int:
    """Return the newest version that sampled a token of a policy; 0 without any."""
    calls = (turn.calls.get(policy) for turn in trajectory.turns)
    return max((span.version for call in calls if call for span in call.spans), default=0)


def _is_share(value: float) -> bool:
    return 0 <= value <= 1


def _seconds(turn: Turn) -> tuple[float, ...]:
    results = [call.result for call in turn.tool_calls]
    tool_seconds = [s for result in results for s in (result.seconds, result.wall_s, result.cpu_s)]
    return turn.seconds, turn.plan_s, *tool_seconds


def _turn_rewards_problem(trajectory: Trajectory) -> str:
    rewards, num_turns = trajectory.turn_rewards, len(trajectory.turns)
    if rewards and len(rewards) != num_turns:
        return f"{len(rewards)} turn_rewards for {num_turns} turns"
    return "" if all(map(isfinite, rewards)) else "a turn's reward is not finite"
