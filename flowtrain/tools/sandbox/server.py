"""A fork server (`child.py`): its process, and the socket for its requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowtrain.tools.sandbox.filters import filter_program

PYTHON = os.path.realpath(sys.executable)
CHILD = Path(__file__).with_name("child.py")
_MAIN = "import sys; exec(compile(open(sys.argv.pop(1)).read(), '<sandbox>', 'exec'))"
"""Runs the file under a name that tells the code nothing about where it lies."""
START_S = 60.0
"""Wall time that a fork server may take to start (usually 0.1 s, longer on a cold disk), and that
an answer may take beyond the wall time of the run."""


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


class Server:
    """A fork server process. A single thread at a time uses it; any thread may kill it."""

    def __init__(self, backend: Backend) -> None:
        """Start the process; `start` waits until it is ready."""
        self._socket, child_socket = socket.socketpair()
        # Keeps the descriptor open until this object is gone, so that `kill` in one thread cannot
        # pull it from under a read in another.
        self._answers = self._socket.makefile("rb")
        self._is_ready = False
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
        with child_socket:
            self._process = subprocess.Popen(
                # Nothing of the host's environment, folder and site-packages gets in. Not -I, which
                # would ignore the hash seed too.
                [*backend.argv, *command, "-c", _MAIN, str(CHILD), json.dumps(setup)],
                stdin=child_socket.fileno(),
                stdout=child_socket.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                start_new_session=True,
            )

    def lives(self) -> bool:
        return self._process.poll() is None

    def start(self) -> None:
        """Wait until it is ready; raises OSError where it is lost, or its time is up."""
        if not self._is_ready:
            self._receive(START_S)
            self._is_ready = True

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; raises OSError as `start` does."""
        body = json.dumps(request).encode()
        self._socket.settimeout(START_S)
        self._socket.sendall(len(body).to_bytes(4, "big") + body)
        return self._receive(request["wall_s"] + START_S)

    def kill(self) -> None:
        """Kill the process and all processes that it started, and remove its folder."""
        with self._kill_lock:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            with contextlib.suppress(OSError):  # the server has closed its end
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            if self._folder is not None:
                self._folder.cleanup()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._socket.settimeout(timeout_s)
        header = self._answers.read(4)
        num_bytes = int.from_bytes(header, "big")
        body = self._answers.read(num_bytes)
        if not header or len(body) < num_bytes:
            raise ConnectionResetError("the fork server has closed its end")
        return dict(json.loads(body))
