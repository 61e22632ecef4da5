"""The index of a corpus on disk. A folder is complete: it is built under another name and renamed.

stamp.json        the source of the index, which is built again when the stamp does not match
passages.sqlite   the passages, by their numbers
bm25/             the scores of bm25s
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from flowtrain.config.search import Corpus
from flowtrain.records import UserError
from flowtrain.tools.retrieval.bm25 import Bm25
from flowtrain.tools.retrieval.passages import Passage, read_passages
from flowtrain.utils.errors import user_error
from flowtrain.utils.files import sync, sync_tree
from flowtrain.utils.terminal import bar
from flowtrain.utils.text import printable

_FORMAT = 3
DATABASE = "passages.sqlite"

Stamp = dict[str, str | int]


def ensure_index(corpus: Corpus) -> tuple[Path, Stamp]:
    """Return the folder of the index and its stamp; build the index unless it is up to date.

    Of several processes one builds it and the others wait. Raises UserError, which names the key of
    the wrong file, column or folder.
    """
    folder = Path(corpus.index or f"{corpus.path}.index").resolve()
    stamp = _stamp(corpus)
    if _read_stamp(folder) != stamp:
        with user_error(f"corpus.index={str(folder)!r} cannot be written", OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_name(f"{folder.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when its holder dies
                # Read again, because another process may have built it meanwhile.
                if _read_stamp(folder) != stamp:
                    _build(folder, corpus, stamp)
    return folder, stamp


def _stamp(corpus: Corpus) -> Stamp:
    with user_error(f"corpus.path={corpus.path!r} cannot be read", OSError):
        file = Path(corpus.path).stat()
    return {
        "format": _FORMAT,
        "path": str(Path(corpus.path).resolve()),
        "num_bytes": file.st_size,
        "mtime_ns": file.st_mtime_ns,
        "text_key": corpus.text_key,
    }


def _read_stamp(folder: Path) -> Stamp | None:
    path = folder / "stamp.json"
    return json.loads(path.read_text()) if path.exists() else None


def _build(folder: Path, corpus: Corpus, stamp: Stamp) -> None:
    if folder.exists() and _read_stamp(folder) is None:
        raise UserError(
            f"corpus.index={str(folder)!r} exists and is not a flowtrain index; choose another "
            "folder"
        )
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f"{folder.name}.part-", ignore_cleanup_errors=True
    ) as part:
        index = Path(part, "new")
        index.mkdir()
        label = printable(f"passages of {corpus.path}", keep="")
        passages = bar(read_passages(corpus), desc=label, unit="passage")
        with closing(sqlite3.connect(index / DATABASE)) as database:
            _write_passages(database, passages)
            _write_bm25(index / "bm25", database, corpus)
        (index / "stamp.json").write_text(json.dumps(stamp))
        sync_tree(index)
        if folder.exists():
            folder.rename(Path(part, "old"))
        index.rename(folder)
        sync(folder.parent)


def _write_passages(database: sqlite3.Connection, passages: Iterable[Passage]) -> None:
    rows = ((number, passage.text, passage.title) for number, passage in enumerate(passages))
    with database:
        database.execute(
            "CREATE TABLE passages (number INTEGER PRIMARY KEY, text TEXT, title TEXT)"
        )
        if not database.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows).rowcount:
            raise UserError("corpus.path: the file holds no passages; at least one is needed")


def _write_bm25(folder: Path, database: sqlite3.Connection, corpus: Corpus) -> None:
    rows = database.execute("SELECT title || char(10) || text FROM passages ORDER BY number")
    with user_error(
        f"corpus.path={corpus.path!r}, corpus.text_key={corpus.text_key!r}", ValueError
    ):
        Bm25.build((text for (text,) in rows), progress="BM25").save(folder)
