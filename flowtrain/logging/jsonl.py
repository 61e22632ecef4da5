"""Append-only JSON-lines files that survive a crash: whole lines only, cut back to a step on
resume.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flowtrain.records import UserError
from flowtrain.utils.files import sync, writing


def json_value(value: Any) -> Any:
    """Convert numbers of any library to Python's own, and non-finite ones to None."""
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _line(record: Mapping[str, Any]) -> bytes:
    """Write a record as a line; a number that is not finite becomes null."""
    try:
        return msgspec.json.format(_ENCODER.encode(record), indent=0) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: backslashreplace makes JSON's own escape of it
        text = json.dumps(json_value(record), ensure_ascii=False, allow_nan=False) + "\n"
        return text.encode("utf-8", "backslashreplace")


def _base(value: Any) -> Any:
    """Convert values that msgspec rejects: foreign numbers, and subclasses of str or numbers."""
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, numbers.Integral) else json_value(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_base)


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per record, all of them or none: on a full disk the file is cut back.

    They are on the disk when this returns, so that no checkpoint is newer than its step's lines.
    """
    data = b"".join(_line(record) for record in records)
    with writing(path):
        is_new = not path.exists()
        size = 0 if is_new else path.stat().st_size
        try:
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(path.parent)
        except OSError:
            # A torn last line is harmless to every reader, so a failure here must not hide the
            # first one.
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of the file in order, skipping a torn last line."""
    for record, _ in read_lines_with_ends(path):
        yield record


def read_lines_with_ends(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Read (record, offset of its end in bytes) per line, as `read_lines` does; each line begins
    where the one before it ends.
    """
    torn_number = 0
    for number, (record, end) in enumerate(_read(path), 1):
        if torn_number:
            raise _damaged(path, torn_number)
        if record is None:
            torn_number = number
        else:
            yield record, end


def cut_lines(path: Path, last_step: int) -> None:
    """Cut the file after the last line of step `last_step`, and drop what a power cut has torn.

    Lines are written in the order of their steps, so this is one truncate: all or nothing, and it
    needs no free space. A line for an earlier step that stands behind a later step's goes with
    that: whoever wrote it then writes it again. Raises UserError for a torn line before a line that
    stays.
    """
    if not path.exists():
        return
    kept_bytes = torn_number = 0
    for number, (record, end) in enumerate(_read(path), 1):
        if record is None:
            torn_number = torn_number or number
        elif record["step"] > last_step:
            break
        elif torn_number:
            raise _damaged(path, torn_number)
        else:
            kept_bytes = end
    with writing(path), path.open("rb+") as file:
        file.truncate(kept_bytes)
        file.seek(max(kept_bytes - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")


def _read(path: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Read (record, offset of its end) of every line; None for one that is torn."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            yield _parse(line), end


def _damaged(path: Path, number: int) -> UserError:
    return UserError(f"{path} line {number} is not a JSON object with a step: delete this line")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse one line; None for a torn line or a foreign one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_ours else None
