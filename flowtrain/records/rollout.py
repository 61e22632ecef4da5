"""Records of rollouts: turns, trajectories and groups."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flowtrain.records.sampling import Call
from flowtrain.records.task import Task

PolicyName = str
"""Name of a policy in the config. Each policy has its own model, trainer and versions; AgentFlow's
are "planner", "verifier" and "refiner"."""

MAX_TOOL_CALLS = 64
"""Largest number of tool calls per turn."""


@dataclass(frozen=True, slots=True)
class Action:
    """The planner's four fields, in AgentFlow's order."""

    justification: str
    context: str
    sub_goal: str
    tool_name: str
    """Canonical name of a tool, or "No matched tool given: ..."."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool command: its output and, after a failure, an error."""

    output: str = ""
    error: str | None = None
    seconds: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Wall time and CPU time, in seconds, of code that the tool ran, without the wait for a
    process; 0 without code."""

    @property
    def text(self) -> str:
        """The text for the memory and for the policy's next prompt."""
        if self.error is None:
            return self.output
        return "\n".join([*([self.output] if self.output else ()), f"Error: {self.error}"])


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that a response requested."""

    name: str
    arguments: str
    """JSON; "" if AgentFlow's executor wrote no command."""
    result: ToolResult = ToolResult()
    id: str = ""
    """Identifier of the call within its rollout, if the model's messages have one."""
    note: str = ""
    """Note beside the command for the flow's memory, such as "the first of 2 commands"."""


class Verdict(enum.StrEnum):
    """The verifier's decision, v^t."""

    STOP = "STOP"
    CONTINUE = "CONTINUE"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: one pass of planner -> executor -> tool -> verifier, or one response of another
    agent.
    """

    calls: Mapping[PolicyName, Call]
    """Calls by policy, in order; the first one began the turn. AgentFlow's turns always have the
    planner's call, the verifier's if the verifier is a policy, and one call of the refiner if the
    refiner is a policy and the turn has searched. Turns of other agents have one call."""
    action: Action | None
    """Decision of AgentFlow's planner; None for other agents and for a malformed response."""
    verdict: Verdict
    seconds: float
    plan_s: float = 0.0
    """Seconds of the turn spent by the planner."""
    verdict_text: str = ""
    """The verifier's reply; "" if a rule decided."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of the response, in order; at most one for AgentFlow."""
    problem: str = ""
    """Why the response is malformed: unparsable, or an unknown tool; "" if well-formed."""
    evidence: str = ""
    """The tool's output as condensed by a refiner for later turns; "": the output itself."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that were needed to parse the replies, such as "planner/labels"."""

    @property
    def policy(self) -> PolicyName:
        """The policy of the turn's first call: the planner for AgentFlow, else the only policy."""
        return next(iter(self.calls))

    @property
    def call(self) -> Call:
        """The turn's first call; branches can start within it."""
        return self.calls[self.policy]


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The point at which a branch leaves its parent; it shares everything before."""

    parent: int
    """Number of the parent rollout within its group."""
    turn: int
    token: int
    """First token of the turn's response that the branch samples again."""
    score: float
    """The branch score of the token."""
    scorer: str = ""
    """Source of the score: "trainer" for the trainer's pass over the roots. On rollout nodes:
    "sampler" for the sampler's records alone, "behavior" or "reference" for these records and a
    pass of the newest weights or of the reference policy."""
    version: int = 0
    """Weight version of the scored policy: the version of the pass, or else the newest one that
    sampled the roots."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A rollout of one task, its turns and its result."""

    task: Task
    turns: tuple[Turn, ...]
    answer: str
    """The final answer (`final_answer`), which reward rules score."""
    seconds: float
    seed: int
    truncated: str = ""
    """Limit that ended the rollout before STOP: "turns", "time", "prompt", "straggler"; else ""."""
    reward: float | None = None
    """From `reward.low` to `reward.high`, by default 0 to 1; None until `rewards.score`."""
    policy_rewards: Mapping[PolicyName, float] = field(default_factory=dict)
    """Rewards by policy, if a reward function returned one per policy; `reward` is then the first
    policy's. {} if all share one reward."""
    scored_by: str = ""
    """Rule, function or "judge" that decided the reward, with ": " and the reason of a failure."""
    analysis: str = ""
    """The analyst's text about the question, from before the first turn; "" without one."""
    error: str = ""
    """Why a frozen module failed ("generator: ..."); the rollout gets no reward and no training."""
    output: str = ""
    """The full text of the generator or the agent, if longer than the answer."""
    branch: BranchPoint | None = None
    """The branch point; None for a rollout that starts from the question."""
    sub_goals: float | None = None
    """Sum of the weights of the reached sub-goals, in [0, 1]; filled with the reward."""
    hint_turn: int | None = None
    """The first turn that read a hint; None without hints."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted values of the reward functions by name, or the reported parts; else {}."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of single turns, from functions or the environment; () without such rewards."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that were needed to parse the answer, such as "generator/label"."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward reported by the rollout's environment or program; else {}."""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of response tokens in the turns' first calls that are not the parent's."""
        policies = {turn.policy for turn in self.turns}
        return sum(self.num_tokens(policy) - self.num_shared(policy) for policy in policies)

    def num_tokens(self, policy: PolicyName) -> int:
        """Return the number of response tokens of a policy, including the parent's."""
        return _num_tokens(self.turns, policy)

    def num_shared(self, policy: PolicyName) -> int:
        """Return the number of a policy's response tokens that are copied from the parent."""
        if self.branch is None:
            return 0
        start = self.branch.turn
        num_in_turn = 0  # also where a branch has failed before it began
        if start < len(self.turns) and policy == self.turns[start].policy:
            num_in_turn = min(self.branch.token, _num_tokens(self.turns[start : start + 1], policy))
        return _num_tokens(self.turns[:start], policy) + num_in_turn

    def of_policy(self, policy: PolicyName) -> Trajectory:
        """Return the rollout for the trainer of one policy: with the policy's reward and, if the
        rollout has no call of the policy, marked as failed, so that it enters no statistics of its
        group.
        """
        if self.error:
            return self
        if not any(policy in turn.calls for turn in self.turns):
            return replace(self, error=f"{policy}: it was not asked")
        return replace(self, reward=self.policy_rewards.get(policy, self.reward))


def _num_tokens(turns: Sequence[Turn], policy: PolicyName) -> int:
    calls = (turn.calls.get(policy) for turn in turns)
    return sum(len(call.response_ids) for call in calls if call is not None)


@dataclass(frozen=True, slots=True)
class Group:
    """The G trajectories of one task, in which branches come after their parents."""

    index: int
    """Position of the task in the step's batch over all ranks, which determines the mini-batch."""
    trajectories: tuple[Trajectory, ...]

    @property
    def finished(self) -> tuple[Trajectory, ...]:
        """The trajectories that did not fail; these have a reward and enter the algorithms."""
        return tuple(trajectory for trajectory in self.trajectories if not trajectory.error)

    def of_policy(self, policy: PolicyName) -> Group:
        """Return the group for the trainer of one policy; see `Trajectory.of_policy`."""
        return replace(self, trajectories=tuple(t.of_policy(policy) for t in self.trajectories))


@dataclass(frozen=True, slots=True)
class BranchStart:
    """The start of a branch: a finished rollout, and the point in it."""

    parent: Trajectory
    point: BranchPoint
