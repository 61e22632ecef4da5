"""The tasks of an environment of the package `verifiers`, the format of the Environments Hub.

A task carries its environment's config and its own row in its columns, so that any process can play
it (`agents/gateway/hub.py`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

from flowtrain.records import Task, UserError
from flowtrain.utils.errors import foreign, user_error

COLUMN = "verifiers"
"""The column of a task with {"env": config, "data": row}."""
_MISSING = "tasks.name='verifiers' needs the package verifiers: pip install -e '.[verifiers]'"


def load_environment(options: Mapping[str, Any]) -> Any:
    """Make the environment of a table [tasks.verifiers], which is verifiers' own [env].

    Raises UserError for a missing package, for what verifiers refuses, and for several agents.
    """
    with user_error(_MISSING, ModuleNotFoundError):
        import verifiers.v1 as vf
    with foreign("tasks.verifiers"):  # an environment is a package of a stranger's
        config = vf.resolve_env_config(copy.deepcopy(dict(options)))
        environment = vf.load_environment(config)
    agents = [name for name, value in config if isinstance(value, vf.AgentConfig)]
    if len(agents) != 1:
        raise UserError(
            f"tasks.verifiers: {config.env_id!r} has the agents {', '.join(agents)}, but training "
            "supports a single one"
        )
    return environment


def verifiers_tasks(options: Mapping[str, Any], limit: int) -> list[Task]:
    """Load the environment's tasks, in its order; of one without an end the first `limit`."""
    environment = load_environment(options)
    taskset = environment.taskset
    name = environment.config.env_id
    with foreign(f"tasks.verifiers: the tasks of {name!r} cannot be loaded"):
        items = list(taskset if taskset.bounded else islice(taskset, limit))
    ids = [item.data.id or item.data.name or "" for item in items]
    numbered = len(set(ids)) < len(ids)
    return [
        _task(name, f"{number}" if numbered else ids[number], item.data, options)
        for number, item in enumerate(items)
    ]


def _task(name: str, own_id: str, data: Any, options: Mapping[str, Any]) -> Task:
    row = data.model_dump(mode="json", exclude_none=True)
    return Task(
        id=f"{name}-{own_id}",
        question=data.prompt_text or data.description or own_id,
        answers=(),
        kind=name,
        num_turns=0,
        columns=json.dumps({COLUMN: {"env": dict(options), "data": row}}),
    )
