"""The index of a corpus on disk. A folder that is there is whole: it is built under another name
and then renamed.

stamp.json       what it was built from; when that differs from what is asked for, the index is
built anew passages.jsonl   the passages, and offsets.npy, where each begins pages.npy        hashes
of the URLs of pages, sorted, and places.npy, the passages with them bm25/            the scores of
bm25s, or, with an embedder vectors.npy      one row per passage
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from flowtrain.config.search import Corpus
from flowtrain.tools.retrieval.bm25 import Bm25
from flowtrain.tools.retrieval.dense import Embedder, write_vectors
from flowtrain.tools.retrieval.passages import Passages, read_passages
from flowtrain.types import UserError

_FORMAT = 1
_PAGE = np.dtype([("hash", np.uint64), ("place", np.int64)])

Stamp = dict[str, str | int]


def ensure_index(corpus: Corpus, embedder: Embedder | None) -> tuple[Path, Stamp]:
    """The folder of the index and what it was built from; of several processes that want it, one
    builds it and the others wait.

    Raises UserError naming the key that is wrong: the file, its columns, or the folder.
    """
    folder = Path(corpus.index or f"{corpus.path}.index").resolve()
    stamp = _stamp(corpus, embedder)
    if _read_stamp(folder) != stamp:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_name(f"{folder.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system gives it back when its holder dies
                if _read_stamp(folder) != stamp:
                    _build(folder, corpus, embedder, stamp)
        except OSError as error:
            raise UserError(
                f"corpus.index={str(folder)!r}: cannot be written ({error.strerror}); name another "
                "folder"
            ) from error
    return folder, stamp


def page_url(url: str) -> str:
    """What tells pages apart: the URL without the part of the page it points at."""
    return url.partition("#")[0]


def page_hash(url: str) -> np.uint64:
    return np.uint64(
        int.from_bytes(
            hashlib.blake2b(page_url(url).encode(errors="replace"), digest_size=8).digest(), "big"
        )
    )


def _stamp(corpus: Corpus, embedder: Embedder | None) -> Stamp:
    try:
        file = Path(corpus.path).stat()
    except OSError as error:
        raise UserError(
            f"corpus.path={corpus.path!r}: cannot be read ({error.strerror})"
        ) from error
    source: Stamp = {
        "format": _FORMAT,
        "path": str(Path(corpus.path).resolve()),
        "num_bytes": file.st_size,
        "mtime_ns": file.st_mtime_ns,
    }
    keys: Stamp = {
        "text_key": corpus.text_key,
        "title_key": corpus.title_key,
        "url_key": corpus.url_key,
    }
    return source | keys | {"embedder": embedder.name if embedder else ""}


def _read_stamp(folder: Path) -> Stamp | None:
    path = folder / "stamp.json"
    return json.loads(path.read_text()) if path.exists() else None


def _build(folder: Path, corpus: Corpus, embedder: Embedder | None, stamp: Stamp) -> None:
    if folder.exists() and _read_stamp(folder) is None:
        raise UserError(
            f"corpus.index={str(folder)!r} is there and no index of ours; name another folder"
        )
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f"{folder.name}.part-", ignore_cleanup_errors=True
    ) as part:
        new = Path(part)
        Passages.write(
            new, tqdm(read_passages(corpus), desc=f"passages of {corpus.path}", unit="passage")
        )
        passages = Passages(new)
        _write_pages(new, passages)
        if embedder:
            write_vectors(new / "vectors.npy", _texts(passages), len(passages), embedder)
        else:
            _write_bm25(new / "bm25", passages, corpus)
        (new / "stamp.json").write_text(json.dumps(stamp))
        new.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        new.replace(folder)


def _write_bm25(folder: Path, passages: Passages, corpus: Corpus) -> None:
    try:
        Bm25.build(_texts(passages), progress="BM25").save(folder)
    except ValueError as error:
        raise UserError(
            f"corpus.path={corpus.path!r}: {error}; is {corpus.text_key!r} the right "
            "corpus.text_key?"
        ) from error


def _write_pages(folder: Path, passages: Passages) -> None:
    urls = ((passage.url, place) for place, passage in enumerate(passages))
    pages = np.fromiter(((page_hash(url), place) for url, place in urls if url), dtype=_PAGE)
    pages.sort(order=("hash", "place"))
    np.save(folder / "pages.npy", pages["hash"])
    np.save(folder / "places.npy", pages["place"])


def _texts(passages: Passages) -> Iterator[str]:
    """What a search looks through."""
    return (f"{passage.title}\n{passage.text}" for passage in passages)
