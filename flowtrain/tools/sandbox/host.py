"""The host side of a sandbox: threads that send code to fork servers, and the servers' upkeep."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from flowtrain.tools.base import ToolError
from flowtrain.tools.sandbox.server import Backend, Server

ATTEMPTS = 2
"""Fork servers that are tried until one starts."""


@dataclass(frozen=True, slots=True)
class CodeResult:
    """The outcome of one run."""

    output: str = ""
    """The printed text of the code, or the value of the expression; "" with an error."""
    error: str | None = None
    """Why it failed."""
    wall_s: float = 0.0
    """Wall time, from the start of its process to its end."""
    cpu_s: float = 0.0
    """CPU time of its process."""


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
            timeout_s: CPU time of a run, which may take ten times as much wall time, and 10 s at
                least: that ends what sleeps, or gets less than a tenth of a core.
            memory_mb: MiB of address space of a run.
            max_output_chars: of what a run prints; more loses its middle.
        """
        limits = {
            "timeout_s": timeout_s,
            "wall_s": max(10.0, 10 * timeout_s),
            "memory_mb": memory_mb,
            "max_chars": max_output_chars,
        }
        self.backend = backend
        self._workers = _Workers(backend, num_workers, limits)
        weakref.finalize(self, self._workers.close)

    async def run(self, code: str) -> CodeResult:
        """Run the code; raises ToolError only when the sandbox is closed.

        Once a worker is free, a run takes at most the limit's wall time and a few START_S. A run
        whose awaiting task is cancelled holds one worker until its time limit.
        """
        return await asyncio.wrap_future(self._workers.submit(code))

    def close(self) -> None:
        """Kill all processes; runs under way and later ones raise ToolError.

        Also happens at garbage collection and at exit.
        """
        self._workers.close()


class _Workers:
    """The threads of a sandbox, each with one run at a time, and the fork servers that they share.

    Servers end with the thread that started them, and these threads with the sandbox.
    """

    def __init__(self, backend: Backend, num_workers: int, limits: dict[str, float]) -> None:
        self.idle: list[Server] = []
        """Servers to take from the end."""
        self._backend = backend
        self.limits = limits
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="sandbox")
        self._all: set[Server] = set()
        self._is_closed = False
        # Reentrant: the garbage collector may call `close` in a thread that holds it.
        self._lock = threading.RLock()
        self._owner_pid = os.getpid()

    def submit(self, code: str) -> Future[CodeResult]:
        """Queue the code for the next free thread."""
        with self._lock:
            self._check_open()
            return self._executor.submit(self._run, code)

    def close(self) -> None:
        """Kill the servers and let the threads end, but not in a forked copy of the process."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            self._is_closed = True
            # Not waited for, because this may be one of the threads, and not cancelled: runs that
            # wait fail at once with a ToolError.
            self._executor.shutdown(wait=False)
            servers = list(self._all)
        for server in servers:
            server.kill()

    def _run(self, code: str) -> CodeResult:
        request = {"code": code, **self.limits}
        error = ""
        for _ in range(ATTEMPTS):
            server = self._take()
            try:
                server.start()
            except OSError as problem:
                self._drop(server)
                error = f"the sandbox's process did not start: {problem}"
                continue
            started = time.monotonic()
            try:
                answer = server.run(request)
            except OSError:
                self._drop(server)
                self._check_open()
                wall_s = time.monotonic() - started
                return CodeResult(error="the process that ran the code died", wall_s=wall_s)
            if answer.pop("is_clean"):
                with self._lock:
                    self.idle.append(server)
            else:
                self._drop(server)
            return CodeResult(**answer)
        return CodeResult(error=error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ToolError("the sandbox is closed")

    def _take(self) -> Server:
        """Return an idle server, or else a new one."""
        with self._lock:
            self._check_open()
            while self.idle:
                if (server := self.idle.pop()).lives():
                    return server
                self._drop(server)
        server = Server(self._backend)
        with self._lock:
            self._all.add(server)
        if self._is_closed:  # `close` may have listed the servers before this one
            server.kill()
        self._check_open()
        return server

    def _drop(self, server: Server) -> None:
        server.kill()
        with self._lock:
            self._all.discard(server)
