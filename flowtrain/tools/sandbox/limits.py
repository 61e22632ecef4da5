"""Fallback without bubblewrap: resource limits only, on the host's file system, with a warning."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Sequence

from flowtrain.records import UserError
from flowtrain.tools.sandbox.packages import folders, probe
from flowtrain.tools.sandbox.seccomp import MODULES, is_offered
from flowtrain.tools.sandbox.server import Backend


def backend(packages: Sequence[str]) -> Backend:
    """Warn and make the backend.

    Root gives each server's code a user of its own that owns nothing; others run it as themselves.
    """
    is_root = os.geteuid() == 0
    warnings.warn(warning(is_root, is_offered()), RuntimeWarning, stacklevel=4)
    # Loaded beforehand, because that user may be unable to read the interpreter's folder.
    preload = (*MODULES.split(), "pathlib", "tempfile", *packages)
    nobodies = itertools.islice(itertools.cycle(range(35_534, 65_534)), os.getpid() % 30_000, None)
    uids = nobodies if is_root else itertools.repeat(0)
    sandbox = Backend(
        "limits",
        preload=preload,
        path=folders(packages),
        scratch="temporary",
        uids=uids,
        must_filter=is_offered(),
        offers=", ".join(["the standard library", *packages]),
    )
    if reason := probe(sandbox):
        raise UserError(f"agent.sandbox='limits': {reason}")
    return sandbox


def warning(is_root: bool, has_seccomp: bool) -> str:
    """Return the warning that says what this sandbox cannot stop."""
    can = ["READ ALL FILES THAT ANY USER MAY READ" if is_root else "READ AND WRITE YOUR FILES"]
    if not has_seccomp:
        can += ["USE THE NETWORK"] if is_root else ["USE THE NETWORK", "KILL YOUR PROCESSES"]
    return (
        f"sandbox 'limits': model-written code can {' and '.join(can)}; install bubblewrap, or "
        "run in a separate container"
    )
