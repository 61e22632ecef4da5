"""The contract of the dataflow: requests of rollout nodes and trainers, and the answers.

A node joins, leases work items (one task each, for a group of G rollouts), renews its leases while
it works and pushes each finished group. A trainer registers the policy that it trains, asks for the
batch of a step, and reports the weight version it has published and the step of its checkpoint. A
trainer also requests evaluations, whose questions are work items that nodes lease first. `Ledger`
answers from a database, `Client` by asking a service.

Times are durations in seconds on the ledger's clock, so the clocks of nodes may differ. Weight
version v is the policy after v steps: step s trains version s - 1 into version s. Requests are
idempotent: a repeated request gets the same answer and has no further effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowtrain.records import Task

PROTOCOL = 6
"""Version of these messages and of the records in a payload; other versions are rejected."""


class Refused(Exception):
    """The dataflow rejects the request for good: an unknown policy, another model, a malformed
    group.
    """


class NotAllowed(Refused):
    """The token is unknown, revoked, or not valid for this request."""


class Unavailable(Exception):
    """The dataflow did not answer by the deadline."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The state of a policy as last reported by its trainer."""

    version: int
    """The newest version that can be pulled."""
    store: str
    """Folder or URL of the weight store as seen by the trainer; a node may use another address."""
    layout: str
    """Digest of the tokenizer and of the names, shapes and dtypes of the weights."""


@dataclass(frozen=True, slots=True)
class Join:
    """Registers a node. A restart of its process ends the leases of the old one."""

    node: str
    """Name, unique among nodes: letters, digits, ".", "_", "-"; at most 100 of them."""
    life: str
    """Random id of this process."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """By policy, the layout of the node's model, which must be its trainer's."""


@dataclass(frozen=True, slots=True)
class Joined:
    run: str
    """Identity of the run; requests of another run are rejected."""
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
    """Largest number of work items to lease, 1 to 1024."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """By policy, the weight version that the node samples with."""
    busy_s: float = 0.0
    """Seconds since the last request with at least one running rollout."""
    waited_s: float = 0.0
    """Seconds since the last request without a running rollout, for lack of a lease."""
    key: str = ""
    """Random id of this request; a repeated request gets the same leases."""
    sampled: Mapping[str, int] = field(default_factory=dict)
    """By policy, the number of tokens that this process has sampled since it joined, without
    evaluations; {} if not counted."""
    wait_s: float = 0.0
    """Seconds that the answer may wait until there is something to lease; at most 30."""
    heard: Mapping[str, int] = field(default_factory=dict)
    """By policy, the newest version known to the node; a newer one ends the wait."""


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """The sampling and scoring settings of an evaluation."""

    max_turns: int
    temperature: float | None = None
    """Temperature of all policies; None: each policy's own."""
    trials: int = 1
    """Rollouts of each question."""
    is_benchmark: bool = False
    """Score with the tasks' own rules and the judge, instead of reward functions."""


@dataclass(frozen=True, slots=True)
class Lease:
    work_item: int
    """Below 0 for a question of an evaluation."""
    attempt: int
    """Number of this lease of the work item, from 1."""
    task: Task
    seed: int
    """Seed of the work item's rollouts, or of the whole evaluation; equal for every attempt."""
    index: int
    """Position of the task in the order of tasks, or in its evaluation."""
    evaluation: EvalSettings | None = None
    """Settings if the task is a question of an evaluation, whose group has `trials` rollouts."""


WAITING = ("full", "no trainer", "evaluating")
"""Temporary reasons of `Leases`, whose end a request may wait for."""


@dataclass(frozen=True, slots=True)
class Leases:
    leases: tuple[Lease, ...]
    policies: Mapping[str, PolicyState]
    retry_after_s: float = 0.0
    """Seconds until the next request if there are fewer leases than requested."""
    reason: str = ""
    """Why there are fewer: "full" (enough rollouts wait or are under way), "no trainer", "done",
    "evaluating" (training is done, and all that is left of its evaluations is under way),
    "filtered" (the prompt filter admitted none of many tasks)."""


@dataclass(frozen=True, slots=True)
class Renewal:
    node: str
    life: str
    work_items: tuple[tuple[int, int], ...]
    """(work item, attempt) of the node's current leases, if any."""
    sampled: Mapping[str, int] = field(default_factory=dict)
    """As in `LeaseRequest`."""


