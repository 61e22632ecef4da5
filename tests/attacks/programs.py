"""Hostile programs, and what each kind of sandbox makes of them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """Expectations are regular expressions that the output or the error must match."""

    code: str
    seccomp: str
    bubblewrap: str
    limits: str
    """"": it does not stop this, and the program is not run there."""


def program(
    code: str, seccomp: str, bubblewrap: str | None = None, limits: str | None = None
) -> Program:
    """Write a program; results that are not given are as in the stricter sandbox before."""
    bubblewrap = seccomp if bubblewrap is None else bubblewrap
    return Program(code, seccomp, bubblewrap, bubblewrap if limits is None else limits)


# Reaches libc from inside, where `import ctypes` is barred: what stays forbidden even so is
# forbidden by the kernel.
NATIVE = """
cdll = next(c for c in object.__subclasses__() if c.__name__ == "CDLL")
native = cdll.__init__.__globals__
libc = cdll(None, use_errno=True)
libc.syscall.restype = native["c_long"]
def call(*arguments):
    native["set_errno"](0)
    result = libc.syscall(*[native["c_long"](a) for a in arguments])
    return result, native["get_errno"]()
"""

TIME = "^CPU time limit of 0.3 s exceeded$"
FLOOD = f"{TIME}|^output limit of 16 MiB exceeded$"
ASLEEP = "^wall time limit of 1 s exceeded$"

_FILE = tomllib.loads((Path(__file__).parent / "programs.toml").read_text())
_WORDS = {"$NATIVE": NATIVE, "$TIME": TIME, "$FLOOD": FLOOD, "$ASLEEP": ASLEEP}
NESTED = "(" * 5000 + ")" * 5000


def _filled(text: str) -> str:
    for word, value in _WORDS.items():
        text = text.replace(word, value)
    return text


ATTACKS = {name: program(*map(_filled, row)) for name, row in _FILE.items()} | {
    "nested source": program(NESTED, "SyntaxError|memory limit|MemoryError|RecursionError"),
    "lone surrogate": program("'\ud800'", "UnicodeEncodeError"),
}
