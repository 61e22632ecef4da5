"""Processes on this and on other hosts, through pipes: their output, their end.

Each is a shell script, run by `sh` here and by the system's `ssh` elsewhere. Its standard input
carries the secrets and then signals, and its end asks the process to end: no process is left when
the launcher, or the connection to it, dies.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from flowtrain.launch.plan import Host
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
_MAX_CHARS = 1 << 16
"""Of a line of output; a longer one comes in pieces."""
_SERVING = "serving "
_print_lock = threading.Lock()


def over(host: Host, script: str) -> list[str]:
    """Return the command that runs a shell script on a host."""
    if host.is_local:
        return ["sh", "-c", script]
    return [*_SSH, "--", host.ssh, f"exec sh -c {shlex.quote(script)}"]


def secret_lines(secrets: Mapping[str, str]) -> str:
    """Return values of variables of this process, a line each; `secrets`: their names by the names
    that they get. Raises UserError for one that is missing.
    """
    lines = []
    for name in secrets.values():
        if not (value := os.environ.get(name, "")):
            raise UserError(f"{name} is not in the environment of the launcher")
        if "\n" in value or "\0" in value:
            raise UserError(f"{name} has more than one line")
        lines.append(f"{value}\n")
    return "".join(lines)


class Process:
    """A script under way. Its output goes to a file and, line by line, to standard output."""

    def __init__(self, name: str, words: Sequence[str], first: str, log: Path, width: int) -> None:
        """`first`: what it reads first. `width`: characters of the longest name."""
        self.name, self.log = name, log
        self.is_asked = self.is_reported = False
        """Whether a signal was sent to it; whether its end was told."""
        self._prefix = f"[{name}]".ljust(width + 2)
        self._serves = threading.Event()
        with user_error(f"cannot write {log}", OSError):
            out = log.open("a", encoding="utf-8")
        with user_error(words[0], OSError):
            # Ctrl-C reaches the launcher alone, which then asks each process once.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._tell(first)
        self._reader = threading.Thread(target=self._read, args=(out,), name=name, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """Return its exit code once it has ended."""
        return self._process.poll()

    @property
    def serves(self) -> bool:
        """Tell whether it has said where it listens."""
        return self._serves.is_set()

    def send(self, signal: str) -> None:
        """Send it a signal by name, such as TERM."""
        self.is_asked = True
        self._tell(f"{signal}\n")

    def wait(self, timeout_s: float) -> bool:
        """Tell whether it has ended within a time, and has been read to the end then."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(1.0)
        return True

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its code tells
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def _read(self, out: TextIO) -> None:
        assert self._process.stdout is not None
        # Bars redraw their line after a carriage return, which is for the file alone.
        lines = io.TextIOWrapper(
            self._process.stdout, encoding="utf-8", errors="replace", newline=""
        )
        with out, lines:
            while line := lines.readline(_MAX_CHARS):
                out.write(line)
                out.flush()
                if line.endswith("\r"):
                    continue
                say(self._prefix, line.rstrip("\r\n"))
                if line.startswith(_SERVING) and " at http" in line:
                    self._serves.set()


def say(prefix: str, line: str) -> None:
    """Print a line; several threads do."""
    with _print_lock:
        print(f"{prefix} {line}", file=sys.stdout, flush=True)
