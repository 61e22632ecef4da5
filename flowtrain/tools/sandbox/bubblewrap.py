"""Code that wants files and installed packages: namespaces of its own, made by bubblewrap.

The code sees a read-only root with the interpreter, its standard library, the system's shared
libraries and the folders of the packages that it was granted, and an empty /scratch in memory that
ends with the run. No network device but a dead loopback, no process but its own, no shell, no host
name, no environment.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from flowtrain.tools.sandbox.host import CHILD, PYTHON, Backend
from flowtrain.tools.sandbox.packages import folders, probe
from flowtrain.tools.sandbox.seccomp import is_offered

SCRATCH_BYTES = 64 << 20
NOBODY = 65534


def backend(packages: Sequence[str]) -> Backend:
    """As root the code becomes another user; as anybody else, bubblewrap makes a user namespace."""
    is_root, path = os.geteuid() == 0, folders(packages)
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
    """Why bubblewrap does not work here; "" when it does."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (the program bwrap) is not installed"
    reason = probe(backend)
    return f"bubblewrap does not work here: {reason}" if reason else ""


def _argv(path: Sequence[str], is_root: bool) -> list[str]:
    argv = [shutil.which("bwrap") or "bwrap", "--die-with-parent"]
    argv += [
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--hostname",
        "sandbox",
    ]
    if is_root:
        # To make the code another user, and to end it all the same.
        argv += [
            "--cap-drop",
            "ALL",
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--cap-add",
            "CAP_KILL",
        ]
    libraries = [
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        f"{sys.base_prefix}/lib",
        sysconfig.get_path("stdlib"),
    ]
    places = [*libraries, "/etc/ld.so.cache", *path, PYTHON, str(CHILD)]
    for folder in sorted(
        {str(folder) for place in places for folder in Path(place).parents} - {"/"}
    ):
        argv += [
            "--perms",
            "0755",
            "--dir",
            folder,
        ]  # bubblewrap's own would be closed to other users
    for place in places:
        argv += ["--ro-bind-try", place, place]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        argv += ["--dev-bind", device, device]
    argv += [
        "--perms",
        "1777",
        "--size",
        str(SCRATCH_BYTES),
        "--tmpfs",
        "/scratch",
        "--remount-ro",
        "/",
    ]
    return [*argv, "--chdir", "/scratch", "--"]
