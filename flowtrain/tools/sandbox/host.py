"""The host side of a sandbox: threads that send code to fork servers (`child.py`), in time."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flowtrain.tools.base import ToolError

PYTHON = os.path.realpath(sys.executable)
CHILD = Path(__file__).with_name("child.py")
GRACE_S = 1.0
"""Seconds beyond the code's own time limit after which a fork server is killed."""
START_S = 30.0
"""Seconds that a fork server may take to start; 0.1 s is usual, a cold disk takes longer."""


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

    A run that changes something there ends its server, and the folder with it; the next server is
    started at once.
    """
    uids: Iterator[int] = field(default_factory=lambda: itertools.repeat(0))
    """The user that the code of each server becomes; 0: no change."""
    must_filter: bool = True
    """Refuse to run without a seccomp filter."""
    offers: str = ""
    """The modules that the code can import, in words."""


class ProcessSandbox:
    """Runs untrusted Python in processes, which a forked copy of this process must not use.

    Safe to share between tasks, event loops and threads. Runs repeat: `random` starts from the same
    seed and strings hash alike each time.
    """

    def __init__(
        self,
        backend: Backend,
        num_workers: int = 2,
        timeout_s: float = 2.0,
        memory_mb: int = 512,
        max_output_chars: int = 4000,
    ) -> None:
        """Allow `num_workers` runs at once; the processes start with the first run.

        Args:
            timeout_s: wall time of a run.
            memory_mb: MiB of address space of a run.
            max_output_chars: a run that prints more is an error.
        """
        limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "max_chars": max_output_chars}
        self.backend = backend
        self._workers = _Workers(backend, num_workers, limits)
        weakref.finalize(self, self._workers.close)

    async def run(self, code: str) -> str:
        """Return what the code prints, or an expression's value; raises ToolError when it fails.

        A run whose awaiting task is cancelled holds one worker until its time limit.
        """
        return await asyncio.wrap_future(self._workers.submit(code))

    def close(self) -> None:
        """Kill all processes; runs under way and later ones raise ToolError.

        Also happens at garbage collection and at exit.
        """
        self._workers.close()


class _Workers:
    """The threads of a sandbox, each with one fork server that it starts, restarts and talks to."""

    def __init__(self, backend: Backend, num_workers: int, limits: dict[str, float]) -> None:
        self._backend = backend
        self._limits = limits
        self._timeout_s = limits["timeout_s"]
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="sandbox")
        # Reentrant: the garbage collector may call `close` in a thread that holds it.
        self._lock = threading.RLock()
        self._servers: dict[int, _Server] = {}
        self._closed = False
        self._owner_pid = os.getpid()

    def submit(self, code: str) -> Future[str]:
        """Queue the code for the next free thread."""
        with self._lock:
            self._check_open()
            return self._executor.submit(self._run, code)

    def close(self) -> None:
        """Kill the servers and let the threads end, but not in a forked copy of the process."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            self._closed = True
            # Not waited for, because this may be one of the threads, and not cancelled: runs that
            # wait fail at once with a ToolError.
            self._executor.shutdown(wait=False)
            servers = list(self._servers.values())
        for server in servers:
            server.kill()

    def _run(self, code: str) -> str:
        message = json.dumps({"code": code, **self._limits}).encode()
        server = self._server()
        try:
            reply = json.loads(server.exchange(message, self._timeout_s + GRACE_S))
        except TimeoutError as error:
            self._replace(server)
            raise ToolError(f"time limit of {self._timeout_s:g} s exceeded") from error
        except ConnectionError as error:
            self._replace(server)
            self._check_open()
            raise ToolError("the process that ran the code died") from error
        if not reply["is_clean"]:
            self._replace(server)
        if reply["error"] is not None:
            raise ToolError(reply["error"])
        return str(reply["output"])

    def _server(self) -> _Server:
        """Return the fork server of this thread, a new one when it has died."""
        thread = threading.get_ident()
        with self._lock:
            self._check_open()
            server = self._servers.get(thread)
            if server is None or not server.is_alive():
                server = self._servers[thread] = _Server(self._backend)
        return server

    def _replace(self, server: _Server) -> None:
        """Kill the server of this thread and start the next one before it is needed."""
        server.kill()
        with self._lock:
            if not self._closed:
                self._servers[threading.get_ident()] = _Server(self._backend)

    def _check_open(self) -> None:
        if self._closed:
            raise ToolError("the sandbox is closed")


class _Server:
    """One fork server process and the socket to it."""

    def __init__(self, backend: Backend) -> None:
        self._socket, theirs = socket.socketpair()
        # Keeps the descriptor open until this object is gone, so that `kill` in one thread cannot
        # pull it from under a read in another.
        self._reader = self._socket.makefile("rb")
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

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, message: bytes, timeout_s: float) -> bytes:
        """Send a request and return its answer.

        Raises TimeoutError or, when the process has ended, ConnectionError.
        """
        if not self._is_ready:
            self._socket.settimeout(START_S)
            self._receive()
            self._is_ready = True
        self._socket.settimeout(timeout_s)
        self._socket.sendall(len(message).to_bytes(4, "big") + message)
        return self._receive()

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        with self._kill_lock:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._socket.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _receive(self) -> bytes:
        num_bytes = int.from_bytes(self._reader.read(4), "big")
        body = self._reader.read(num_bytes)
        if not body or len(body) < num_bytes:
            raise ConnectionResetError("the fork server has closed its end")
        return body
