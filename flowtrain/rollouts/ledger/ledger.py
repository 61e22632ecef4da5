"""The ledger: `contract.Dataflow` from one database."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.rollouts.contract import Unavailable
from flowtrain.rollouts.ledger.audit import Audit, audit
from flowtrain.rollouts.ledger.backpressure import Openings, read_openings
from flowtrain.rollouts.ledger.batches import Batches
from flowtrain.rollouts.ledger.evaluations import Evaluations
from flowtrain.rollouts.ledger.leases import LeaseBook
from flowtrain.rollouts.ledger.nodes import Nodes
from flowtrain.rollouts.ledger.prompts import Cursor, Prompts, TaskOrder
from flowtrain.rollouts.ledger.pushes import Pushes
from flowtrain.rollouts.ledger.report import report
from flowtrain.rollouts.ledger.schema import prepare
from flowtrain.rollouts.ledger.sql import connect
from flowtrain.rollouts.ledger.trainers import Trainers
from flowtrain.rollouts.pool_size import PoolSize
from flowtrain.rollouts.rules import Rules, load
from flowtrain.tasks.sets import task_set


class Ledger:
    """`contract.Dataflow` on a database, the path of an SQLite file or the URL of a PostgreSQL
    server. Many threads may use it at once, and many processes the same database.
    """

    def __init__(
        self,
        database: str | Path,
        config: Config,
        tasks: Cursor,
        make_rules: Callable[[], Rules] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Make the tables in an empty database. UserError when it cannot be used or belongs to
        another run.

        `make_rules` returns rules that have observed nothing; by default those that the config
        names. `clock` stands in for the database's, in tests and simulations.
        """
        self.config = config
        rules = make_rules() if make_rules else load(config)
        order = TaskOrder(tasks, config.rollout.num_questions)
        self._prompts = Prompts(order, rules.prompt_filter, config.run.seed)
        self._pool_size = PoolSize()
        self.database = connect(database, clock)
        self.run: str = prepare(self.database, _fixed_options(config))
        """Identity of the run."""
        if changed := self._prompts.open(self.database):
            raise UserError(
                f"{self.database.name} belongs to a run with other tasks ({changed}): use the "
                "original tasks in their order, or another database"
            )
        common = (self.database, config)
        nodes = Nodes(*common)
        leases = LeaseBook(*common, prompts=self._prompts)
        pushes = Pushes(*common, group_filter=rules.group_filter)
        trainers = Trainers(*common)
        batches = Batches(*common, selector=rules.selector, replay_selector=rules.replay_selector)
        evaluations = Evaluations(*common)
        # The requests of `Dataflow`, each answered by its part.
        self.join = nodes.join
        self.lease = leases.lease
        self._ends_overdue = leases.ends_overdue
        self.renew = leases.renew
        self.push = pushes.push
        self.release = leases.release
        self.disown = pushes.disown
        self.register = trainers.register
        self.batch = batches.batch
        self.progress = trainers.progress
        self.evaluate = evaluations.evaluate
        self.evaluation = evaluations.evaluation

    def openings(self) -> Openings:
        """Read what there is to lease."""
        with self.database.read() as transaction:
            return read_openings(transaction, self.config.dataflow, self._ends_overdue)

    def answers(self) -> bool:
        """Return whether the database answers."""
        try:
            with self.database.read() as transaction:
                transaction.one("SELECT 1 AS answer")
        except (Unavailable, UserError):
            return False
        return True

    def status(self) -> dict[str, Any]:
        with self.database.read() as transaction:
            snapshot = report(transaction, self.run, self.config.dataflow)
        return {**snapshot, "pool": self._pool_size.of(snapshot)}

    def audit(self) -> Audit:
        with self.database.read() as transaction:
            return audit(transaction)

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        self.database.close()


def open_ledger(config: Config, database: str | Path) -> Ledger:
    """Open a ledger with the tasks and the rules that the config names. UserError when the database
    cannot be used or belongs to another run.
    """
    return Ledger(database, config, task_set(config).cursor(config.run.seed, 0))


def _fixed_options(config: Config) -> str:
    """Return the options that define the work items, a line each; the run may change others."""
    options = config.model_dump(mode="json")
    lines = []
    for key in (
        "run.seed",
        "rollout.group_size",
        "rollout.num_questions",
        "dataflow.prompt_filter",
    ):
        section, name = key.split(".")
        lines.append(f"{key} = {json.dumps(options[section][name], sort_keys=True)}")
    rule_options = config.options_of(rule := config.dataflow.prompt_filter)
    lines.append(f"plugins.{rule.rpartition(':')[2]} = {json.dumps(rule_options, sort_keys=True)}")
    return "\n".join(lines)
