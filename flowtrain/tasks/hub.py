"""Data sets of the Hugging Face Hub, and folders in its form, through `datasets`.

Of a folder `datasets` tells which files make up a split. They are read as single files are, because
its reader of JSON makes numbers of texts and dates of others.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowtrain.records import UserError
from flowtrain.tasks.rows import Row, read_rows, without_nulls
from flowtrain.utils.errors import foreign, user_error

DEFAULT_SPLIT = "train"
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")

Rows = Iterator[tuple[int, str, Row]]
"""A row of `read_rows`."""


def is_hub_name(path: str) -> bool:
    """Return whether a text looks like "owner/name" or, with a configuration, "owner/name:main"."""
    return _NAME.fullmatch(path) is not None


def hub_rows(name: str, split: str) -> Rows:
    """Download a split, or take it from the cache, and yield its rows.

    Raises UserError without `datasets`, and when it cannot load the split.
    """
    match = _NAME.fullmatch(name)
    assert match, name
    key = f"tasks.path={name!r} is neither a file nor a folder"
    cure = (
        f"(hf download {match[1]} --repo-type dataset --local-dir FOLDER makes a "
        "folder for tasks.path)"
    )
    datasets = _library(f"{key}; a dataset of the Hub", cure)
    problem = f"{key}, and split {split!r} of that dataset cannot be loaded from the Hub {cure}"
    with foreign(problem):
        rows = datasets.load_dataset(match[1], match[2], split=split)
    for number, row in enumerate(rows, start=1):
        yield number, f"{name}, split {split}, row {number}", without_nulls(row)


def folder_rows(folder: Path, split: str, columns: Sequence[str] | None) -> Rows:
    """Yield the rows of a split in a folder, numbered through its files; `columns` as in
    `read_rows`.

    Raises UserError without `datasets`, when the folder has no such split, and when its files lie
    in several folders, which may be several data sets.
    """
    key = f"tasks.path={str(folder)!r}"
    datasets = _library(f"{key}: a folder", "(or name its files in tasks.mixture)")
    with foreign(f"{key}: holds no dataset"), _plainly_named(folder) as place:
        splits = datasets.load_dataset_builder(str(place)).config.data_files
        # Back to the folder itself, where `place` is a copy of its names.
        splits = {
            name: [folder / os.path.relpath(file, place) for file in files]
            for name, files in (splits or {}).items()
        }
    if split not in splits:
        raise UserError(
            f"tasks.split={split!r}: {folder} has no such split; it has "
            f"{', '.join(sorted(map(str, splits))) or 'none'}"
        )
    files = splits[split]
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        names = ", ".join(os.path.relpath(path, os.path.commonpath(folders)) for path in folders)
        raise UserError(
            f"{key}: split {split!r} lies in several folders, {names}; name one of them, or "
            "several in tasks.mixture"
        )
    number = 0
    for file in files:
        for _, where, row in read_rows(file, columns):
            number += 1
            yield number, where, row


@contextmanager
def _plainly_named(folder: Path) -> Iterator[Path]:
    """Give a folder a name without "[", "*" and "?", which `datasets` takes for a pattern: a copy
    of its names, with empty files, by which it tells the splits.
    """
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="flowtrain-") as place:
        for file in filter(Path.is_file, folder.rglob("*")):
            copy = Path(place) / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes() if file.name == "README.md" else b"")
        yield Path(place)


def _library(need: str, cure: str) -> Any:
    with user_error(f"{need} needs pip install -e '.[hub]' {cure}", ImportError):
        import datasets
    return datasets
