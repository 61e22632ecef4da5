"""Rows of a file: JSONL (one object per line), JSON (a list of objects), TSV, Parquet or Arrow."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.types import UserError
from flowtrain.utils.errors import user_error

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".tsv", ".parquet", ".arrow")


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, str, Row]]:
    """Yield (1-based number, "file, line 3", row) for each row of a file.

    Of Parquet and Arrow files only those of `columns` that they have are read (None: all). Raises
    UserError, which names the file and the wrong line or entry.
    """
    match path.suffix:
        case ".jsonl":
            rows = _jsonl(path)
        case ".json":
            rows = _json(path)
        case ".tsv":
            rows = _tsv(path)
        case ".parquet":
            rows = _parquet(path, columns)
        case ".arrow":
            rows = _arrow(path, columns)
        case _:
            raise UserError(f"{path}: the file name must end in .jsonl, .json, .tsv or .parquet")
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
    entries = parse_json(read_text(path), str(path))
    if not isinstance(entries, list):
        raise UserError(f"{path}: must hold a list of objects, not {type_name(entries)}")
    for number, entry in enumerate(entries, start=1):
        yield number, f"{path}, entry {number}", entry


def _tsv(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Read a table whose first line names the columns; all values are texts."""
    problem = f"{path}: cannot be read as UTF-8 text with tabs"
    with (
        user_error(problem, OSError, UnicodeDecodeError, csv.Error),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.DictReader(file, delimiter="\t", strict=True)
        for number, entry in enumerate(reader, start=1):
            where = f"{path}, line {reader.line_num}"
            if None in entry or None in entry.values():
                raise UserError(f"{where}: must have {len(reader.fieldnames or ())} columns")
            yield number, where, entry


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, str, Any]]:
    with _opened(path) as file:
        names = [name for name in file.schema_arrow.names if columns is None or name in columns]
        yield from _of_batches(path, file.iter_batches(columns=names))


def _arrow(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, str, Any]]:
    """Read a stream of record batches, which `datasets` writes."""
    with user_error(f"{path}: Arrow needs pip install 'flowtrain[parquet]'", ImportError):
        import pyarrow
    problem = f"{path}: cannot be read as an Arrow stream"
    with (
        user_error(problem, OSError, pyarrow.ArrowException),
        pyarrow.memory_map(str(path)) as file,
        pyarrow.ipc.open_stream(file) as stream,
    ):
        names = [name for name in stream.schema.names if columns is None or name in columns]
        yield from _of_batches(path, (batch.select(names) for batch in stream))


def _of_batches(path: Path, batches: Iterable[Any]) -> Iterator[tuple[int, str, Any]]:
    number = 0
    for batch in batches:
        for entry in batch.to_pylist():
            number += 1
            yield number, f"{path}, row {number}", without_nulls(entry)


def without_nulls(row: Row) -> Row:
    """Return a row without the columns that are null, as tables have all columns in all rows."""
    return {key: value for key, value in row.items() if value is not None}


@contextmanager
def _opened(path: Path) -> Iterator[ParquetFile]:
    with user_error(f"{path}: Parquet needs pip install 'flowtrain[parquet]'", ImportError):
        import pyarrow
        from pyarrow.parquet import ParquetFile
    problem = f"{path}: cannot be read as Parquet"
    with user_error(problem, OSError, pyarrow.ArrowException), ParquetFile(path) as file:
        yield file
