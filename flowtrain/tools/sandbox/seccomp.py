"""The strictest and fastest sandbox: the kernel lets the code compute and print, no more."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

from flowtrain.tools.sandbox.child import PR_SET_SECCOMP, SECCOMP_MODE_FILTER
from flowtrain.tools.sandbox.filters import MACHINES
from flowtrain.tools.sandbox.server import Backend

MODULES = """
array bisect calendar cmath collections collections.abc contextlib copy datetime decimal enum
fractions functools heapq io itertools json math numbers operator random re statistics string
textwrap time typing unicodedata _strptime encodings.ascii encodings.latin_1 encodings.utf_16
"""
"""The modules that the server imports; the code can import no others, because it opens no file."""


def backend() -> Backend:
    modules = MODULES.split()
    names = ", ".join(name for name in modules if "." not in name and name[0] != "_")
    return Backend(
        "seccomp", preload=tuple(modules), offers=f"of the standard library {names}; nothing else"
    )


def is_offered() -> bool:
    """Return whether the machine's system calls are known and its kernel takes filters."""
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    # To a kernel that takes filters a null pointer is a bad address.
    return bool(
        libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, 0, 0, 0) == -1
        and ctypes.get_errno() == errno.EFAULT
    )
