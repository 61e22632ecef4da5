"""The host side of a sandbox: threads that send code to fork servers, and the servers' upkeep."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from flowtrain.tools.base import ToolError
from flowtrain.tools.sandbox.clocks import TimeLimit
from flowtrain.tools.sandbox.server import Backend, NotStarted, Server

ATTEMPTS = 2
"""Fork servers that are asked for a run until it has begun."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of one run."""

    output: str = ""
    """What the code printed, or the value of the expression; "" with an error."""
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
            timeout_s: CPU time of a run; the time that it sleeps counts too, see `TimeLimit`.
            memory_mb: MiB of address space of a run.
            max_output_chars: of what a run prints; more loses its middle.
        """
        limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "max_chars": max_output_chars}
        self.backend = backend
        self._workers = _Workers(backend, num_workers, limits)
        weakref.finalize(self, self._workers.close)

    async def run(self, code: str, before: Sequence[str] = ()) -> Ran:
        """Run the code; raises ToolError only when the sandbox is closed.

        The programs of `before` run first, in the same process and within the same limits; what
        they print is not shown, and where one raises, the next goes on.
        It takes at most 2 * START_S, the limit's wall time and STOP_S, from when a worker is free.
        A run whose awaiting task is cancelled holds one worker until its time limit.
        """
        return await asyncio.wrap_future(self._workers.submit(code, before))

    def close(self) -> None:
        """Kill all processes; runs under way and later ones raise ToolError.

        Also happens at garbage collection and at exit.
        """
        self._workers.close()


class _Workers:
    """The threads of a sandbox, each with one run at a time."""

    def __init__(self, backend: Backend, num_workers: int, limits: dict[str, float]) -> None:
        self._limits = limits
        self._time_limit = TimeLimit(limits["timeout_s"])
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="sandbox")
        self.servers = _Servers(backend)
        self._owner_pid = os.getpid()

    def submit(self, code: str, before: Sequence[str]) -> Future[Ran]:
        """Queue the code for the next free thread."""
        with self.servers.lock:
            self.servers.check_open()
            return self._executor.submit(self._run, code, before)

    def close(self) -> None:
        """Kill the servers and let the threads end, but not in a forked copy of the process."""
        if os.getpid() != self._owner_pid:
            return
        with self.servers.lock:
            self.servers.is_closed = True
            # Not waited for, because this may be one of the threads, and not cancelled: runs that
            # wait fail at once with a ToolError.
            self._executor.shutdown(wait=False)
        self.servers.close()

    def _run(self, code: str, before: Sequence[str]) -> Ran:
        request = {"code": code, "before": before, **self._limits}
        error = ""
        for _ in range(ATTEMPTS):
            server = self.servers.take()
            try:
                clock = server.begin(request)
                answer = server.finish(clock, self._time_limit)
            except NotStarted as problem:
                self.servers.drop(server)
                error = str(problem)
                continue
            except ConnectionError:
                self.servers.drop(server)
                self.servers.check_open()
                return Ran(error="the process that ran the code died", wall_s=clock.wall_s())
            if answer.pop("is_clean"):
                self.servers.give_back(server)
            else:
                self.servers.drop(server)
            return Ran(**answer)
        return Ran(error=error)


class _Servers:
    """The fork servers: one for each run under way, and one in reserve.

    So a run that loses its server, or has to leave it because of a file, makes no other run wait.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._all: set[Server] = set()
        self.idle: list[Server] = []
        """Those to take from the end: first those that are ready."""
        self.is_closed = self._is_refilling = False
        # Reentrant: the garbage collector may call `close` in a thread that holds it.
        self.lock = threading.RLock()
        # Of its own, because servers end with the thread that started them.
        self._upkeep = ThreadPoolExecutor(1, thread_name_prefix="sandbox-upkeep")

    def check_open(self) -> None:
        if self.is_closed:
            raise ToolError("the sandbox is closed")

    def take(self) -> Server:
        """Return an idle server, or else a new one."""
        server = None
        with self.lock:
            self.check_open()
            while self.idle and server is None:
                server = self.idle.pop()
                if not server.is_usable():
                    self.drop(server)
                    server = None
        server = server or self._start()
        with self.lock:
            if not (self.idle or self._is_refilling or self.is_closed):
                self._is_refilling = True
                self._upkeep.submit(self._refill)
        return server

    def give_back(self, server: Server) -> None:
        """Keep the server for the next run."""
        with self.lock:
            self.idle.append(server)

    def drop(self, server: Server) -> None:
        """Kill the server in the background."""
        with self.lock:
            if not self.is_closed:
                self._upkeep.submit(self._end, server)

    def close(self) -> None:
        """Kill all servers."""
        with self.lock:
            self.is_closed = True
            self._upkeep.shutdown(wait=False)
            servers = list(self._all)
        for server in servers:
            server.kill()

    def _start(self) -> Server:
        server = Server(self._backend)
        with self.lock:
            self._all.add(server)
            is_closed = self.is_closed
        if is_closed:
            server.kill()
        self.check_open()
        return server

    def _refill(self) -> None:
        """Start the reserve; where that fails, the next run tries again."""
        try:
            server = self._start()
            with self.lock:
                self.idle.insert(0, server)
        finally:
            self._is_refilling = False

    def _end(self, server: Server) -> None:
        server.kill()
        with self.lock:
            self._all.discard(server)
