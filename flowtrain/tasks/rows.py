"""The rows of a file of questions: JSONL (one object per line), JSON (a list of objects) or
Parquet.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.types import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".jsonl", ".json", ".parquet")

Row = dict[str, Any]


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, str, Row]]:
    """(1-based number, "file, line 3", row) for each row; of a Parquet file only the `columns` that
    it has are read (None: all).

    Raises UserError naming the file, and the line or entry that is wrong.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: the file name must end in .jsonl, .json or .parquet")
    read = {".jsonl": _jsonl, ".json": _json}.get(path.suffix)
    for number, where, entry in read(path) if read else _parquet(path, columns):
        if not isinstance(entry, dict):
            raise UserError(f"{where}: must be an object, not {type_name(entry)}")
        yield number, where, entry


def column_names(path: Path) -> tuple[str, ...]:
    """Of a Parquet file all columns, else the keys of the first row; () where there is none."""
    if path.suffix == ".parquet":
        with _opened(path) as file:
            return tuple(file.schema_arrow.names)
    return next((tuple(row) for _, _, row in read_rows(path)), ())


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
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # fails for half a surrogate pair, which no tokenizer takes
        return value
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: is not JSON ({error.msg} at line {error.lineno}, column {error.colno})"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an integer of too many digits; brackets nested too deep
        raise UserError(f"{where}: is not JSON that can be read ({error})") from error


def type_name(value: Any) -> str:
    """What a person calls the type of a JSON value."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _jsonl(path: Path) -> Iterator[tuple[int, str, Any]]:
    """A line at a time: files of passages have millions. Lines of bytes end at a line feed alone;
    JSON strings may hold U+2028 as it is.
    """
    place = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode()
                place += len(line)
                if text.strip():
                    yield (
                        number,
                        f"{path}, line {number}",
                        parse_json(text, f"{path}, line {number}"),
                    )
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {place + error.start})") from error


def _json(path: Path) -> Iterator[tuple[int, str, Any]]:
    entries = parse_json(read_text(path), str(path))
    if not isinstance(entries, list):
        raise UserError(f"{path}: must hold a list of objects, not {type_name(entries)}")
    for number, entry in enumerate(entries, start=1):
        yield number, f"{path}, entry {number}", entry


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, str, Any]]:
    with _opened(path) as file:
        names = [name for name in file.schema_arrow.names if columns is None or name in columns]
        number = 0
        for batch in file.iter_batches(columns=names):
            for entry in batch.to_pylist():
                number += 1
                yield (
                    number,
                    f"{path}, row {number}",
                    {key: value for key, value in entry.items() if value is not None},
                )


@contextmanager
def _opened(path: Path) -> Iterator[ParquetFile]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(
            f"{path}: reading Parquet needs pyarrow (pip install 'flowtrain[parquet]')"
        ) from error
    try:
        with ParquetFile(path) as file:
            yield file
    except OSError as error:  # some of pyarrow's own have no strerror
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{path}: is not a Parquet file that can be read ({str(error).splitlines()[0]})"
        ) from error
