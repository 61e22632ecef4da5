"""The requests of rollout nodes and trainers to the dataflow, and its answers.

A node joins, leases work items (one task each, from which it makes a group of G rollouts), renews
its leases while it works and pushes each finished group. A trainer registers the policy that it
trains, asks for the batch of a step, and reports the weight version it has published and the step
of its checkpoint. A trainer also requests evaluations, whose questions are work items that nodes
lease first. `Ledger` answers from a database, `Client` by asking a service.

Times are durations in seconds on the ledger's clock, so the clocks of nodes may differ. Weight
version v is the policy after v steps: step s trains version s - 1 into version s. Every request may
be sent again: the answer is the same and nothing happens twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowtrain.records import Task

PROTOCOL = 6
"""Version of these messages and of the records in a payload; others are refused."""


class Refused(Exception):
    """The request is refused and asking again will not change that: an unknown policy, another
    model, a malformed group.
    """


class NotAllowed(Refused):
    """The token is unknown, was revoked, or is not for this request."""


class Unavailable(Exception):
    """The dataflow did not answer by the deadline."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """A policy as its trainer last described it."""

    version: int
    """The newest version that can be pulled."""
    store: str
    """Folder or URL of the weight store, as the trainer sees it; a node may know a better way."""
    layout: str
    """Digest of the tokenizer and of the names, shapes and dtypes of the weights."""


@dataclass(frozen=True, slots=True)
class Join:
    """A node takes part. When its process has been restarted, the leases of the old one end."""

    node: str
    """Name, unique among nodes: letters, digits, ".", "_", "-"; at most 100 of them."""
    life: str
    """Random id of this process."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """By policy, the layout of the node's model, which must be its trainer's."""


@dataclass(frozen=True, slots=True)
class Joined:
    run: str
    """Identity of the run; requests of another one are refused."""
    config: str
    """The run's options as TOML."""
    group_size: int
    lease_s: float
    """Duration of a lease, from its start and each renewal."""
    policies: Mapping[str, PolicyState]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    node: str
    life: str
    num: int
    """Number of work items wanted, 1 to 1024; fewer may come."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """By policy, the weight version that the node samples with."""
    busy_s: float = 0.0
    """Seconds since the last request in which at least one rollout was under way."""
    waited_s: float = 0.0
    """Seconds since the last request in which none was, because the node had no lease."""
    key: str = ""
    """Random id of this request; sent again, it gets the same leases."""
    sampled: Mapping[str, int] = field(default_factory=dict)
    """By policy, the tokens that this process has sampled since it joined, without those of
    evaluations; a process that does not count sends none."""
    wait_s: float = 0.0
    """Seconds that the answer may wait until there is something to lease; at most 30."""
    heard: Mapping[str, int] = field(default_factory=dict)
    """By policy, the newest version that the node has heard of; news end the wait."""


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """How an evaluation asks its questions."""

    max_turns: int
    temperature: float | None = None
    """Of all policies; None: each has its own."""
    trials: int = 1
    """Rollouts of each question."""
    is_benchmark: bool = False
    """Rewards come from the tasks' own rules and the judge, in place of functions."""


@dataclass(frozen=True, slots=True)
class Lease:
    work_item: int
    """Below 0 for a question of an evaluation."""
    attempt: int
    """Number of this lease of the work item, from 1."""
    task: Task
    seed: int
    """Seed of the work item's rollouts, or of all of the evaluation; the same for every attempt."""
    index: int
    """Position of the task in the order of tasks, or in its evaluation."""
    evaluation: EvalSettings | None = None
    """The task is a question of an evaluation: the group has `trials` rollouts, made and scored
    this way."""


WAITING = ("full", "no trainer", "evaluating")
"""Reasons of `Leases` that may pass at any moment, so that a request may wait for that."""


@dataclass(frozen=True, slots=True)
class Leases:
    leases: tuple[Lease, ...]
    policies: Mapping[str, PolicyState]
    retry_after_s: float = 0.0
    """When to ask again if there are fewer leases than wanted."""
    reason: str = ""
    """Why there are fewer: "full" (enough rollouts wait or are under way), "no trainer", "done",
    "evaluating" (training is done, and all that is left of its evaluations is under way),
    "filtered" (the prompt filter admitted none of many tasks)."""


@dataclass(frozen=True, slots=True)
class Renewal:
    node: str
    life: str
    work_items: tuple[tuple[int, int], ...]
    """(work item, attempt) of the leases that the node still works on; it may have none."""
    sampled: Mapping[str, int] = field(default_factory=dict)
    """As in `LeaseRequest`."""


@dataclass(frozen=True, slots=True)
class Renewed:
    lost: tuple[int, ...]
    """Work items that the node need not finish: now leased to another node, or committed."""
    policies: Mapping[str, PolicyState]


@dataclass(frozen=True, slots=True)
class Push:
    node: str
    work_item: int
    attempt: int
    payload: bytes
    """The group, packed by `codec.pack_group`; its trajectories are scored."""
    sampled: Mapping[str, int] = field(default_factory=dict)
    """As in `LeaseRequest`; the tokens of this group are among them."""


@dataclass(frozen=True, slots=True)
class Pushed:
    status: str
    """"committed", or "duplicate" if the work item was committed before, by any node."""


