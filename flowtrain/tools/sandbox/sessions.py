"""Sessions of Python in the sandbox: variables last from run to run, and states can be kept.

A session belongs to a tree of states, which one supervisor serves (`session_child.py`). A state is
a process that waits; each run makes a new one. A tree lives as long as a session or a snapshot is
in it, and a state as long as one of them is at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from flowtrain.tools.base import ToolError
from flowtrain.tools.sandbox.channel import STOP_S, Channel
from flowtrain.tools.sandbox.clocks import Clock, TimeLimit
from flowtrain.tools.sandbox.host import Ran
from flowtrain.tools.sandbox.server import CHILD, START_S, Backend, Server
from flowtrain.types import UserError
from flowtrain.utils.errors import on_failure

_SCRIPT = CHILD.with_name("session_child.py")
_ENDED = (
    "(the session of the earlier runs ended with the error {!r}: this run began without their "
    "variables)\n"
)


@dataclass(frozen=True, slots=True)
class _After:
    """The outcome of a run in a tree."""

    ran: Ran
    state: int
    """0: the run has ended the session."""


class _Tree:
    """The states of one session and of those that were restored from its snapshots."""

    def __init__(self, channel: Channel, limits: dict[str, float], until: float) -> None:
        """Begin; raises TimeoutError, ConnectionError."""
        self._channel = channel
        self._time_limit = TimeLimit(limits["timeout_s"])
        self._lock = threading.Lock()
        """Held by the run under way."""
        self._users: Counter[int] = Counter()
        self._unwanted: list[int] = []
        """States that the supervisor has yet to be told of."""
        channel.send(limits, until)
        first, channel.pid = channel.receive(until)
        if "error" in first:
            raise ConnectionRefusedError(first["error"])
        self.root: int = first["state"]

    def run(self, state: int, code: str) -> _After:
        """Run the code in a copy of the state."""
        with self._lock:
            clock = Clock(0)
            try:
                until = time.monotonic() + START_S
                while self._unwanted:
                    self._channel.send({"free": self._unwanted.pop()}, until)
                self._channel.send({"state": state, "code": code}, until)
                begun, _ = self._channel.receive(until)
                if "pid" not in begun:
                    return _After(Ran(error=begun["error"]), 0)
                clock = Clock(begun["pid"])
                answer = self._channel.finish(clock, self._time_limit)
            except (TimeoutError, OSError):
                died = Ran(error="the process that ran the code died", wall_s=clock.wall_s())
                return _After(died, 0)
            return _After(state=answer.pop("state"), ran=Ran(**answer))

    def take(self, state: int) -> None:
        """Count another user of the state."""
        self._users[state] += 1

    def leave(self, state: int) -> None:
        """Count a user less; the last one frees the state, and the last of all ends the tree."""
        self._users[state] -= 1
        if not self._users[state]:
            del self._users[state]
            self._unwanted.append(state)
        if not self._users:
            self._channel.close()
        elif self._lock.acquire(blocking=False):  # else the next run tells of it
            try:
                with contextlib.suppress(TimeoutError, OSError):
                    while self._unwanted:
                        free = {"free": self._unwanted.pop()}
                        self._channel.send(free, time.monotonic() + STOP_S)
            finally:
                self._lock.release()

    def num_bytes(self, state: int) -> int:
        """Return how much more memory of its own the state holds than an empty session, at most:
        pages that it still shares with other states count as well.
        """
        return max(0, _anonymous_bytes(state) - _anonymous_bytes(self._channel.pid))

    def close(self) -> None:
        """End all processes."""
        self._channel.close()


class CodeSession:
    """Python whose variables last, for the rollout that has it. It runs one thing at a time."""

    def __init__(self, sandbox: SessionSandbox, tree: _Tree | None, state: int, ended: str) -> None:
        """Go on from the state of a tree; without one the session is new when it first runs."""
        self._sandbox = sandbox
        self._tree = tree
        self._state = state
        self._ended = ended
        """The error that ended the session before this one, until a result has told of it."""
        self._is_closed = False
        if tree is not None:
            tree.take(state)

    async def run(self, code: str) -> Ran:
        """Run the code after what has run before; raises ToolError when the sandbox is closed.

        A limit or a crash ends the session with its variables: the next run begins another one, and
        its result says so.
        """
        return await self._sandbox.on_thread(lambda: self._run(code))

    def snapshot(self) -> CodeSnapshot:
        """Keep the state after the last run."""
        with self._sandbox.lock:
            return CodeSnapshot(self._sandbox, self._tree, self._state, self._ended)

    def close(self) -> None:
        """End the session; a run under way goes on to its limits, and its state is dropped."""
        with self._sandbox.lock:
            self._is_closed = True
            self._move(None, 0)

    def _run(self, code: str) -> Ran:
        with self._sandbox.lock:
            if self._is_closed:
                raise ToolError("the session is closed")
            tree, state, ended = self._tree, self._state, self._ended
            if tree is not None:
                tree.take(state)  # whatever becomes of the session, the run needs it
        if tree is None:
            try:
                tree = self._sandbox.plant()
            except (TimeoutError, OSError) as error:
                return Ran(error=f"the sandbox's process did not start: {error}")
            state = tree.root
            with self._sandbox.lock:
                tree.take(state)
        after = tree.run(state, code)
        with self._sandbox.lock:
            if after.state and not self._is_closed:
                self._move(tree, after.state)
            elif after.state:
                tree.take(after.state)
                tree.leave(after.state)
            else:
                self._move(None, 0)
                self._ended = after.ran.error or "exited"
            tree.leave(state)
            self._sandbox.check_open()
            if not ended:
                return after.ran
            if after.state:
                self._ended = ""
        note, ran = _ENDED.format(ended), after.ran
        if ran.error is None:
            return replace(ran, output=note + ran.output)
        return replace(ran, error=note + ran.error)

    def _move(self, tree: _Tree | None, state: int) -> None:
        before = self._tree, self._state
        self._tree, self._state = tree, state
        if tree is not None:
            tree.take(state)
        if before[0] is not None:
            before[0].leave(before[1])


class CodeSnapshot:
    """A state of a session, which other sessions can go on from."""

    def __init__(self, sandbox: SessionSandbox, tree: _Tree | None, state: int, ended: str) -> None:
        self._sandbox = sandbox
        self._place: tuple[_Tree | None, int, str] | None = (tree, state, ended)
        self.pid = state
        """The process that waits; 0 where none has begun."""
        self.num_bytes = 0
        """Memory that is held for it, at most."""
        if tree is not None:
            tree.take(state)
            self.num_bytes = tree.num_bytes(state)

    def restore(self) -> CodeSession:
        """Return a session that goes on from here, whatever others do."""
        with self._sandbox.lock:
            if self._place is None:
                raise ToolError("the snapshot is closed")
            return CodeSession(self._sandbox, *self._place)

    def close(self) -> None:
        """Free the state; may be called twice."""
        with self._sandbox.lock:
            place, self._place = self._place, None
            if place is not None and place[0] is not None:
                place[0].leave(place[1])


class SessionSandbox:
    """Makes sessions of Python in the sandbox. Safe to share, as `ProcessSandbox` is."""

    def __init__(
        self,
        backend: Backend,
        num_workers: int = 2,
        timeout_s: float = 2.0,
        memory_mb: int = 512,
        max_output_chars: int = 4000,
    ) -> None:
        """Allow `num_workers` runs at once; the limits hold for each run by itself."""
        if backend.scratch or backend.argv:
            raise UserError(
                f"agent.python_session=true needs agent.sandbox='seccomp': in {backend.name!r} "
                "code writes files, which the branches of a rollout would share"
            )
        self.backend = backend
        self.lock = threading.RLock()
        """Held while sessions and snapshots change places."""
        self._limits = {
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "max_chars": max_output_chars,
        }
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="session")
        self._roots = _Roots(backend)
        weakref.finalize(self, _close, self._executor, self._roots)

    def check(self) -> None:
        """Raise UserError where the kernel cannot do what sessions need."""
        try:
            tree = self.plant()
        except (TimeoutError, OSError) as error:
            self.close()
            raise UserError(f"agent.python_session=true does not work here: {error}") from error
        tree.close()

    def open(self) -> CodeSession:
        """Return a new session, whose processes start with its first run."""
        return CodeSession(self, None, 0, "")

    async def on_thread(self, work: Callable[[], Ran]) -> Ran:
        """Do it on the next thread that is free."""
        with self.lock:
            self.check_open()
            future = self._executor.submit(work)
        return await asyncio.wrap_future(future)

    def plant(self) -> _Tree:
        """Start the processes of a session; raises TimeoutError, OSError."""
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        with on_failure(channel.close):
            with theirs:
                until = self._roots.give(theirs, channel)
            return _Tree(channel, self._limits, until)

    def check_open(self) -> None:
        if self._roots.is_closed:
            raise ToolError("the sandbox is closed")

    def close(self) -> None:
        """End all processes; runs under way and later ones raise ToolError."""
        _close(self._executor, self._roots)


class _Roots:
    """The server that starts sessions, replaced when it has died, and the sessions' sockets."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._server: Server | None = None
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._lock = threading.RLock()
        # Servers end with the thread that started them, so it is one that stays.
        self._upkeep = ThreadPoolExecutor(1, thread_name_prefix="session-upkeep")
        self._owner_pid = os.getpid()
        self.is_closed = False

    def give(self, theirs: socket.socket, channel: Channel) -> float:
        """Let a server serve the socket whose other end is the channel's; return until when it
        should answer. Raises TimeoutError, OSError.
        """
        with self._lock:
            if self.is_closed:
                raise ToolError("the sandbox is closed")
            if self._server is None or not self._server.is_usable():
                if self._server is not None:
                    self._server.kill()
                self._server = self._upkeep.submit(Server, self._backend, _SCRIPT).result()
            self._channels.add(channel)
            return self._server.hand_over(theirs)

    def close(self) -> None:
        """End all sessions and the server, but not in a forked copy of the process."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            self.is_closed = True
            for channel in list(self._channels):
                channel.close()
            if self._server is not None:
                self._server.kill()
            self._upkeep.shutdown(wait=False)


def _close(executor: ThreadPoolExecutor, roots: _Roots) -> None:
    roots.close()
    executor.shutdown(wait=False)


def _anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is no file's; 0 when it is gone."""
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
