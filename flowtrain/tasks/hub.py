"""Rows of a data set of the Hugging Face Hub, through `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flowtrain.tasks.rows import Row, without_nulls
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")


def is_hub_name(path: str) -> bool:
    """Return whether a text looks like "owner/name" or, with a configuration, "owner/name:main"."""
    return _NAME.fullmatch(path) is not None


def hub_rows(name: str, split: str) -> Iterator[tuple[int, str, Row]]:
    """Download a split, or take it from the cache, and yield what `read_rows` does.

    Raises UserError without `datasets`, and when it cannot load the split.
    """
    match = _NAME.fullmatch(name)
    assert match, name
    key = f"tasks.path={name!r} is neither a file nor a folder"
    cure = (
        f"(hf download {match[1]} --repo-type dataset --local-dir FOLDER makes a "
        "folder for tasks.path)"
    )
    problem = f"{key}; a data set of the Hub needs pip install 'flowtrain[hub]' {cure}"
    with user_error(problem, ImportError):
        import datasets
        from datasets.exceptions import DatasetsError
    try:
        rows = datasets.load_dataset(match[1], match[2], split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{key}, and split {split!r} of that data set cannot be loaded from the Hub {cure}: "
            f"{reason}"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield number, f"{name}, split {split}, row {number}", without_nulls(row)
