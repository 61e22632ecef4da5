"""Records of rollouts: turns, the trajectories that they make up, and groups of those."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flowtrain.records.sampling import Call
from flowtrain.records.task import Task

PolicyName = str
"""Name of a policy in the config; it has a model, a trainer and versions of its own. AgentFlow's
are "planner", "verifier" and "refiner"."""

MAX_TOOL_CALLS = 64
"""Calls of tools that a turn may hold."""


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
    """The result of one tool command: an output, or an error, behind what there was before it."""

    output: str = ""
    error: str | None = None
    seconds: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of code that the tool ran: without the wait for a process, and on a CPU; 0 for no code."""

    @property
    def text(self) -> str:
        """The text that the memory keeps and the planner reads next."""
        if self.error is None:
            return self.output
        return "\n".join([*([self.output] if self.output else ()), f"Error: {self.error}"])


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that a response asked for."""

    name: str
    arguments: str
    """JSON; "" where AgentFlow's executor wrote no command."""
    result: ToolResult = ToolResult()
    id: str = ""
    """Names the call within its rollout, where the messages to the model do."""
    note: str = ""
    """Text that the flow reads beside the command, "the first of 2 commands"."""


class Verdict(enum.StrEnum):
    """The verifier's decision, v^t."""

    STOP = "STOP"
    CONTINUE = "CONTINUE"


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass of planner -> executor -> tool -> verifier, or one response of another agent."""

    calls: Mapping[PolicyName, Call]
    """By policy, the one first that the turn began with. AgentFlow's have the planner's call,
    always; the verifier's where that is a policy, and the refiner's where it is one and the turn
    has searched: one call, about all that the turn's command found. Those of other agents have
    one."""
    action: Action | None
    """Decision of AgentFlow's planner; None of other agents, and of a malformed response."""
    verdict: Verdict
    seconds: float
    plan_s: float = 0.0
    """Seconds of the turn that the planner took."""
    verdict_text: str = ""
    """The verifier's reply; "" where a rule decided."""
    tool_calls: tuple[ToolCall, ...] = ()
    """All that the response asked for, in its order; AgentFlow's asks for one."""
    problem: str = ""
    """Why the response is malformed: nothing could be read, or no tool is called so; else ""."""
    evidence: str = ""
    """Tool's output as a refiner shortened it, which the flow goes on with; "": as it is."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that it took to read the replies, as "planner/labels"."""

    @property
    def policy(self) -> PolicyName:
        """The policy that the turn began with: AgentFlow's planner, the only one elsewhere."""
        return next(iter(self.calls))

    @property
    def call(self) -> Call:
        """The call that the turn began with, in which a branch may leave."""
        return self.calls[self.policy]


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The point at which a rollout left its parent; everything before it is the parent's."""

    parent: int
    """Number of the rollout it left, within its group."""
    turn: int
    token: int
    """First token of that turn's response that was sampled again."""
    score: float
    """The score that the place was chosen by."""
    scorer: str = ""
    """What the score was made of: "trainer", its pass over the roots; on rollout nodes "sampler",
    what it recorded, alone; "behavior" or "reference", that beside a pass of the newest weights or
    of the reference policy."""
    version: int = 0
    """Weight version of the policy that was scored: that of the pass, or the newest that sampled
    the roots."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of one task."""

    task: Task
    turns: tuple[Turn, ...]
    answer: str
    """The final answer (`final_answer`), which is scored."""
    seconds: float
    seed: int
    truncated: str = ""
    """Why it ended before STOP, if it did: "turns", "time", "prompt" (too long), "straggler"."""
    reward: float | None = None
    """From `reward.low` to `reward.high`, by default 0 to 1; None until `rewards.score`."""
    policy_rewards: Mapping[PolicyName, float] = field(default_factory=dict)
    """Rewards of the policies, where a function gave each its own: `reward` is then the first
    one's; {} where all have the one."""
    scored_by: str = ""
    """Rule, function or "judge" that decided on the reward; ": " and why, where it failed."""
    analysis: str = ""
    """The analyst's text about the question, written before the first turn; "" without one."""
    error: str = ""
    """Why a frozen module failed ("generator: ..."): it gets no reward and is not trained."""
    output: str = ""
    """All that the generator or the agent wrote, where that is more than the answer."""
    branch: BranchPoint | None = None
    """None for a rollout that began with the question."""
    sub_goals: float | None = None
    """Importance of the sub-goals that were reached, in [0, 1]; filled with the reward."""
    hint_turn: int | None = None
    """The turn that read a hint first; None for a rollout without."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Values of reward functions, by name and before weights, or what was reported; else {}."""
    turn_rewards: tuple[float, ...] = ()
    """Shares of the reward that turns earned, from functions or the environment; () where only the
    whole rollout has one."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that it took to read the answer, as "generator/label"."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward that the rollout's environment or program reported; {} where none did."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of calls that turns began with, without those of the rollout's parent."""
        policies = {turn.policy for turn in self.turns}
        return sum(self.num_tokens(policy) - self.num_shared(policy) for policy in policies)

    def num_tokens(self, policy: PolicyName) -> int:
        """Count the response tokens of a policy, a parent's among them."""
        return _num_tokens(self.turns, policy)

    def num_shared(self, policy: PolicyName) -> int:
        """Count the response tokens of a policy that were sampled for the rollout it branched
        from.
        """
        if self.branch is None:
            return 0
        start = self.branch.turn
        num_in_turn = 0  # also where a branch has failed before it began
        if start < len(self.turns) and policy == self.turns[start].policy:
            num_in_turn = min(self.branch.token, _num_tokens(self.turns[start : start + 1], policy))
        return _num_tokens(self.turns[:start], policy) + num_in_turn

    def of_policy(self, policy: PolicyName) -> Trajectory:
        """Return the rollout as the trainer of a policy sees it: with that policy's reward, and as
        a failed one where it was not asked, so that it counts in no statistics of its group.
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
    """The G trajectories of one task; branches come after the rollouts they left."""

    index: int
    """Place of the task within the step's batch over all ranks; decides the mini-batch."""
    trajectories: tuple[Trajectory, ...]

    @property
    def finished(self) -> tuple[Trajectory, ...]:
        """The trajectories that did not fail: these have a reward, and algorithms read them."""
        return tuple(trajectory for trajectory in self.trajectories if not trajectory.error)

    def of_policy(self, policy: PolicyName) -> Group:
        """Return the group as the trainer of a policy sees it; see `Trajectory.of_policy`."""
        return replace(self, trajectories=tuple(t.of_policy(policy) for t in self.trajectories))


@dataclass(frozen=True, slots=True)
class BranchStart:
    """The point within a finished rollout at which a branch begins."""

    parent: Trajectory
    point: BranchPoint
