"""Rows of a file: JSONL (one object per line), JSON (a list of objects), TSV, CSV or Parquet."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain.records import UserError
from flowtrain.utils.errors import user_error

_INEXACT = re.compile("float|half|decimal")
"""Types of Parquet, or of what is in its lists, whose values Python would write otherwise."""
Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".tsv", ".csv", ".parquet")


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, str, Row]]:
    """Yield (1-based number, "file, line 3", row) for each row of a file.

    Of Parquet only those of `columns` that it has are read (None: all). Raises
    UserError, which names the file and the wrong line or entry.
    """
    match path.suffix:
        case ".jsonl":
            rows = _jsonl(path)
        case ".json":
            rows = _json(path)
        case ".tsv" | ".csv":
            rows = _table(path)
        case ".parquet":
            rows = _parquet(path, columns)
        case _:
            raise UserError(f"{path}: the file name must end in {', '.join(SUFFIXES)}")
    for number, where, entry in rows:
        if not isinstance(entry, dict):
            raise UserError(f"{where}: must be an object, not {type_name(entry)}")
        yield number, where, entry


def read_text(path: Path) -> str:
    """Read the UTF-8 text of a file, without a byte order mark; raises UserError."""
    with user_error(f"{path}: cannot be read as UTF-8 text", OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8-sig")


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text; raises UserError, which begins with `where`."""
    # RecursionError: brackets nested too deep.
    with user_error(f"{where}: cannot be read as JSON", ValueError, RecursionError):
        value = json.loads(text)
        # Fails for half a surrogate pair, which no tokenizer takes.
        json.dumps(value, ensure_ascii=False).encode()
        return value


def type_name(value: Any) -> str:
    """Return a person's name for the type of a JSON value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _jsonl(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Read line by line, because files of passages have millions.

    In binary mode only a line feed ends a line; JSON strings may contain U+2028.
    """
    with user_error(f"{path}: cannot be read", OSError), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            with user_error(f"{where}: is not UTF-8 text", UnicodeDecodeError):
                text = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode()
            if text.strip():
                yield number, where, parse_json(text, where)


def _json(path: Path) -> Iterator[tuple[int, str, Any]]:
    text = read_text(path)
    try:
        entries = parse_json(text, str(path))
    except UserError as error:
        if len(text.splitlines()) > 1 and _is_json(text.lstrip().partition("\n")[0]):
            raise UserError(f"{error}; it holds JSON lines: rename it to end in .jsonl") from None
        raise
    if not isinstance(entries, list):
        raise UserError(f"{path}: must hold a list of objects, not {type_name(entries)}")
    for number, entry in enumerate(entries, start=1):
        yield number, f"{path}, entry {number}", entry


def _is_json(text: str) -> bool:
    with suppress(UserError):
        return isinstance(parse_json(text, ""), dict)
    return False


def _table(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Read a table whose first line names the columns; all values are texts."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    problem = f"{path}: cannot be read as {path.suffix[1:].upper()} in UTF-8"
    with (
        user_error(problem, OSError, UnicodeDecodeError, csv.Error),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        for number, entry in enumerate(reader, start=1):
            where = f"{path}, line {reader.line_num}"
            if None in entry or None in entry.values():
                raise UserError(f"{where}: must have {len(reader.fieldnames or ())} columns")
            yield number, where, entry


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, str, Any]]:
    with user_error(f"{path}: Parquet needs pip install -e '.[parquet]'", ImportError):
        import pyarrow
        from pyarrow.parquet import ParquetFile
    problem = f"{path}: cannot be read as Parquet"
    number = 0
    with user_error(problem, OSError, pyarrow.ArrowException), ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if columns is None or name in columns]
        for batch in file.iter_batches(columns=names):
            types = dict(zip(batch.schema.names, map(str, batch.schema.types), strict=True))
            exact = {name: kind for name, kind in types.items() if _INEXACT.search(kind)}
            for entry in batch.to_pylist():
                number += 1
                entry |= {name: _as_written(entry[name], kind) for name, kind in exact.items()}
                yield number, f"{path}, row {number}", without_nulls(entry)


def _as_written(value: Any, type_name: str) -> Any:
    """Return a value of Parquet as a person would write it: a float32 without the digits that a
    float64 adds to it, a decimal number without loss.
    """
    match value:
        case list():
            return [_as_written(item, type_name) for item in value]
        case float() if "float" in type_name or "half" in type_name:
            width = np.float16 if "half" in type_name else np.float32
            return float(str(width(value)))
        case Decimal():
            return format(value, "f")
    return value


def without_nulls(row: Row) -> Row:
    """Return a row without the columns that are null, as tables have all columns in all rows."""
    return {key: value for key, value in row.items() if value is not None}
