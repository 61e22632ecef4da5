"""Hostile programs that are put together at random, from the pieces that attacks are made of."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path

from tests.attacks.programs import NATIVE

WON = "GOT" + "THROUGH"
"""A program prints this when something succeeds that the sandbox denies."""
MARK = "flowtrain-hostile"
"""In the names of all files that a program tries to make."""

PRELUDE = f"""
import os, sys
def won(what):
    os.write(1, ("GOT" + "THROUGH " + what).encode())
    os._exit(0)
{NATIVE}
def pointer(text):
    kept.append(native["create_string_buffer"](text.encode() + bytes(200)))
    return native["addressof"](kept[-1])
kept = []
"""
PIECES = tomllib.loads((Path(__file__).parent / "pieces.toml").read_text())
ALLOWED = ("_posixsubprocess", "mmap(-1")
"""What stands in an expression that may have one where there are packages and files."""
PARENT = "' + str(os.getppid()) + '"


def compose(rng: random.Random, denied_calls: list[int], has_files: bool) -> str:
    """Write a program; `denied_calls` are numbers of system calls that must be refused."""
    parts = [PRELUDE]
    for _ in range(rng.randint(1, 5)):
        steps = [_step(rng, denied_calls, has_files) for _ in range(rng.randint(1, 4))]
        body = "\n".join(f"  {line}" for step in steps for line in step.split("\n"))
        # A frame within a class has two more spaces before it.
        frame = rng.choice(PIECES["frames"])
        if "  {body}" in frame:
            body = body.replace("\n", "\n  ")
        elif frame == "{body}":
            body = f"if 1:\n{body}"
        parts.append(frame.replace("{body}", body).replace("{small}", str(rng.randint(0, 9))))
    return "\n".join(parts)


def _step(rng: random.Random, denied_calls: list[int], has_files: bool) -> str:
    """Write a step of a program, which goes on when it fails."""
    kind = rng.random()
    names = {
        "signal": rng.choice([0, 9, 15, 17, 19, 29]),
        "small": rng.randint(0, 9),
        "mark": MARK,
        "process": rng.choice(["1", "self", "thread-self", PARENT]),
        "other": rng.choice(["1", PARENT]),
    }
    if kind < 0.4:
        call = rng.choice(PIECES["denied"]).format(**names)
        if has_files and any(name in call for name in ALLOWED):
            return f"try: {call}\nexcept BaseException: pass"
        return f"try: {call}; won({call!r})\nexcept BaseException: pass"
    if kind < 0.7:
        number = rng.choice(denied_calls) | rng.choice([0, 0, 0, 1 << 30])
        arguments = ", ".join(_argument(rng) for _ in range(6))
        return (
            f"try:\n  if call({number}, {arguments})[0] != -1: won('call {number}')\n"
            "except Exception: pass"
        )
    nuisance = rng.choice(PIECES["nuisances"]).format(**names)
    return f"try: {nuisance}\nexcept {rng.choice(['Exception', 'BaseException'])}: pass"


def _argument(rng: random.Random) -> str:
    """Write an argument of a system call: a number, a flag, a descriptor, a process, an address."""
    return rng.choice(
        [
            str(rng.choice([0, 1, 2, 3, -1, 7, 4096, 1 << rng.randint(0, 62)])),
            "os.getppid()",
            f"pointer({rng.choice([MARK, '/etc/passwd', '/proc/1/root', '', '/'])!r})",
        ]
    )
