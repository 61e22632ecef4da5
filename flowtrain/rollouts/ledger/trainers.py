"""The requests of trainers besides batches: to begin or resume, and to report progress."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.config import Config, Dataflow
from flowtrain.rollouts.contract import Done, PolicyState, Progress, Refused, Register, Registered
from flowtrain.rollouts.ledger.prompts import number_groups
from flowtrain.rollouts.ledger.schema import locked
from flowtrain.rollouts.ledger.sql import Database, Transaction, marks
from flowtrain.rollouts.ledger.token_accounts import note_batch

MAX_RANKS = 1 << 16
_BOUNDS = (
    ("num_groups", 1, 1 << 20),
    ("max_staleness", 0, 1 << 30),
    ("vocab_size", 1, 1 << 31),
    ("max_positions", 1, 1 << 31),
    ("step", 0, 1 << 40),
)
"""The numbers of a registration, from the least to the greatest that make sense."""
MAX_TEXT = 4096
"""Characters of a text in a request."""


@dataclass(frozen=True, slots=True)
class Trainers:
    database: Database
    config: Config

    def register(self, request: Register) -> Registered:
        self._check(request)
        with locked(self.database) as (transaction, meta):
            if request.run not in ("", meta.run):
                raise Refused(
                    f"this is run {meta.run!r}, but the checkpoint was trained from "
                    f"{request.run[:100]!r}: start the service with the database of that run"
                )
            if not self._is_known(transaction, request):
                self._begin(transaction, request)
            policy = transaction.one("SELECT newest FROM policies WHERE name = ?", request.policy)
        return Registered(meta.run, policy.newest)

    def _check(self, request: Register) -> None:
        if request.policy not in self.config.policy_names:
            raise Refused(
                f"policy {request.policy!r}: this run has only "
                f"{' and '.join(self.config.policy_names)}"
            )
        for name, low, high in _BOUNDS:
            if not low <= (value := getattr(request, name)) <= high:
                raise Refused(f"{name}={value} must be from {low} to {high}")
        for name in ("layout", "store", "life"):
            if len(value := getattr(request, name)) > MAX_TEXT:
                raise Refused(f"{name} has {len(value)} characters, at most {MAX_TEXT} are allowed")
        max_waiting = self.config.dataflow.max_waiting
        if 0 < max_waiting < request.num_groups:
            raise Refused(
                f"dataflow.max_waiting={max_waiting} must be at least the "
                f"{request.num_groups} groups of a batch"
            )

    def _is_known(self, transaction: Transaction, request: Register) -> bool:
        """Return whether this process has registered before, and note it if not. A trainer that
        sends no `life` counts as a new process each time.
        """
        key = (request.policy, request.life)
        if not transaction.one("SELECT life FROM trainers WHERE policy = ? AND life = ?", *key):
            row = (*key, transaction.now(), request.step)
            transaction.run(f"INSERT INTO trainers VALUES {marks(row)}", *row)
            return False
        return bool(request.life)

    def _begin(self, transaction: Transaction, request: Register) -> None:
        policy = transaction.one("SELECT * FROM policies WHERE name = ?", request.policy)
        description = (
            *(request.layout, request.store, request.num_groups, request.max_staleness),
            *(request.vocab_size, request.max_positions),
        )
        step, life = request.step, request.life
        if policy is None:
            number = transaction.one("SELECT count(*) AS num FROM policies").num + 1
            state = (step, step, step, step, 0, transaction.now(), 0.0, 0.0, life)
            row = (request.policy, number, *description, *state)
            transaction.run(f"INSERT INTO policies VALUES {marks(row)}", *row)
            return
        if policy.newest:
            _check_resumed(transaction, request, policy)
        transaction.run(
            "UPDATE policies SET layout = ?, store = ?, num_groups = ?, max_staleness = ?,"
            " vocab_size = ?, max_positions = ?, version = ?, newest = ?, checkpoint = ?,"
            " is_done = 0, seen_s = ?, life = ? WHERE name = ?",
            *description,
            step,
            max(policy.newest, step),
            step,
            transaction.now(),
            life,
            request.policy,
        )

    def progress(self, request: Progress) -> Done:
        """Note the progress. Seconds count once, with the first report of a version or of the
        trainer's end.
        """
        with locked(self.database) as (transaction, meta):
            timeout_s = self.config.dataflow.trainer_timeout_s
            policy = heard_policy(transaction, request.policy, timeout_s, request.life)
            if not 0 <= request.checkpoint <= request.version <= policy.newest:
                raise Refused(
                    f"{policy.name} cannot have version {request.version} and a checkpoint of "
                    f"step {request.checkpoint}: the service has assembled only {policy.newest} "
                    "batches"
                )
            busy_s = check_seconds(request.busy_s)
            waited_s = check_seconds(request.waited_s)
            is_news = request.version > policy.version or (request.is_done and not policy.is_done)
            transaction.run(
                "UPDATE policies SET version = ?, top_version = ?, checkpoint = ?, is_done = ?,"
                " seen_s = ?, busy_s = busy_s + ?, waited_s = waited_s + ? WHERE name = ?",
                max(request.version, policy.version),
                max(request.version, policy.top_version),
                max(request.checkpoint, policy.checkpoint),
                int(request.is_done or policy.is_done),
                transaction.now(),
                busy_s if is_news else 0.0,
                waited_s if is_news else 0.0,
                policy.name,
            )
            if request.version > policy.top_version and policy.number == 1:
                event = number_groups(transaction, meta.num_events) + 1
                row = (event, policy.name, request.version)
                transaction.run(f"INSERT INTO bumps VALUES {marks(row)}", *row)
                transaction.run("UPDATE meta SET num_events = ?", event)
            note_batch(transaction, policy.name, request.version, request.tokens)
            if request.evaluated >= 0:
                _forget_results(transaction, policy.name, request.evaluated)
            if request.checkpoint > policy.checkpoint:
                _forget_payloads(transaction, has_replays=self.config.dataflow.replay_share > 0)
        return Done()


def _check_resumed(transaction: Transaction, request: Register, policy: Any) -> None:
    """Raises Refused unless the stored batches let training go on from that checkpoint."""
    if request.layout != policy.layout:
        raise Refused(
            f"{policy.name} has layout {request.layout}, this run has trained one of "
            f"{policy.layout}: use the original model"
        )
    if request.step > policy.newest:
        raise Refused(
            f"a checkpoint of step {request.step} belongs to another run: this one has assembled "
            f"only {policy.newest} batches"
        )
    key = (policy.name, request.step)
    num_batches = transaction.one(
        "SELECT count(*) AS num FROM batches WHERE policy = ? AND step > ?", *key
    ).num
    num_lost = transaction.one(
        "SELECT count(*) AS num FROM assignments a"
        " LEFT JOIN payloads d ON d.work_item = a.work_item"
        " WHERE a.policy = ? AND a.step > ? AND d.work_item IS NULL",
        *key,
    ).num
    if num_lost or num_batches < policy.newest - request.step:
        raise Refused(
            f"the batches after step {request.step} were deleted; {policy.name} had a checkpoint "
            f"of step {policy.checkpoint}, resume from it"
        )


def _forget_payloads(transaction: Transaction, *, has_replays: bool) -> None:
    """Delete the groups that no batch can need any more: neither fresh, nor in a batch after a
    checkpoint, nor possible replays.
    """
    replays = (
        " OR (s.state = 'assigned' AND s.min_version >= p.checkpoint - p.max_staleness)"
        if has_replays
        else ""
    )
    # Counts, because NOT EXISTS may become a join that reads all shares and assignments there are.
    transaction.run(
        "DELETE FROM payloads"
        " WHERE 0 = (SELECT count(*) FROM shares s JOIN policies p ON p.name = s.policy"
        f" WHERE s.work_item = payloads.work_item AND (s.state = 'fresh'{replays}))"
        " AND 0 = (SELECT count(*) FROM assignments a JOIN policies p ON p.name = a.policy"
        " WHERE a.work_item = payloads.work_item AND a.step > p.checkpoint)"
    )


def _forget_results(transaction: Transaction, policy: str, evaluated: int) -> None:
    """Delete the groups of complete evaluations up to a step."""
    complete = transaction.all(
        "SELECT id FROM evaluations WHERE state = 'complete' AND policy = ? AND step <= ?"
        f" ORDER BY id {transaction.lock('evaluations')}",
        *(policy, evaluated),
    )
    # Only now, when a late push waits for this transaction: it would leave its group behind.
    for evaluation in complete:
        transaction.run(
            "UPDATE results SET payload = NULL WHERE work_item IN"
            " (SELECT id FROM work_items WHERE evaluation = ?)",
            evaluation.id,
        )
        transaction.run("UPDATE evaluations SET state = 'collected' WHERE id = ?", evaluation.id)


# ---- rows of policies


def heard_policy(
    transaction: Transaction, name: str, timeout_s: float, life: str | None = None
) -> Any:
    """Return the policy's row, and note that its trainer is alive. Raises Refused when another
    process than `life` registered last; None: any may ask.
    """
    now = transaction.now()
    policy = transaction.one("SELECT * FROM policies WHERE name = ?", name)
    if policy is None:
        raise Refused(f"policy {name!r} has not been registered")
    if life is not None and life != policy.life:
        raise Refused(f"policy {name!r}: another process has registered it since and now trains it")
    if now - policy.seen_s > timeout_s / 8:
        transaction.run("UPDATE policies SET seen_s = ? WHERE name = ?", now, name)
    return policy


def policy_rows(transaction: Transaction) -> list[Any]:
    """Return the policies in the order of their registration, with num_fresh: the number of their
    waiting groups that the next step may take.
    """
    return transaction.all(
        "SELECT p.*, (SELECT count(*) FROM shares s WHERE s.policy = p.name AND s.state = 'fresh'"
        " AND s.min_version >= p.newest - p.max_staleness)"
        " AS num_fresh FROM policies p ORDER BY p.number"
    )


def policy_states(policies: Sequence[Any]) -> Mapping[str, PolicyState]:
    return {row.name: PolicyState(row.version, row.store, row.layout) for row in policies}


def is_live(policy: Any, now: float, options: Dataflow) -> bool:
    return not policy.is_done and now - policy.seen_s <= options.trainer_timeout_s


def check_seconds(value: float) -> float:
    """Raises Refused for a duration that no clock shows."""
    if not 0 <= value <= 1e9:
        raise Refused(f"{value} is not a valid number of seconds")
    return value


def known_policies(config: Config, by_policy: Mapping[str, object]) -> str:
    """Write `by_policy` as JSON, without policies that the flow does not have."""
    names = config.policy_names
    return json.dumps({name: by_policy[name] for name in names if name in by_policy})


def check_layouts(node: str, layouts: Mapping[str, str], policies: Sequence[Any]) -> None:
    """Raises Refused when the node samples with another model than a trainer trains, or when a
    layout is none.
    """
    for name, layout in layouts.items():
        if len(layout) > MAX_TEXT:
            raise Refused(
                f"node {node!r}: the layout of its {name[:100]} has {len(layout)} characters, at "
                f"most {MAX_TEXT} are allowed"
            )
    for policy in policies:
        if layouts.get(policy.name, policy.layout) != policy.layout:
            raise Refused(
                f"node {node!r} has a {policy.name} of layout {layouts[policy.name]}, the "
                f"trainer's is {policy.layout}: start the node with the trainer's model, dtype "
                "and tokenizer"
            )
