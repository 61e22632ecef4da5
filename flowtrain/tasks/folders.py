"""Files of a data set in a folder, as the Hub, `datasets` and people lay them out."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from flowtrain.tasks.rows import SUFFIXES
from flowtrain.types import UserError

DEFAULT_SPLIT = "train"

_SHARD = re.compile(r"(.+?)-[0-9]{5}-of-[0-9]{5}(?:-[0-9a-f]+)?")
_SPLIT = re.compile(r"(?:^|[\W_0-9])(train|validation|valid|dev|test)(?:$|[\W_0-9])", re.IGNORECASE)
_NAMELESS = ("data", "dataset", "cache")
"""Stems of shards that do not name the split."""
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What `datasets` writes about a data set."""


def split_files(folder: Path, split: str) -> list[Path]:
    """Return the files of a split in a folder, in order of name.

    A split is named by a file (train-00000-of-00002.parquet, test.jsonl) or by the folders around
    it (train/x.parquet); files where nothing is named are all "train". Raises UserError when the
    folder has no such split, and when its files are not one data set: of several folders, or in
    several formats.
    """
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if path.suffix in SUFFIXES and path.name not in _NO_ROWS and not is_hidden:
            found[_split(parts)].append(path)
    if not found:
        raise UserError(f"tasks.path={str(folder)!r}: the folder holds no {_list(SUFFIXES)} file")
    nameless = found.pop("", [])
    splits = dict(found) or {DEFAULT_SPLIT: nameless}
    if split not in splits:
        raise UserError(
            f"tasks.split={split!r}: {folder} has no such split; it has {_list(sorted(splits))}"
        )
    files = splits[split]
    _check_one_set(folder, split, files)
    return files


def _split(parts: tuple[str, ...]) -> str:
    """Return the split that the name of a file, else the nearest folder, names; "" without one."""
    *folders, name = parts
    stem = name.rpartition(".")[0]
    shard = _SHARD.fullmatch(stem)
    if shard and shard[1] not in _NAMELESS:
        return shard[1].rpartition("-")[2]  # of NAME-train, as the cache of `datasets` has it
    names = (stem, *reversed(folders))
    return next((match[1].lower() for name in names if (match := _SPLIT.search(name))), "")


def _check_one_set(folder: Path, split: str, files: list[Path]) -> None:
    folders = sorted({str(path.parent.relative_to(folder)) for path in files})
    suffixes = sorted({path.suffix for path in files})
    if len(folders) > 1:
        raise UserError(
            f"tasks.path={str(folder)!r}: split {split!r} lies in several folders, "
            f"{_list(folders)}; name one of them, or several in tasks.mixture"
        )
    if len(suffixes) > 1:
        raise UserError(
            f"tasks.path={str(folder)!r}: split {split!r} has files of several formats, "
            f"{_list(suffixes)}; name a file, or remove those of one format"
        )


def _list(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names)
