"""Installed packages that the code may import."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from flowtrain.records import UserError
from flowtrain.tools.sandbox.server import PYTHON, START_S, Backend


def folders(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of the packages; everything else in them can be imported too."""
    paths: dict[str, None] = {}
    for name in packages:
        spec = find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.has_location or spec.origin is None:
            raise UserError(
                f"agent.python_packages: no installed package can be imported as {name!r}"
            )
        file = Path(spec.origin).resolve()
        paths[str(file.parents[1] if spec.submodule_search_locations else file.parent)] = None
    return tuple(paths)


def probe(backend: Backend) -> str:
    """Start an interpreter as the backend does; return why it does not start, or "".

    Raises UserError when it starts, but cannot import a package.
    """
    code = (
        f"import sys; print('started', flush=True); sys.path += {list(backend.path)}; import "
        f"{', '.join(('os', *backend.preload))}"
    )
    command = [*backend.argv, PYTHON, "-P", "-s", "-S", "-B", "-c", code]
    try:
        process = subprocess.run(
            command,
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not start within {START_S:g} s"
    if process.returncode == 0:
        return ""
    reason = process.stderr.strip().rpartition("\n")[2] or f"exit status {process.returncode}"
    if process.stdout:
        raise UserError(
            f"agent.python_packages cannot be imported for agent.sandbox='{backend.name}': {reason}"
        )
    return reason
