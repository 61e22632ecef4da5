"""Passages: what a file of them says, and how they lie on disk beside their index."""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain.config.search import Corpus
from flowtrain.types import UserError


@dataclass(frozen=True, slots=True)
class Passage:
    """One text that a search finds."""

    text: str
    title: str = ""
    url: str = ""


def read_passages(corpus: Corpus) -> Iterator[Passage]:
    """The passages of a .jsonl or .parquet file, in file order.

    Raises UserError naming the file, the line or row, the key and what it may be.
    """
    path = Path(corpus.path)
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(f"corpus.path={corpus.path!r}: the file name must end in .jsonl or .parquet")
    keys = {name: getattr(corpus, name) for name in ("text_key", "title_key", "url_key")}
    for where, row in readers[path.suffix](path, corpus):
        for name, key in keys.items():
            value = row.get(key)
            if not isinstance(value, str) and (value is not None or name == "text_key"):
                raise UserError(f"{where}: {key!r} must be a string, not {str(value)[:60]!r}; corpus.{name} may name another")
        yield Passage(*(row.get(key) or "" for key in keys.values()))


def _read_jsonl(path: Path, corpus: Corpus) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file, line 3", object) of every line."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            # Not splitlines: JSON strings may hold U+2028 and its like as they are.
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield (where := f"{path}, line {number}"), _object(line, where, corpus)
    except OSError as error:
        raise UserError(f"corpus.path={corpus.path!r}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"corpus.path={corpus.path!r}: is not UTF-8 text ({error.reason})") from error


def _object(line: str, where: str, corpus: Corpus) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # fails for half a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON that can be read ({error})") from error
    if not isinstance(row, dict) or corpus.text_key not in row:
        has = f"the keys {', '.join(map(repr, row))}" if isinstance(row, dict) else "no object"
        raise UserError(f"{where}: has {has} and not corpus.text_key={corpus.text_key!r}; name the one that holds the passage")
    return row


def _read_parquet(path: Path, corpus: Corpus) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file, row 3", columns) of every row; of the file only a batch is in memory."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except OSError as error:
        raise UserError(f"corpus.path={corpus.path!r}: cannot be read ({error.strerror or error})") from error
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"corpus.path={corpus.path!r}: is not Parquet ({error})") from error
    names = file.schema_arrow.names
    if corpus.text_key not in names:
        columns = ", ".join(map(repr, names))
        raise UserError(
            f"{path}: has the columns {columns} and not corpus.text_key={corpus.text_key!r}; name the one that holds the passage"
        )
    number = 0
    for batch in file.iter_batches(1024, columns=[n for n in names if n in (corpus.text_key, corpus.title_key, corpus.url_key)]):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


class Passages:
    """Passages on disk: `passages.jsonl` has one [text, title, url] per line, `offsets.npy` where each begins. Both are memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        with (folder / "passages.jsonl").open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(folder: Path, passages: Iterable[Passage]) -> None:
        offsets = array("q", [0])
        with (folder / "passages.jsonl").open("wb") as file:
            for passage in passages:
                file.write(json.dumps(astuple(passage), ensure_ascii=False).encode() + b"\n")
                offsets.append(file.tell())
        if len(offsets) == 1:
            raise UserError("corpus.path: the file holds no passages; at least one is needed")
        np.save(folder / "offsets.npy", np.array(offsets))

    def __iter__(self) -> Iterator[Passage]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Passage:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = map(int, self._offsets[index : index + 2])
        return Passage(*json.loads(self._lines[start:end]))
