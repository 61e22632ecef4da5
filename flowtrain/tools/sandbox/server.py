"""One fork server (`child.py`): its process, and the socket over which it is asked for runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowtrain.tools.sandbox.clocks import Clock, TimeLimit, state
from flowtrain.tools.sandbox.filters import filter_program

PYTHON = os.path.realpath(sys.executable)
CHILD = Path(__file__).with_name("child.py")
START_S = 60.0
"""Wall time that a fork server may take to start; 0.1 s is usual, a cold disk takes longer."""
STOP_S = 10.0
"""Wall time that it may take to end a run and to answer."""
LOOK_S = 0.05
"""Wall time between two looks at the clocks of a run."""
_CREDENTIALS = struct.Struct("3i")
"""Of a message's sender: process, user, group."""


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
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        # The kernel then tells which process sent a message, by its number in our namespace.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Keeps the descriptor open until this object is gone, so that `kill` in one thread cannot
        # pull it from under a read in another.
        self._keeper = self._socket.makefile("rb")
        self.pid = 0
        """The server itself, behind what `Backend.argv` starts; 0: it is not ready yet."""
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
        return self._process.poll() is None and not self._is_stopped()

    def begin(self, request: Mapping[str, Any]) -> Clock:
        """Send a request and return the clock of its run, which begins; raises NotStarted."""
        until = time.monotonic() + START_S
        try:
            if not self.pid:
                _, self.pid = self._receive(until)
            self._send(request, until)
            _, pid = self._receive(until)  # from the process of the run
        except TimeoutError:
            raise NotStarted(f"the sandbox's process did not start within {START_S:g} s") from None
        except ConnectionError as error:
            raise NotStarted(f"the sandbox's process did not start: {error}") from error
        return Clock(pid)

    def finish(self, clock: Clock, limit: TimeLimit) -> dict[str, Any]:
        """Return the answer to the request whose run has begun, within the limit's wall time and
        STOP_S; raises ConnectionError when the server is lost.
        """
        reason = ""
        while not self._wait(select.POLLIN, time.monotonic() + LOOK_S):
            if reason := limit.exceeded(clock):
                break
        until = time.monotonic() + STOP_S
        try:
            if reason:
                self._send({"stop": reason}, until)
            return self._receive(until)[0]
        except TimeoutError:
            raise ConnectionResetError("the fork server does not answer") from None

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

    def _is_stopped(self) -> bool:
        """Return whether a signal has stopped it: code without a filter can."""
        return self.pid > 0 and state(self.pid) == "T"

    def _wait(self, event: int, until: float) -> bool:
        """Wait for an event of the socket; False when there was none by then.

        Raises ConnectionError when the server has been stopped.
        """
        poll = select.poll()
        poll.register(self._socket, event)
        while not poll.poll(1e3 * max(0.0, min(LOOK_S, until - time.monotonic()))):
            if self._is_stopped():
                raise ConnectionAbortedError("the fork server was stopped")
            if time.monotonic() >= until:
                return False
        return True

    def _send(self, message: Mapping[str, Any], until: float) -> None:
        """Send a message; raises TimeoutError, ConnectionError."""
        body = json.dumps(message).encode()
        data = memoryview(len(body).to_bytes(4, "big") + body)
        while data:
            if not self._wait(select.POLLOUT, until):
                raise TimeoutError
            data = data[self._socket.send(data) :]

    def _receive(self, until: float) -> tuple[dict[str, Any], int]:
        """Return the next message and the process that sent it; raises TimeoutError,
        ConnectionError.
        """
        header, _ = self._read(4, until)
        body, pid = self._read(int.from_bytes(header, "big"), until)
        return json.loads(body), pid

    def _read(self, num_bytes: int, until: float) -> tuple[bytes, int]:
        """Return so many bytes and the process that sent the last of them."""
        data, pid = b"", 0
        while len(data) < num_bytes:
            if not self._wait(select.POLLIN, until):
                raise TimeoutError
            part, credentials, _, _ = self._socket.recvmsg(
                num_bytes - len(data), socket.CMSG_SPACE(_CREDENTIALS.size)
            )
            if not part:
                raise ConnectionResetError("the fork server has closed its end")
            data += part
            pid = _CREDENTIALS.unpack(credentials[0][2])[0]
        return data, pid
