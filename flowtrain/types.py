"""The records, in the order in which data flows: Task -> Turn -> Trajectory -> Group -> Sample.

All are frozen; a later stage that knows more makes a new record with `dataclasses.replace`. Token
ids are plain ints, log-probabilities natural logs, times seconds. Only the standard library is
imported here.
"""

from __future__ import annotations

import enum
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    Int32s = array[int]
else:
    # Python 3.11 has no array[int] at run time, where decoders read the annotations of records
    Int32s = array

PolicyName = Literal["planner", "verifier"]
"""Modules of the flow that can be trained, each with its own model, trainer and versions."""


class UserError(ValueError):
    """A user's mistake. The command line prints its one line and exits with code 2."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One turn of a perfect planner."""

    sub_goal: str
    """The goal of the turn, e.g. "capital of Chad", or the expression to compute."""
    tool_name: str
    """Canonical name of the tool that finds it."""


@dataclass(frozen=True, slots=True)
class SubGoal:
    """A finding on the way, e.g. SubGoal(("Chad",), 0.5, "country of N'Djamena")."""

    names: tuple[str, ...]
    """Its accepted names."""
    weight: float
    """Importance; those of a task sum to 1."""
    query: str = ""
    """How to look for it, for a hint; "" where nobody wrote one."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question, e.g. Task("t-1", "Capital of Chad?", ("N'Djamena",), "lookup", 1)."""

    id: str
    """Unique within a run; trajectories, seeds and resume refer to it."""
    question: str
    """The text that the planner reads."""
    answers: tuple[str, ...]
    """Accepted answers; for "gameof24" the four numbers, as any right expression counts."""
    kind: str = ""
    """A label to group results by ("lookup", "chain", "sum", ...)."""
    num_turns: int = 1
    """Turns a perfect planner needs; 0 where nobody knows."""
    scorer: str = "exact"
    """Name of the rule in `flowtrain.rewards` that scores an answer."""
    plan: tuple[PlanStep, ...] = ()
    """Steps of a perfect planner, for the scripted expert; the policy never sees them."""
    choices: tuple[str, ...] = ()
    """Options of a multiple-choice question, A first; () where the answer is free."""
    entry: str = ""
    """What a verifier of reasoning-gym reads, as a Python literal; the policy never sees it."""
    sub_goals: tuple[SubGoal, ...] = ()
    """Rewarded findings (InfoFlow), in the order of need; the policy never sees them."""
    columns: str = ""
    """The row's other columns, as JSON; for a reward function alone."""

    @property
    def extra(self) -> dict[str, Any]:
        """The row's other columns by name; parsed at every call."""
        return dict(json.loads(self.columns)) if self.columns else {}


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_new_tokens` was reached."""
    DEADLINE = "deadline"
    """The request ran out of time; what was sampled so far is returned."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; the log-probabilities are then those at temperature 1."""
    top_k: int = 0
    """Sample from so many most likely tokens, log-probs among them; 0, and greedy: from all."""
    top_p: float = 1.0
    """Sample from the fewest of those that sum to this; below 1 it needs a top_k."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends once the decoded response contains one; its tokens are kept."""
    ignore_end: bool = False
    """Go on after an end-of-sequence token, for measurements of a fixed length."""
    seed: int = 0
    """The seed of this request alone: what shares its batch changes no more than roundings."""
    deadline_s: float = 60.0
    """Seconds from the call until the engine must answer."""

    @property
    def is_truncated(self) -> bool:
        """Some tokens cannot be sampled."""
        return self.top_k > 0 and self.temperature > 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled by weights `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The ids that top-k and top-p left to choose from, token after token of a response."""

    ids: Int32s
    """int32; those of one token differ from each other."""
    counts: Int32s
    """int32, how many of the ids belong to each token of the response."""

    @classmethod
    def of(cls, sets: Iterable[Sequence[int]]) -> SamplingMask:
        """Example: SamplingMask.of([(5, 9), (2,)]) has the ids 5, 9, 2 and the counts 2, 1."""
        ids, counts = array("i"), array("i")
        for each in sets:
            ids.extend(each)
            counts.append(len(each))
        return cls(ids, counts)

    def first(self, num_tokens: int) -> SamplingMask:
        """The mask of the first tokens."""
        counts = self.counts[:num_tokens]
        return SamplingMask(self.ids[: sum(counts)], counts)

    def __add__(self, later: SamplingMask) -> SamplingMask:
        return SamplingMask(self.ids + later.ids, self.counts + later.counts)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer of an engine to one prompt."""

    ids: tuple[int, ...]
    """Sampled ids, end-of-sequence included; () only when the deadline struck first."""
    logprobs: tuple[float, ...]
    """One per id, at the sampler's temperature and within the sampling mask."""
    spans: tuple[VersionSpan, ...]
    """Which weights sampled which ids; they cover [0, len(ids))."""
    finish_reason: FinishReason
    sampling_mask: SamplingMask | None = None
    """The ids that each id was sampled from, itself included; None: all ids."""
    entropies: tuple[float, ...] = ()
    """One per id, in nats, over all tokens; () where the engine does not tell."""


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
    """The result of one tool command: an output, or an error that says why there is none."""

    output: str = ""
    error: str | None = None
    seconds: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of code that the tool ran: without the wait for a process, and on a CPU; 0 for no code."""

    @property
    def text(self) -> str:
        """The text that the memory keeps and the planner reads next."""
        return self.output if self.error is None else f"Error: {self.error}"


class Verdict(enum.StrEnum):
    """The verifier's decision, v^t."""

    STOP = "STOP"
    CONTINUE = "CONTINUE"


