"""The ledger: all answers, out of one database."""

from __future__ import annotations

from pathlib import Path

from flowtrain.config import Config
from flowtrain.dataflow.ledger.history import Histories
from flowtrain.dataflow.ledger.nodes import NodeRequests
from flowtrain.dataflow.ledger.pushes import PushRequests
from flowtrain.dataflow.ledger.report import Reports
from flowtrain.dataflow.ledger.trainers import TrainerRequests
from flowtrain.tasks.sets import task_set


class Ledger(NodeRequests, PushRequests, TrainerRequests, Reports, Histories):
    """`contract.Dataflow` out of a database: the path of an SQLite file, or the URL of a PostgreSQL
    server.
    """


def open_ledger(config: Config, database: str | Path) -> Ledger:
    """With the tasks and the rules that the config names. UserError when the database cannot be
    used or belongs to another run.
    """
    return Ledger(database, config, task_set(config).cursor(config.run.seed, 0))
