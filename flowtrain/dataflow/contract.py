"""What rollout nodes and trainers ask of the dataflow, and what it answers.

A node joins, leases units (one task each, of which it makes a group of G rollouts), renews its
leases while it works and pushes each group once it is done. A trainer registers the policy it
trains, asks for the batch of a step, and says which weight version it has published and up to which
step its checkpoint reaches. `Ledger` answers out of a database, `Client` by asking a service that
has one.

Times are durations in seconds of the ledger's clock, so clocks of nodes may differ. Weight version
v is the policy after v steps: step s trains version s - 1 into version s. Every request may be sent
again: the answer is the same and nothing happens twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowtrain.types import Task

PROTOCOL = 2
"""Version of these messages and of the records in a payload; a node or trainer with another one is
refused."""


class Refused(Exception):
    """What was asked cannot be had, and asking again will not change it: an unknown policy, another
    model, a malformed group.
    """


def check_protocol(peer: str, protocol: int) -> None:
    """Raises Refused when a peer speaks another version of the messages."""
    if protocol != PROTOCOL:
        raise Refused(
            f"the {peer} speaks protocol {protocol}, this service {PROTOCOL}: install the same "
            "flowtrain on both"
        )


class Unavailable(Exception):
    """The dataflow did not answer by the deadline."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """A policy as its trainer last described it."""

    version: int
    """The newest that can be pulled."""
    store: str
    """Where: folder or URL of the weight store, as the trainer sees it; a node may know a better
    way."""
    layout: str
    """Digest of names, shapes and dtypes of the weights and of the tokenizer."""


@dataclass(frozen=True, slots=True)
class Join:
    """A node takes part, or a new life of it does: leases of its last one go back at once."""

    node: str
    """Name, unique among nodes: letters, digits, ".", "_", "-"; at most 100 of them."""
    life: str
    """Random, of this process."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """By policy, of the models that the node samples with; checked against those of trainers that
    have registered."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Joined:
    run: str
    """Identity of the run; requests that carry another one are refused."""
    config: str
    """The run's options as TOML."""
    group_size: int
    lease_s: float
    """How long a lease lasts, from its start and from each renewal."""
    policies: Mapping[str, PolicyState]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    node: str
    life: str
    num: int
    """Units wanted, 1 to 1024; fewer may come."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """By policy, the weights that the node samples with."""
    busy_s: float = 0.0
    """Seconds since the last request that at least one rollout was under way; waited_s: that none
    was, for want of a lease."""
    waited_s: float = 0.0
    key: str = ""
    """Random, of this request: sent again, it gets the same leases."""


@dataclass(frozen=True, slots=True)
class Lease:
    unit: int
    attempt: int
    """1 for the first lease of the unit."""
    task: Task
    seed: int
    """Of the unit's rollouts; the same for every attempt."""
    index: int
    """Place of the unit in the order of the tasks."""


@dataclass(frozen=True, slots=True)
class Leases:
    leases: tuple[Lease, ...]
    policies: Mapping[str, PolicyState]
    retry_after_s: float = 0.0
    """When to ask again if there are fewer than wanted."""
    reason: str = ""
    """Why there are fewer: "full" (enough rollouts wait or are under way), "no trainer", "done",
    "curated" (the curator admitted none of many tasks)."""


@dataclass(frozen=True, slots=True)
class Renewal:
    node: str
    life: str
    units: tuple[tuple[int, int], ...]
    """(unit, attempt) of leases that are still worked on."""


@dataclass(frozen=True, slots=True)
class Renewed:
    lost: tuple[int, ...]
    """Units that the node need not finish: leased to another one by now, or committed."""
    policies: Mapping[str, PolicyState]


@dataclass(frozen=True, slots=True)
class Push:
    node: str
    unit: int
    attempt: int
    payload: bytes
    """The group, by `codec.pack_group`; its trajectories are scored."""


@dataclass(frozen=True, slots=True)
class Pushed:
    status: str
    """"committed", or "duplicate": the unit had been committed before, by this node or another one.
    """


@dataclass(frozen=True, slots=True)
class Release:
    """A node gives leases back, because it ends or could not do them."""

    node: str
    units: tuple[tuple[int, int], ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Register:
    """A trainer begins or resumes."""

    policy: str
    """"planner" or "verifier"."""
    layout: str
    store: str
    num_groups: int
    """In the batch of a step."""
    max_staleness: int
    """Versions that any trained token may be older than the weights that a step trains."""
    step: int = 0
    """Of the checkpoint that training goes on from. Batches up to it are consumed for good; later
    ones come again as they were."""
    life: str = ""
    """Random, of this process: what comes twice or late from one life takes nothing back."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Registered:
    run: str
    step: int
    """Newest step whose batch has been put together; those after the checkpoint will come again."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    policy: str
    step: int
    """Its batch is put together once; asked again for a step, the same groups come in the same
    order."""
    rank: int = 0
    num_ranks: int = 1
    """Groups at places that are `rank` modulo `num_ranks` are answered; the other ranks ask for
    theirs."""
    wait_s: float = 0.0
    """How long the answer may wait for the batch to fill; at most 30."""


@dataclass(frozen=True, slots=True)
class Served:
    place: int
    """Within the batch."""
    unit: int
    payload: bytes
    is_replay: bool


@dataclass(frozen=True, slots=True)
class Batch:
    groups: tuple[Served, ...]
    """Empty while `num_missing` is not 0."""
    num_missing: int
    """Groups that the batch still lacks."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """For the log: staleness_mean, staleness_max, num_buffered, num_leased, num_stale,
    num_filtered, num_surplus, num_replayed, stale_tokens_mean, served_tokens_mean (per group; what
    goes stale being longer shows a bias against long rollouts)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A trainer says how far it is."""

    policy: str
    version: int
    """The newest published."""
    checkpoint: int
    """Step of its newest checkpoint: groups of older batches are not needed any more."""
    busy_s: float = 0.0
    """Seconds since the last report that it trained; waited_s: that it waited for a batch."""
    waited_s: float = 0.0
    is_done: bool = False
    """It will not ask again."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer where there is nothing to say."""


class Dataflow(Protocol):
    """All raise Refused, and Unavailable when there is no answer."""

    def join(self, request: Join) -> Joined: ...

    def lease(self, request: LeaseRequest) -> Leases: ...

    def renew(self, request: Renewal) -> Renewed: ...

    def push(self, request: Push) -> Pushed: ...

    def release(self, request: Release) -> Done: ...

    def register(self, request: Register) -> Registered: ...

    def batch(self, request: BatchRequest) -> Batch: ...

    def progress(self, request: Progress) -> Done: ...

    def status(self) -> dict[str, Any]:
        """A report for people and programs; JSON."""