@dataclass(frozen=True, slots=True)
class TurnTraining:
    """Statistics of a trained call, for the log."""

    advantage: float
    """Mean over the response's tokens."""
    minibatch: int
    """Its optimizer step in the batch: so many steps older were the sampler's weights."""
    logprobs: tuple[float, ...]
    """The trainer's at that step, one per token; NaN where a token did not count."""


@dataclass(frozen=True, slots=True)
class Call:
    """Tokens that one module read and sampled in one turn."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Sampled and trained; () for a module that is no policy, and where no token came in time."""
    logprobs: tuple[float, ...]
    """The sampler's, one per response token."""
    spans: tuple[VersionSpan, ...]
    """The versions of this policy that sampled the response."""
    finish_reason: FinishReason
    text: str = ""
    """The response decoded for people; training never reads it."""
    sampling_mask: SamplingMask | None = None
    """The engine's, as for `Completion`."""
    entropies: tuple[float, ...] = ()
    """The engine's; a branch has none of the turn that it leaves."""
    prompt_text: str = ""
    """The prompt of a module without tokens of its own, whose ids are empty; "" otherwise."""
    training: TurnTraining | None = None
    """Filled by `token_scores.with_training_stats`; None for a call that was not trained."""

    @classmethod
    def of(cls, prompt_ids: tuple[int, ...], completion: Completion, text: str) -> Call:
        """The call of an engine with its completion."""
        ids, logprobs, spans = completion.ids, completion.logprobs, completion.spans
        reason, mask = completion.finish_reason, completion.sampling_mask
        return cls(prompt_ids, ids, logprobs, spans, reason, text, mask, completion.entropies)


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass of planner -> executor -> tool -> verifier, or the one response of a single turn."""

    calls: Mapping[PolicyName, Call]
    """The planner's call, always; the verifier's where that is a policy."""
    action: Action | None
    """None for an answer and, with an error as `result`, for a malformed response."""
    command: str
    """The command that the executor ran, or why it ran nothing."""
    result: ToolResult
    verdict: Verdict
    seconds: float
    plan_s: float = 0.0
    """Seconds of the turn that the planner took."""
    verdict_text: str = ""
    """The verifier's reply; "" where a rule decided."""
    retrieved: str = ""
    """The tool's output, where a refiner made the result of it; else ""."""


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


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of one task."""

    task: Task
    turns: tuple[Turn, ...]
    answer: str
    """The generator's answer."""
    seconds: float
    seed: int
    truncated: str = ""
    """Why it ended before STOP, if it did: "turns", "time", "prompt" (too long), "straggler"."""
    reward: float | None = None
    """From `reward.low` to `reward.high`, by default 0 to 1; None until `rewards.score`."""
    scored_by: str = ""
    """Which rule, function or "judge" decided on the reward; ": " and why, where it failed."""
    analysis: str = ""
    """The analyst's text about the question, written before the first turn; "" without one."""
    error: str = ""
    """Why a frozen module failed ("generator: ..."): it gets no reward and is not trained."""
    output: str = ""
    """All that the generator wrote, the answer among it; "" where a rule answered."""
    branch: BranchPoint | None = None
    """None for a rollout that began with the question."""
    sub_goals: float | None = None
    """Importance of the sub-goals that were reached, in [0, 1]; filled with the reward."""
    hint_turn: int | None = None
    """The turn that read a hint first; None for a rollout without."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What reward functions gave, by name and before weights; {} without such functions."""

    @property
    def num_sampled_tokens(self) -> int:
        """Planner tokens that were sampled for this rollout, without those of its parent."""
        first, skipped = (0, 0) if self.branch is None else (self.branch.turn, self.branch.token)
        return sum(len(turn.calls["planner"].response_ids) for turn in self.turns[first:]) - skipped


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


class SampleId(NamedTuple):
    """The call that a sample was made of; within a batch it names the sample."""

    group: int
    """`Group.index`"""
    trajectory: int
    """Number of the trajectory within its group."""
    turn: int
    """Number of the turn within its trajectory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trained sequence: a call's tokens with what the algorithm decided about them."""

    prompt_ids: tuple[int, ...]
    """At least one token."""
    response_ids: tuple[int, ...]
    """At least one token; these are the trained ones."""
    logprobs: tuple[float, ...]
    """The sampler's, one per response token."""
    advantages: tuple[float, ...]
    """One per response token."""
    loss_weights: tuple[float, ...]
    """One per response token, before division by their sum over the global mini-batch."""
    minibatch: int = 0
    """Which optimizer step of the batch it belongs to."""
    sample_id: SampleId | None = None
    """None for a sample whose log-probs nobody asks for, as in imitation."""
    sampling_mask: SamplingMask | None = None
    """The ids that log-probs are taken among, the trainer's as the sampler's; None: all ids."""
    old_logprobs: tuple[float, ...] = ()
    """The trainer's own, where it has scored the sample before; else ()."""
    ref_logprobs: tuple[float, ...] = ()
    """The reference policy's, likewise."""


class FilterReason(enum.StrEnum):
    """Why a sample is left out of a batch."""

    EMPTY = "empty"
    """It has no response token."""
    TOO_LONG = "too_long"
    """It has more tokens than the model has positions."""
    ADVANTAGE = "advantage"
    """An advantage is not finite."""
    LOGPROB = "logprob"
    """The sampler's log-prob of a trained token is none that sampling gives."""
    TOKEN = "token"
    """A token is none of the model's, or outside of its mask; or the prompt is empty."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples that an algorithm makes of a step's groups, and counts of what it left out."""

    samples: tuple[Sample, ...]
    num_groups_dropped: int = 0
    """Groups without a signal: all rollouts failed, or in mode "paper" all have one reward."""
    num_filtered: Mapping[FilterReason, int] = field(default_factory=dict)
    """Samples that could not be trained."""
