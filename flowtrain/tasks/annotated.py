"""The file of rows that have got sub-goals, which grows row by row and survives a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain.tasks.rows import parse_json
from flowtrain.types import Task, UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.files import replace_file, sync, writing


class AnnotatedFile:
    """Rows in the order in which they were done; `finish` puts them into that of the questions."""

    def __init__(self, path: Path) -> None:
        """Read what is there, without a row that a killed process has left unfinished.

        Raises UserError for a file that holds something else.
        """
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._read()

    @property
    def failures(self) -> Path:
        """The file that lists the rows that failed."""
        return self._path.with_suffix(".failed.jsonl")

    @property
    def num_without(self) -> int:
        """Rows whose question needs nothing to be found on the way."""
        return sum(not row["sub_goals"] for row in self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def left(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that are not done; raises UserError where a row is of none of them."""
        questions = {task.id: task.question for task in tasks}
        for task_id, row in self._rows.items():
            if questions.get(task_id) != row["question"]:
                raise UserError(
                    f"--out {self._path}: its row {task_id!r} is of another question than those of "
                    "--in; name another file"
                )
        return [task for task in tasks if task.id not in self._rows]

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is on the disk when the call returns."""
        is_new = not self._path.exists()
        with writing(self._path):
            with self._path.open("ab") as file:
                file.write(_line(row))
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(self._path.parent)
        self._rows[row["id"]] = dict(row)

    def finish(self, order: Sequence[str], failed: Mapping[str, str]) -> None:
        """Sort the rows by the ids in `order`, and list those that failed with their reasons."""
        places = {task_id: place for place, task_id in enumerate(order)}
        rows = sorted(self._rows.values(), key=lambda row: places[row["id"]])
        with writing(self._path):
            if rows:
                replace_file(self._path, b"".join(map(_line, rows)))
            self.failures.unlink(missing_ok=True)
            if failed:
                reasons = [{"id": task_id, "reason": text} for task_id, text in failed.items()]
                replace_file(self.failures, b"".join(map(_line, reasons)))

    def _read(self) -> None:
        with user_error(f"--out {self._path}: cannot be read", OSError):
            data = self._path.read_bytes()
        whole, newline, _ = data.rpartition(b"\n")
        if whole + newline != data:
            with writing(self._path):
                os.truncate(self._path, len(whole + newline))
        for number, line in enumerate(whole.splitlines() if whole else (), start=1):
            where = f"--out {self._path}, line {number}"
            with user_error(where, UnicodeDecodeError):
                row = parse_json(line.decode(), where)
            if not isinstance(row, dict) or not {"id", "question", "sub_goals"} <= row.keys():
                raise UserError(f"{where}: was not written by this command; name another file")
            self._rows[row["id"]] = row


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()
