"""One fork server (`child.py`): its process, and the socket over which it is asked for runs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowtrain.tools.sandbox.channel import Channel
from flowtrain.tools.sandbox.clocks import Clock, TimeLimit
from flowtrain.tools.sandbox.filters import filter_program

PYTHON = os.path.realpath(sys.executable)
CHILD = Path(__file__).with_name("child.py")
START_S = 60.0
"""Wall time that a fork server may take to start; 0.1 s is usual, a cold disk takes longer."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to start fork servers, which decides what separates the code from the host."""

    name: str
    argv: tuple[str, ...] = ()
    """Words of the command before the interpreter and its arguments."""
    preload: tuple[str, ...] = ()
    """Modules that are imported before the code runs."""
    path: tuple[str, ...] = ()
    """Folders of installed packages."""
    scratch: Literal["", "/scratch", "temporary"] = ""
    """The folder that the code may write: none, one that `argv` provides, or one that is made here.

    A run that changes something there ends its server, and the folder with it.
    """
    uids: Iterator[int] = field(default_factory=lambda: itertools.repeat(0))
    """The user that the code of each server becomes; 0: no change."""
    must_filter: bool = True
    """Refuse to run without a seccomp filter."""
    offers: str = ""
    """The modules that the code can import, in words."""


class NotStarted(Exception):
    """A run has not begun; the text says why."""


class Server:
    """One fork server. One thread at a time talks to it; any thread may kill it."""

    def __init__(self, backend: Backend) -> None:
        """Start the process; `begin` waits until it is ready."""
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._kill_lock = threading.RLock()
        uid = next(backend.uids)
        scratch = str(backend.scratch)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if backend.scratch == "temporary":
            self._folder = tempfile.TemporaryDirectory(
                prefix="flowtrain-", ignore_cleanup_errors=True
            )
            scratch = self._folder.name
            if uid:
                os.chown(scratch, uid, uid)
        setup = {
            "preload": backend.preload,
            "path": backend.path,
            "scratch": scratch,
            "uid": uid,
            "filter": filter_program(os.uname().machine, bool(scratch)).hex(),
            "must_filter": backend.must_filter,
        }
        command = [PYTHON, "-P", "-s", "-S", "-B", "-X", "utf8", "-W", "ignore"]
        # The filter allows no threads.
        environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                # Nothing of the host's environment, folder and site-packages gets in. Not -I, which
                # would ignore the hash seed too.
                [*backend.argv, *command, str(CHILD), json.dumps(setup)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                start_new_session=True,
            )

    def is_usable(self) -> bool:
        """Return whether it lives, and nobody has stopped it."""
        return self._process.poll() is None and not self._channel.is_stopped()

    def begin(self, request: Mapping[str, Any]) -> Clock:
        """Send a request and return the clock of its run, which begins; raises NotStarted."""
        try:
            until = self._wait_until_ready()
            self._channel.send(request, until)
            _, pid = self._channel.receive(until)  # from the process of the run
        except TimeoutError:
            raise NotStarted(f"the sandbox's process did not start within {START_S:g} s") from None
        except ConnectionError as error:
            raise NotStarted(f"the sandbox's process did not start: {error}") from error
        return Clock(pid)

    def _wait_until_ready(self) -> float:
        until = time.monotonic() + START_S
        if not self._channel.pid:
            _, self._channel.pid = self._channel.receive(until)
        return until

    def finish(self, clock: Clock, limit: TimeLimit) -> dict[str, Any]:
        """Return the answer to the request that has begun; see `Channel`."""
        return self._channel.finish(clock, limit)

    def kill(self) -> None:
        """Kill the process and all processes that it started, and remove its folder."""
        with self._kill_lock:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._channel.close()
            if self._folder is not None:
                self._folder.cleanup()