@dataclass(frozen=True, slots=True)
class Renewed:
    lost: tuple[int, ...]
    """Work items that the node can abandon: leased to another node, or already committed."""
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
    """Returns leases of a node that ends or has failed."""

    node: str
    work_items: tuple[tuple[int, int], ...]
    """(work item, attempt) of each lease."""
    reason: str = ""
    is_failure: bool = False
    """The work failed and may fail elsewhere too; `dataflow.max_attempts` such failures end the
    attempts."""
    sampled: Mapping[str, int] = field(default_factory=dict)
    """As in `LeaseRequest`."""
    life: str = ""
    """The node's process, if it ends; "" if it continues."""


@dataclass(frozen=True, slots=True)
class Disown:
    """A process of a node ends because something has damaged its weights, nobody knows since when.
    What it has pushed must not be trained, and its leases end.
    """

    node: str
    life: str


@dataclass(frozen=True, slots=True)
class Register:
    """Registers a new or resumed trainer."""

    policy: str
    """The policy to train."""
    layout: str
    store: str
    num_groups: int
    """Groups in the batch of a step."""
    max_staleness: int
    """Largest age of a trained token, in versions before the weights that a step trains."""
    vocab_size: int
    """Size of the model's vocabulary; groups with other ids are rejected."""
    max_positions: int
    """Number of positions of the model; groups with longer sequences are rejected."""
    step: int = 0
    """Step of the resumed checkpoint. Batches up to it are consumed; later ones are served again
    unchanged."""
    life: str = ""
    """Random id of this process for its later requests; other processes are rejected until the next
    registration. A repeated or late registration of the same process changes nothing."""
    run: str = ""
    """Identity of the dataflow run of the checkpoint; "" without one."""


@dataclass(frozen=True, slots=True)
class Registered:
    run: str
    step: int
    """Newest step with a batch; batches after the checkpoint are served again."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    policy: str
    step: int
    """Step of the batch, which is chosen once."""
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
    each reason to leave groups out (stale, filtered, surplus, empty, disowned), and tokens per
    group in stale_tokens_mean and assigned_tokens_mean."""
    waiting: str = ""
    """The reason why the batch is not ready, for display."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports the state of a trainer."""

    policy: str
    version: int
    """The newest published version."""
    checkpoint: int
    """Step of the oldest kept checkpoint; groups of older batches are no longer needed."""
    busy_s: float = 0.0
    """Seconds of training since the last report."""
    waited_s: float = 0.0
    """Seconds of waiting for batches since the last report."""
    is_done: bool = False
    """The trainer needs no further batch."""
    evaluated: int = -1
    """Step up to which log and checkpoint cover all evaluations, whose results are no longer
    needed."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Fates of the tokens of the version's batch (`TokenAccount.fates`); {}: unknown."""
    life: str = ""
    """As in `BatchRequest`."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Requests an evaluation. A repeated request, even with other questions, refers to the
    first.
    """

    policy: str
    step: int
    """Lowest weight version of the policy on nodes that get its questions."""
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
    """The group, packed by `codec.pack_group`; empty if every node failed."""


@dataclass(frozen=True, slots=True)
class EvaluationState:
    num_questions: int
    """Number of questions; 0 for an unknown evaluation."""
    num_left: int = 0
    """Number of waiting and running questions."""
    results: tuple[EvalResult, ...] = ()
    """Results in question order, once all are answered; at most 64, starting at `first`."""


@dataclass(frozen=True, slots=True)
class Done:
    """The empty answer."""


class Dataflow(Protocol):
    """The methods of the dataflow, which raise Refused, and Unavailable without an answer."""

    def join(self, request: Join) -> Joined: ...

    def lease(self, request: LeaseRequest) -> Leases: ...

    def renew(self, request: Renewal) -> Renewed: ...

    def push(self, request: Push) -> Pushed: ...

    def release(self, request: Release) -> Done: ...

    def disown(self, request: Disown) -> Done: ...

    def register(self, request: Register) -> Registered: ...

    def batch(self, request: BatchRequest) -> Batch: ...

    def progress(self, request: Progress) -> Done: ...

    def evaluate(self, request: Evaluate) -> Done: ...

    def evaluation(self, request: EvaluationRequest) -> EvaluationState: ...

    def status(self) -> dict[str, Any]:
        """Return a status report of JSON types."""
