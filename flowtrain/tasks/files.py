"""Tasks from the user's own files: JSONL (one object per line) or JSON (a list of objects)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowtrain.types import Task, UserError

ALLOWED_KEYS = ("question", "answer", "id", "kind", "num_turns", "scorer")


def load_tasks(path: str | Path) -> list[Task]:
    """The tasks of a .jsonl or .json file, in file order.

    Each object has `question` (string) and `answer` (string, number or list of these: any of them is right), and may have `id`
    (default: file name and entry number), `kind` (default ""), `num_turns` (default 0, unknown) and `scorer` (default "exact").
    Raises UserError naming the file, the line or entry, the key and what it may be.
    """
    path = Path(path)
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for number, where, entry in _entries(path):
        task = _task(entry, where, default_id=f"{path.stem}-{number}")
        if task.id in places:
            raise UserError(f"{where}: id {task.id!r} was already used by {places[task.id]}; ids must be unique")
        places[task.id] = where
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: holds no tasks; at least one is needed")
    return tasks


def read_text(path: Path) -> str:
    """The UTF-8 text of a file, without a byte order mark; UserError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text; UserError starting with `where` when it is not JSON."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair, which no tokenizer takes
        return value
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: is not JSON ({error.msg} at line {error.lineno}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # an integer of too many digits; brackets nested too deep
        raise UserError(f"{where}: is not JSON that can be read ({error})") from error


def _entries(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(1-based number, "file, line 3", value) for each entry of the file."""
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(f"{path}: the file name must end in .jsonl or .json")
    text = read_text(path)
    if path.suffix == ".jsonl":
        # Not splitlines: JSON strings may hold U+2028 and its like as they are.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield number, f"{path}, line {number}", parse_json(line, f"{path}, line {number}")
        return
    entries = parse_json(text, str(path))
    if not isinstance(entries, list):
        raise UserError(f"{path}: must hold a list of objects, not {_type_name(entries)}")
    for number, entry in enumerate(entries, start=1):
        yield number, f"{path}, entry {number}", entry


def _task(entry: Any, where: str, default_id: str) -> Task:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: must be an object, not {_type_name(entry)}")
    for key in entry:
        if key not in ALLOWED_KEYS:
            raise UserError(f"{where}: unknown key {key!r}; allowed are {', '.join(ALLOWED_KEYS)}")
    for key in ("question", "answer"):
        if key not in entry:
            raise UserError(f"{where}: key {key!r} is missing")
    return Task(
        id=_id(entry.get("id", default_id), where),
        question=_text(entry["question"], "question", where),
        answers=_answers(entry["answer"], where),
        kind=_text(entry["kind"], "kind", where) if "kind" in entry else "",
        num_turns=_num_turns(entry.get("num_turns", 0), where),
        scorer=_text(entry.get("scorer", "exact"), "scorer", where),
    )


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: key {key!r} must be a non-empty string, not {_shown(value)}")
    return value


def _id(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise UserError(f"{where}: key 'id' must be a non-empty string or an integer, not {_shown(value)}")
    return str(value)


def _num_turns(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{where}: key 'num_turns' must be an integer of 0 (unknown) or more, not {_shown(value)}")
    return value


def _answers(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UserError(f"{where}: key 'answer' must not be an empty list")
    return tuple(_answer(each, where) for each in values)


def _answer(value: Any, where: str) -> str:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_finite = isinstance(value, float) and math.isfinite(value)
    if is_integer or is_finite or (isinstance(value, str) and value.strip()):
        return str(value)
    raise UserError(f"{where}: key 'answer' must be a non-empty string, a finite number or a list of these, not {_shown(value)}")


def _shown(value: Any) -> str:
    """The value for a message, cut short."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
