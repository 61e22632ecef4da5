"""The configs that come with flowtrain, which `--config quickstart` names, in `configs/` of a
checkout and `flowtrain/configs/` of a wheel; and the planner that `--model.path quickstart` names.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from flowtrain.records import UserError
from flowtrain.utils.text import printable

_PACKAGE = Path(__file__).resolve().parents[1]
PLANNER = _PACKAGE / "trainer" / "toy" / "planner"
"""Made by `python -m examples.planner`: the warm-up of the quickstart, in bf16."""


def shipped_configs() -> dict[str, Path]:
    """Return the files that come with flowtrain by the name that `--config` takes, sorted."""
    wheel, checkout = _PACKAGE / "configs", _PACKAGE.parent / "configs"
    folder = wheel if wheel.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def config_path(name_or_path: str) -> str:
    """Return the file of a `--config`: a path, or the name of a config that comes with flowtrain.

    A file of that name in the working folder goes first.

    Raises:
        UserError: there is neither.
    """
    shipped = shipped_configs()
    if name_or_path in shipped and not Path(name_or_path).is_file():
        return str(shipped[name_or_path])
    if Path(name_or_path).exists():
        return name_or_path
    names = difflib.get_close_matches(Path(name_or_path).stem, shipped, n=1)
    hint = f"did you mean {names[0]}?" if names else "--help lists the built-in configs"
    raise UserError(f"--config {printable(name_or_path, keep='')}: no such file; {hint}")
