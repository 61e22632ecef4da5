"""Evaluations: questions that nodes answer before they make groups to train.

A question is a work item of its own numbers, from -1 downwards, so that leases, renewals and
failures are those of any other. Neither rules nor backpressure nor batches know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowtrain.config import Config
from flowtrain.records import Task
from flowtrain.rollouts.codec import pack, unpack
from flowtrain.rollouts.contract import (
    Done,
    EvalResult,
    EvalSettings,
    Evaluate,
    EvaluationRequest,
    EvaluationState,
    Lease,
    Refused,
)
from flowtrain.rollouts.ledger.schema import locked
from flowtrain.rollouts.ledger.sql import Database, Transaction, marks
from flowtrain.rollouts.ledger.trainers import MAX_RANKS, heard_policy

_MAX_RESULTS = 64
"""Results in an answer."""
_MAX_QUESTIONS = 1 << 16
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Evaluations:
    database: Database
    config: Config

    def evaluate(self, request: Evaluate) -> Done:
        """Add the questions, unless the evaluation has been asked for before."""
        _check(request)
        key = (request.policy, request.step, request.name)
        with locked(self.database) as (transaction, _):
            timeout_s = self.config.dataflow.trainer_timeout_s
            policy = heard_policy(transaction, request.policy, timeout_s)
            if not 0 <= request.step <= policy.newest:
                raise Refused(
                    f"version {request.step} of {policy.name} cannot be evaluated: the service "
                    f"has assembled only {policy.newest} batches"
                )
            if _find(transaction, *key) is None:
                _begin(transaction, request)
        return Done()

    def evaluation(self, request: EvaluationRequest) -> EvaluationState:
        """Return how far an evaluation is, and once it is complete a part of its results."""
        if not 0 <= request.rank < request.num_ranks <= MAX_RANKS:
            raise Refused(f"rank={request.rank} must be from 0 to below {request.num_ranks}")
        with self.database.read() as transaction:
            evaluation = _find(transaction, request.policy, request.step, request.name)
            if evaluation is None:
                return EvaluationState(0)
            num_open = num_left(transaction, evaluation.id)
            results = () if num_open else _results(transaction, evaluation, request)
        if not num_open and evaluation.state == "open":
            with self.database.write() as transaction:
                # Its state is checked again: others may have closed or collected it meanwhile.
                transaction.run(
                    "UPDATE evaluations SET state = 'complete' WHERE id = ? AND state = 'open'",
                    evaluation.id,
                )
        return EvaluationState(evaluation.num_questions, num_open, results)


def _check(request: Evaluate) -> None:
    settings = request.settings
    for name, value, low, high in (
        ("the length of the name", len(request.name), 1, _MAX_NAME),
        ("the number of questions", len(request.tasks), 1, _MAX_QUESTIONS),
        ("seed", request.seed, 0, (1 << 63) - 1),
        ("max_turns", settings.max_turns, 1, 1 << 20),
        ("trials", settings.trials, 1, 1 << 20),
        ("temperature", settings.temperature or 0.0, 0, 1e9),
    ):
        if not low <= value <= high:
            raise Refused(f"an evaluation: {name} is {value}, it must be from {low} to {high}")


def _find(transaction: Transaction, policy: str, step: int, name: str) -> Any:
    return transaction.one(
        "SELECT * FROM evaluations WHERE policy = ? AND step = ? AND name = ?", policy, step, name
    )


def _begin(transaction: Transaction, request: Evaluate) -> None:
    number = transaction.one("SELECT coalesce(max(id), 0) AS last FROM evaluations").last + 1
    lowest = transaction.one("SELECT coalesce(min(id), 0) AS id FROM work_items").id
    row = (
        *(number, request.policy, request.step, request.name, pack(request.settings)),
        *(request.seed, len(request.tasks), "open"),
    )
    transaction.run(f"INSERT INTO evaluations VALUES {marks(row)}", *row)
    transaction.many(
        "INSERT INTO work_items VALUES (?, ?, ?, ?, ?, 'waiting', 0, 0, ?)",
        [
            (min(lowest, 0) - 1 - index, index, task.id, task.kind, pack(task), number)
            for index, task in enumerate(request.tasks)
        ],
    )


def _results(
    transaction: Transaction, evaluation: Any, request: EvaluationRequest
) -> tuple[EvalResult, ...]:
    if evaluation.state == "collected":
        raise Refused(
            f"the evaluation {evaluation.name!r} of {evaluation.policy} after step "
            f"{evaluation.step}: its results were deleted after the trainer reported that they "
            "are in its log"
        )
    rows = transaction.all(
        "SELECT w.position, r.payload FROM work_items w LEFT JOIN results r ON r.work_item = w.id"
        " WHERE w.evaluation = ? AND w.position >= ? AND w.position % ? = ?"
        " ORDER BY w.position LIMIT ?",
        *(evaluation.id, request.first, request.num_ranks, request.rank, _MAX_RESULTS),
    )
    return tuple(EvalResult(row.position, bytes(row.payload or b"")) for row in rows)


# ---- leases and pushes


def take_questions(transaction: Transaction, versions: Mapping[str, int], num: int) -> list[Lease]:
    """Choose up to `num` questions for a node that samples with `versions`, oldest first. A node
    that does not name a version gets none of that policy's.
    """
    leases: list[Lease] = []
    for evaluation in _open(transaction):
        if versions.get(evaluation.policy, -1) >= evaluation.step and len(leases) < num:
            # Downwards, because questions are numbered from -1 on.
            rows = transaction.all(
                "SELECT id, attempt, position, task FROM work_items WHERE state = 'waiting'"
                f" AND evaluation = ? ORDER BY id DESC LIMIT ?"
                f" {transaction.lock('work_items', skip=True)}",
                *(evaluation.id, num - len(leases)),
            )
            leases += [question(row, row.attempt + 1, evaluation) for row in rows]
    return leases


def question(row: Any, attempt: int, evaluation: Any) -> Lease:
    """Make the lease of a question from its row and that of its evaluation."""
    task, settings = unpack(bytes(row.task), Task), settings_of(evaluation)
    return Lease(row.id, attempt, task, evaluation.seed, row.position, settings)


def evaluation_of(transaction: Transaction, work_item: int, *, is_locked: bool = False) -> Any:
    """Return the evaluation's row that a work item is a question of; None for any other."""
    if work_item >= 0:
        return None
    return transaction.one(
        "SELECT e.* FROM evaluations e JOIN work_items w ON w.evaluation = e.id WHERE w.id = ?"
        f" {transaction.lock('e') if is_locked else ''}",
        work_item,
    )


def settings_of(evaluation: Any) -> EvalSettings:
    return unpack(bytes(evaluation.settings), EvalSettings)


def is_any_left(transaction: Transaction) -> bool:
    """Return whether a question waits or is under way."""
    return any(num_left(transaction, evaluation.id) for evaluation in _open(transaction))


def num_left(transaction: Transaction, evaluation: int) -> int:
    """Count the questions that wait or are under way."""
    row = transaction.one(
        "SELECT count(*) AS num FROM work_items WHERE evaluation = ?"
        " AND state IN ('waiting', 'leased')",
        evaluation,
    )
    return int(row.num)


def _open(transaction: Transaction) -> list[Any]:
    return transaction.all("SELECT * FROM evaluations WHERE state = 'open' ORDER BY id")