@dataclass(frozen=True, slots=True)
class Release:
    """A node gives leases back, because it ends or could not do the work."""

    node: str
    work_items: tuple[tuple[int, int], ...]
    """(work item, attempt) of each lease."""
    reason: str = ""
    is_failure: bool = False
    """The work could not be done, and may fail elsewhere too; after `dataflow.max_attempts` of
    these nobody tries again."""
    sampled: Mapping[str, int] = field(default_factory=dict)
    """As in `LeaseRequest`."""
    life: str = ""
    """The node's process that ends with this; "": it goes on."""


@dataclass(frozen=True, slots=True)
class Register:
    """A trainer begins or resumes."""

    policy: str
    """The policy that it trains."""
    layout: str
    store: str
    num_groups: int
    """Groups in the batch of a step."""
    max_staleness: int
    """Versions that a trained token may be older than the weights that a step trains."""
    vocab_size: int
    """Tokens that the model knows: groups with other ids are refused."""
    max_positions: int
    """Tokens of a sequence that the model can read; groups with longer ones are refused."""
    step: int = 0
    """Step of the checkpoint from which training resumes. Batches up to it are consumed for good;
    later ones come again unchanged."""
    life: str = ""
    """Random id of this process, which its later requests name: until the next registration all
    others are refused. A repeated or late registration of the same process changes nothing."""
    run: str = ""
    """Identity of the run that the checkpoint was trained from; "": there is none."""


@dataclass(frozen=True, slots=True)
class Registered:
    run: str
    step: int
    """Newest step whose batch exists; the batches after the checkpoint will come again."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    policy: str
    step: int
    """The batch of a step is chosen once."""
    rank: int = 0
    """The answer holds the groups whose position modulo `num_ranks` is `rank`."""
    num_ranks: int = 1
    wait_s: float = 0.0
    """Seconds that the answer may wait for the batch to fill; at most 30."""
    life: str = ""
    """As in `Register`."""


@dataclass(frozen=True, slots=True)
class AssignedGroup:
    """A group in the batch of a step."""

    position: int
    """Position within the batch."""
    work_item: int
    payload: bytes
    is_replay: bool
    """The group was trained before."""


@dataclass(frozen=True, slots=True)
class Batch:
    groups: tuple[AssignedGroup, ...]
    """Empty while `num_missing` is not 0."""
    num_missing: int
    """Groups that the batch still lacks."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """For the log: staleness_mean, staleness_max, num_buffered, num_leased, num_replayed, num_ and
    each reason to leave groups out (stale, filtered, surplus, empty), and tokens per
    group in stale_tokens_mean and assigned_tokens_mean."""
    waiting: str = ""
    """The reason why the batch is not ready, for display."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A trainer reports its state."""

    policy: str
    version: int
    """The newest published version."""
    checkpoint: int
    """Step of the oldest checkpoint that it keeps: groups of older batches are not needed."""
    busy_s: float = 0.0
    """Seconds since the last report in which it trained."""
    waited_s: float = 0.0
    """Seconds since the last report in which it waited for a batch."""
    is_done: bool = False
    """The trainer needs no further batch."""
    evaluated: int = -1
    """Its log has the results of all evaluations up to this step, and its checkpoint is not older
    than that: they are no longer needed."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Fates of the tokens of the version's batch (`TokenAccount.fates`); {}: unknown."""
    life: str = ""
    """As in `BatchRequest`."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A trainer asks for an evaluation. Asked again, even with other questions, it is the first."""

    policy: str
    step: int
    """No question is leased to a node whose weights of the policy are older than this version."""
    name: str
    """Name of the questions, which with policy and step identifies the evaluation."""
    settings: EvalSettings
    seed: int
    """Rollout `number` of the question at `index` has the seed (seed, index, task id, number)."""
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    policy: str
    step: int
    name: str
    rank: int = 0
    """The answer holds the results whose index modulo `num_ranks` is `rank`."""
    num_ranks: int = 1
    first: int = 0
    """Lowest index in the answer."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    index: int
    """Position of the question in its evaluation."""
    payload: bytes
    """The group, packed by `codec.pack_group`; empty where no node could make it."""


@dataclass(frozen=True, slots=True)
class EvaluationState:
    num_questions: int
    """0: nobody has asked for this evaluation."""
    num_left: int = 0
    """Questions that wait or are under way."""
    results: tuple[EvalResult, ...] = ()
    """In the order of the questions, once none is left; at most 64, the others begin behind the
    last of them."""


@dataclass(frozen=True, slots=True)
class Done:
    """The empty answer."""


class Dataflow(Protocol):
    """All methods raise Refused, and Unavailable when there is no answer."""

    def join(self, request: Join) -> Joined: ...

    def lease(self, request: LeaseRequest) -> Leases: ...

    def renew(self, request: Renewal) -> Renewed: ...

    def push(self, request: Push) -> Pushed: ...

    def release(self, request: Release) -> Done: ...

    def register(self, request: Register) -> Registered: ...

    def batch(self, request: BatchRequest) -> Batch: ...

    def progress(self, request: Progress) -> Done: ...

    def evaluate(self, request: Evaluate) -> Done: ...

    def evaluation(self, request: EvaluationRequest) -> EvaluationState: ...

    def status(self) -> dict[str, Any]:
        """Return a report for people and programs, as JSON types."""
