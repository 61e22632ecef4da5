"""The files of a model's folder as others write them; what is wrong with them is one sentence."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from flowtrain.records import UserError
from flowtrain.utils.text import printable

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.safetensors")
_MAX_CHARS = 300


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Raise `UserError("PROBLEM: reason")`, one line, in place of whatever transformers, tokenizers
    and peft raise over files that others have written; what they only remark is not printed.

    Args:
        problem: names the key and its value: "model.path='runs/warm' is no model".
    """
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{problem}: {reason_of(error)}") from error
    finally:
        log.setLevel(level)


def reason_of(error: Exception) -> str:
    """Return why a library cannot load something, in one line."""
    if "trust_remote_code" in str(error):
        return "it requires custom code (auto_map), which flowtrain never runs"
    text = printable(" ".join(str(error).split()), keep="")[:_MAX_CHARS].rstrip()
    is_bare = isinstance(error, LookupError) or not text
    return f"{type(error).__name__} {text}".rstrip() if is_bare else text


def weight_files(path: str, key: str) -> list[Path]:
    """Return the safetensors files of a folder that transformers would read; none where it has no
    weights, or is a name in the hub.

    Raises UserError for weights in other files, which are not read, and for files that are missing.
    """
    folder = Path(path)
    if not folder.is_dir():
        return []
    if (folder / _WHOLE).exists():
        return [folder / _WHOLE]
    if (folder / _INDEX).exists():
        with reading(f"{key}={path!r}: {_INDEX} names no files"):
            index = json.loads((folder / _INDEX).read_text())
            files = [folder / Path(name).name for name in sorted(set(index["weight_map"].values()))]
        if missing := [file.name for file in files if not file.exists()]:
            raise UserError(f"{key}={path!r} lacks {missing[0]}, which {_INDEX} names")
        return files
    if others := [file.name for kind in _OTHERS for file in sorted(folder.glob(kind))]:
        raise UserError(
            f"{key}={path!r} has its weights in {others[0]}, but only {_WHOLE} is supported: "
            "convert them, for example with "
            f"AutoModelForCausalLM.from_pretrained({path!r}).save_pretrained(FOLDER)"
        )
    return []


def stored(path: str, key: str) -> dict[str, tuple[Path, str]]:
    """Return the tensors in the files of a folder by name, each with its file and its dtype as
    safetensors calls it.
    """
    found: dict[str, tuple[Path, str]] = {}
    for file in weight_files(path, key):
        with reading(f"{key}={path!r}: {file.name} is damaged"), safe_open(file, "pt") as tensors:
            names = tensors.keys()
            found |= {name: (file, tensors.get_slice(name).get_dtype()) for name in names}
    return found


def has_own_head(path: str, key: str, ties: Mapping[str, str]) -> bool:
    """Return whether the files of a folder hold a tensor apart from the one that the config ties it
    to: another tensor, not a copy.
    """
    # Files of a model with more parts have other beginnings of names.
    ends = {_end(name): (file, name) for name, (file, _) in stored(path, key).items()}

    def load(name: str) -> Tensor:
        file, found = ends[_end(name)]
        with safe_open(file, "pt") as tensors:
            tensor: Tensor = tensors.get_tensor(found)
        return tensor

    pairs = [pair for pair in ties.items() if {_end(name) for name in pair} <= ends.keys()]
    return any(not torch.equal(load(one), load(two)) for one, two in pairs)


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])
