"""Sandbox for code that needs files and installed packages: own namespaces, made by bubblewrap.

The code sees a read-only root with the interpreter, its standard library, the system's shared
libraries and the folders of the granted packages, and an empty /scratch in memory that ends with
the run. The code has no network device but a dead loopback, sees no other process, no shell, no
host name and no environment.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from flowtrain.tools.sandbox.packages import folders, probe
from flowtrain.tools.sandbox.seccomp import is_offered
from flowtrain.tools.sandbox.server import CHILD, PYTHON, Backend

SCRATCH_BYTES = 64 << 20
NOBODY = 65534


def backend(packages: Sequence[str]) -> Backend:
    """Make the backend: root turns the code into another user, others get a user namespace."""
    is_root = os.geteuid() == 0
    path = folders(packages)
    return Backend(
        "bubblewrap",
        argv=tuple(_argv(path, is_root)),
        preload=tuple(packages),
        path=path,
        scratch="/scratch",
        uids=itertools.repeat(NOBODY if is_root else 0),
        must_filter=is_offered(),
        offers=", ".join(["the standard library", *packages]),
    )


def why_not(backend: Backend) -> str:
    """Return why bubblewrap does not work here, or ""."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (the program bwrap) is not installed"
    reason = probe(backend)
    return f"bubblewrap does not work here: {reason}" if reason else ""


def _argv(path: Sequence[str], is_root: bool) -> list[str]:
    argv = [shutil.which("bwrap") or "bwrap", "--die-with-parent"]
    for namespace in ("pid", "net", "ipc", "uts", "cgroup-try"):
        argv.append(f"--unshare-{namespace}")
    argv += ["--hostname", "sandbox"]
    if is_root:
        # The capabilities that it takes to make the code another user, and to kill it then.
        argv += ["--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            argv += ["--cap-add", capability]
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib"]
    libraries.append(sysconfig.get_path("stdlib"))
    visible = [*libraries, "/etc/ld.so.cache", *path, PYTHON, str(CHILD)]
    parents = {str(folder) for name in visible for folder in Path(name).parents} - {"/"}
    for folder in sorted(parents):
        # Folders that bubblewrap makes by itself would be closed to other users.
        argv += ["--perms", "0755", "--dir", folder]
    for name in visible:
        argv += ["--ro-bind-try", name, name]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        argv += ["--dev-bind", device, device]
    argv += ["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/scratch"]
    return [*argv, "--remount-ro", "/", "--chdir", "/scratch", "--"]
