"""What is left where files are wanted and there is no bubblewrap: a process with caps on the host's
own file system. It says so.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Sequence

from flowtrain.tools.sandbox.host import Backend
from flowtrain.tools.sandbox.packages import folders, probe
from flowtrain.tools.sandbox.seccomp import MODULES, is_offered
from flowtrain.types import UserError


def backend(packages: Sequence[str]) -> Backend:
    """Warns. As root, each server's code runs as a user of its own, one that owns nothing; as
    anybody else, as that user.
    """
    is_root = os.geteuid() == 0
    warnings.warn(warning(is_root, is_offered()), RuntimeWarning, stacklevel=4)
    # Loaded beforehand, as that user may not be able to read the interpreter's folder.
    preload = (*MODULES.split(), "pathlib", "tempfile", *packages)
    nobodies = itertools.islice(itertools.cycle(range(35_534, 65_534)), os.getpid() % 30_000, None)
    uids = nobodies if is_root else itertools.repeat(0)
    offers = ", ".join(["the standard library", *packages])
    made = Backend(
        "limits",
        preload=preload,
        path=folders(packages),
        scratch="temporary",
        uids=uids,
        must_filter=is_offered(),
        offers=offers,
    )
    if reason := probe(made):
        raise UserError(f"agent.sandbox='limits': {reason}")
    return made


def warning(is_root: bool, has_seccomp: bool) -> str:
    """What it cannot stop."""
    can = ["READ ALL FILES THAT ANY USER MAY READ" if is_root else "READ AND WRITE YOUR FILES"]
    if not has_seccomp:
        can += ["USE THE NETWORK"] if is_root else ["USE THE NETWORK", "KILL YOUR PROCESSES"]
    return (
        f"sandbox 'limits': code that a model wrote can {' and '.join(can)}; install bubblewrap, "
        "or use a container of its own"
    )
