"""Data sets of the Hugging Face Hub, and folders in its form, through `datasets`.

Of a folder `datasets` tells which files make up a split. They are read as single files are, because
its reader of JSON makes numbers of texts and dates of others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowtrain.tasks.rows import Row, read_rows, without_nulls
from flowtrain.types import UserError
from flowtrain.utils.errors import foreign, user_error

DEFAULT_SPLIT = "train"
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")

Rows = Iterator[tuple[int, str, Row]]
"""What `read_rows` yields."""


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
    datasets = _library(f"{key}; a data set of the Hub", cure)
    problem = f"{key}, and split {split!r} of that data set cannot be loaded from the Hub {cure}"
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
    with foreign(f"{key}: holds no data set"):
        found = datasets.load_dataset_builder(str(folder)).config.data_files
    if split not in (found := found or {}):
        raise UserError(
            f"tasks.split={split!r}: {folder} has no such split; it has "
            f"{', '.join(sorted(map(str, found))) or 'none'}"
        )
    files = [Path(file) for file in found[split]]
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        names = ", ".join(os.path.relpath(each, os.path.commonpath(folders)) for each in folders)
        raise UserError(
            f"{key}: split {split!r} lies in several folders, {names}; name one of them, or "
            "several in tasks.mixture"
        )
    number = 0
    for file in files:
        for _, where, row in read_rows(file, columns):
            number += 1
            yield number, where, row


def _library(what: str, cure: str) -> Any:
    with user_error(f"{what} needs pip install 'flowtrain[hub]' {cure}", ImportError):
        import datasets
    return datasets
