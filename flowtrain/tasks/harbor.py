"""Tasks in Harbor's folders: an instruction, an environment, tests, and an oracle's solution.

Harbor's own package, in an environment of its own, reads them from a folder or a registry, and runs
each rollout as a trial behind the gateway, whose reward the tests write
(`agents/gateway/harbor/trial_process.py`).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowtrain.types import Task, UserError
from flowtrain.utils.errors import on_failure, user_error
from flowtrain.utils.text import printable
from flowtrain.utils.waiting import waiting

COLUMN = "harbor"
"""The column of a task with {"path": its folder, "options": agent, environment, verifier}."""
_TRIALS = Path(__file__).parents[1] / "agents" / "gateway" / "harbor" / "trial_process.py"
_KEYS = ("python", "dataset", "agent", "environment", "verifier", "check")
_MAX_ERROR = 500


def harbor_command(options: Mapping[str, Any], what: str = "play") -> tuple[str, ...]:
    """Return the program that `tasks.harbor.python` runs; it plays a task from its column."""
    python = Path(options.get("python") or sys.executable).expanduser()
    return (str(python.absolute()), str(_TRIALS), what)


def harbor_tasks(options: Mapping[str, Any]) -> list[Task]:
    """Load the tasks of a table [tasks.harbor], downloading what a registry has.

    Raises UserError where Harbor is missing, for what it refuses, for a data set without tasks, and
    with `check` for tasks whose oracle does not get 1, or whose untouched environment does not
    get 0.
    """
    if unknown := [key for key in options if key not in _KEYS]:
        raise UserError(f"tasks.harbor: unknown key {unknown[0]!r}; it has {', '.join(_KEYS)}")
    tasks = [_task(row, options) for row in _ask(options, "list")]
    if not tasks:
        raise UserError(f"tasks.harbor: no task in dataset={options.get('dataset')}")
    if options.get("check"):
        _check(options, len(tasks))
    return tasks


def _task(row: Mapping[str, Any], options: Mapping[str, Any]) -> Task:
    given = {key: options[key] for key in ("agent", "environment", "verifier") if key in options}
    return Task(
        id=row["id"],
        question=row["question"],
        answers=(),
        kind=COLUMN,
        num_turns=0,
        columns=json.dumps({COLUMN: {"path": row["path"], "options": given}}),
    )


def _check(options: Mapping[str, Any], num_tasks: int) -> None:
    wanted = {"oracle": 1.0, "nop": 0.0}
    wrong = []
    with waiting("Harbor tasks checked", True, total=len(wanted) * num_tasks) as tick:
        for trial in _ask(options, "check"):
            tick()
            if trial["got"] != wanted[trial["agent"]]:
                got = printable(str(trial["got"]), keep="")[:_MAX_ERROR]
                wrong.append(f"{trial['id']!r}: the agent {trial['agent']} gets {got}")
    if wrong:
        raise UserError(
            "tasks.harbor.check: the oracle has to get 1 and nop, which does nothing, 0; "
            + "; ".join(wrong[:5])
        )


def _ask(options: Mapping[str, Any], what: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that Harbor's Python prints."""
    command = harbor_command(options, what)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        user_error(f"tasks.harbor.python={command[0]!r}", OSError),
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            encoding="utf-8",
        ) as process,
        on_failure(process.kill),
    ):
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            process.stdin.write(json.dumps(dict(options)))
            process.stdin.close()
        yield from map(json.loads, process.stdout)
        process.wait()
        said.seek(0)
        errors = said.read().splitlines()
    if process.returncode:
        last = printable(errors[-1] if errors else "it says nothing", keep="")[:_MAX_ERROR]
        raise UserError(
            f"tasks.harbor: {last} (by {command[0]}, which needs harbor and dockerfile-parse, "
            "docs/agents/environments.md)"
        )
