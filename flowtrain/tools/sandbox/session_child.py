"""The fork server behind `sessions.py`: Python whose variables last from one run to the next, and
whose state can be run on more than once.

It is a script like `child.py`, whose limits, filter and words it uses. For each message with a
socket it forks a supervisor, which talks over that socket:

    ->  {"timeout_s": float, "memory_mb": int, "max_chars": int}
    <-  {"state": int}            a new session; or {"error": str}
    ->  {"state": int, "code": str}
    <-  {"pid": int}              the process of the run, whose clocks the host watches
    ->  {"stop": str}             only where the host finds that a limit of time has struck: which
    <-  {"state": int, "output": str, "error": str | null, "wall_s": float, "cpu_s": float}
    ->  {"free": int}             a state that is wanted no longer

A state is a process that has come to the end of a run and waits in the system call `clone`. A run
from it is a copy of that process (copy on write), which in the end waits as well: the next state.
The process that waits never runs code again, so any number of runs can begin with the same state.

The code must not fork by itself. Its filter lets one form of `clone` pass, but another one asks the
supervisor, outside the sandbox (SECCOMP_RET_USER_NOTIF), which agrees once for each run that the
host asks for. To the copy it gives the code and a pipe (SECCOMP_IOCTL_NOTIF_ADDFD), so not even a
state learns what is run from it. Who asks in the middle of a run has ended it; a process that does
not keep to this costs its session and no other. One process of a session runs, and the others wait.

All processes of a session are children of its supervisor and of its process group, which they
cannot leave. The supervisor kills the group when its socket ends, the server when the supervisor
has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from flowtrain.tools.sandbox import child
else:
    sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120
    import child

    del sys.path[0]

CALLS = child._table("seccomp 317 277 clone 56 220 prctl 157 167")
CLONE_PARENT = 0x8000
FORK = CLONE_PARENT | signal.SIGCHLD
"""Of all that `clone` can do, what a state may ask for: a copy with the same parent."""
SET_MODE_FILTER, NEW_LISTENER = 1, 8
USER_NOTIF = 0x7FC00000
# struct seccomp_notif: id, pid, flags, the system call; struct seccomp_notif_resp: id, value,
# error, flags; struct seccomp_notif_addfd: id, flags, source, target, its flags.
NOTIF, RESPONSE, ADDFD = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI"), struct.Struct("QIIII")
CONTINUE, SET_FD = 1, 1
RECEIVE, SEND, ADD_FD = 0xC0502100, 0xC0182101, 0x40182103  # the ioctls of those
FIRST_ARGUMENT, SECOND_ARGUMENT = 16, 24  # offsets in seccomp_data
SYSCALL = ctypes.PyDLL(None).syscall
"""To fork not by way of `os`: the C library need not know, and its own call wants more rights."""
SYSCALL.restype = ctypes.c_long
RUN = 1
"""What `clone` returns in a copy that has been given its code; no process but init has this id."""
ANSWER_S = 60.0
"""Wall time in which a state must be forked: it takes 0.1 ms, but the machine may be busy."""
_PROCESS_CLOCK = 2


def asking_program(machine: str) -> bytes:
    """Return the filter that asks the supervisor about every `clone`."""
    code = [
        (child.LOAD, 0, 0, child.NR_OFFSET),
        (child.JUMP_EQ, 0, 1, CALLS["clone"][child.MACHINES[machine][1]]),
        (child.RETURN, 0, 0, USER_NOTIF),
        (child.RETURN, 0, 0, child.ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def session_program(machine: str) -> bytes:
    """Return the filter of the sandbox that computes, with two calls more: `clone` as a state may
    ask for it, and `prctl` to die with the supervisor.
    """
    column = child.MACHINES[machine][1]
    base = child.filter_program(machine)
    code = [
        (child.JUMP_EQ, 0, 3, CALLS["clone"][column]),
        (child.LOAD, 0, 0, FIRST_ARGUMENT),
        (child.JUMP_EQ, 0, 6, FORK),
        (child.RETURN, 0, 0, child.ALLOW),
        (child.JUMP_EQ, 0, 4, CALLS["prctl"][column]),
        (child.LOAD, 0, 0, FIRST_ARGUMENT),
        (child.JUMP_EQ, 0, 2, child.PR_SET_PDEATHSIG),
        (child.LOAD, 0, 0, SECOND_ARGUMENT),
        (child.JUMP_EQ, 1, 0, signal.SIGKILL),
        (child.RETURN, 0, 0, child.REFUSE),
        (child.RETURN, 0, 0, child.ALLOW),
    ]
    # Before the last instruction, which refuses; the number of the call is loaded there.
    return base[:-8] + b"".join(struct.pack("HBBI", *each) for each in code)


def install(machine: str, program: bytes, flags: int = 0) -> int:
    """Install a filter for good; return its listener, if asked for one, or -1 for a failure."""
    code = ctypes.create_string_buffer(program)
    filtered = ctypes.create_string_buffer(
        struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    )
    call = ctypes.c_long(CALLS["seccomp"][child.MACHINES[machine][1]])
    mode, flag = ctypes.c_ulong(SET_MODE_FILTER), ctypes.c_ulong(flags)
    return int(child.LIBC.syscall(call, mode, flag, filtered))


def be_session(supervisor: socket.socket, limits: child.Limits, parent: int) -> NoReturn:
    """Turn a forked process into a session without variables."""
    machine = os.uname().machine
    is_safe = child.prctl(child.PR_SET_DUMPABLE) and child.prctl(child.PR_SET_NO_NEW_PRIVS, 1)
    listener = install(machine, asking_program(machine), NEW_LISTENER) if is_safe else -1
    socket.send_fds(supervisor, [b"."], [] if listener < 0 else [listener])
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 1 << 20)
    child.set_caps(limits, FSIZE=0, NOFILE=3)
    child.prctl(child.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or install(machine, session_program(machine)) < 0:
        os._exit(child.EXIT_UNLOCKED)
    for name in ("array", "ctypes", "_ctypes", "fcntl", "resource", "select", "socket", "_socket"):
        sys.modules.pop(name, None)
    gc.enable()
    random.seed(0)
    take_turns(CALLS["clone"][child.MACHINES[machine][1]])


def take_turns(clone: int) -> NoReturn:
    """Run the code of this process, if it has got any, and wait to be forked again."""
    zero, status = ctypes.c_ulong(0), 0
    call, flags = ctypes.c_long(clone), ctypes.c_ulong(FORK)
    while True:
        got = SYSCALL(call, flags, zero, ctypes.c_ulong(status), zero, zero)
        if got == RUN:
            status = child.execute(read_code())
        elif got == 0:
            child.prctl(child.PR_SET_PDEATHSIG, signal.SIGKILL)
        elif got < 0:
            os._exit(child.EXIT_UNLOCKED)


def read_code() -> str:
    """Read the code that the supervisor has put there as stdin."""
    data = b""
    while chunk := os.read(0, 1 << 20):
        data += chunk
    return data.decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that waits in `clone`."""

    id: int
    """Of the kernel's question about it."""
    status: int
    """How its run has ended, in its own words."""


class Supervisor:
    """The trusted process of one session, which decides when its processes are forked."""

    def __init__(self, limits: child.Limits) -> None:
        self.limits = limits
        self.listener = -1
        self.waiting: dict[int, Waiting] = {}

    def begin(self) -> dict[str, object]:
        """Start the session's first process."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                be_session(theirs, self.limits, parent)
            finally:
                os._exit(child.EXIT_RAISED)
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        ours.close()
        if not fds:
            return {"error": "this kernel does not let a filter ask (SECCOMP_RET_USER_NOTIF)"}
        self.listener = fds[0]
        if self.wait_for({pid}) != {pid}:
            return {"error": "the first process of the session has ended"}
        return {"state": pid}

    def run(self, state: int, code: str) -> dict[str, object]:
        """Run the code in a copy of a state."""
        if state not in self.waiting:
            return {"state": 0, "output": "", "error": "the session's process has died"}
        started = time.monotonic()
        pid = self.fork(state)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(writer, True)
        source = sealed(code)
        try:
            for fd, target in ((source, 0), (writer, 1), (writer, 2)):
                message = ADDFD.pack(self.waiting[pid].id, SET_FD, fd, target, 0)
                fcntl.ioctl(self.listener, ADD_FD, message)
            child.send({"pid": pid})
            self.answer(pid, RUN, 0)
        except OSError:  # the copy has died; it cannot have done so by itself
            die()
        finally:
            os.close(source)
            os.close(writer)
        raw, reason = self.watch(pid, reader)
        os.close(reader)
        if pid in self.waiting:
            cpu_s = time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
            status = (self.waiting[pid].status & 0xFF) << 8
        else:
            _, status, usage = os.wait4(pid, 0)
            cpu_s = usage.ru_utime + usage.ru_stime
        if reason or cpu_s >= self.limits.timeout_s or len(raw) > self.limits.max_bytes:
            self.free(pid)
        judged = child.judge(raw, reason, status, cpu_s, self.limits)
        after = {"state": pid if pid in self.waiting else 0, "cpu_s": cpu_s}
        return judged | after | {"wall_s": time.monotonic() - started}

    def fork(self, state: int) -> int:
        """Let a state be forked; return the copy, which waits too."""
        known = {*self.waiting}
        self.answer(state, 0, CONTINUE)
        copies = self.wait_for({state}, num_others=1) - known
        # Whatever else a process does that waits to be forked, it has not kept to the rules.
        if state not in self.waiting or len(copies) != 1:
            die()
        return copies.pop()

    def watch(self, pid: int, reader: int) -> tuple[bytes, str]:
        """Read the output of a run until it ends; return it and why it was stopped, or ""."""
        ended = os.pidfd_open(pid)
        poll = select.poll()
        for fd in (0, reader, ended, self.listener):
            poll.register(fd, select.POLLIN)
        output, reason = b"", ""
        while pid not in self.waiting:
            ready = {fd for fd, _ in poll.poll()}
            if reader in ready:
                output += os.read(reader, 1 << 16)
                if len(output) > self.limits.max_bytes:
                    os.kill(pid, signal.SIGKILL)
                    poll.unregister(reader)
            if 0 in ready and not reason:
                reason = (child.receive() or die()).get("stop", "")
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            if ended in ready:
                break
            if self.listener in ready and self.receive() not in (pid, 0):
                die()  # none but this process may run
        os.close(ended)
        return output + read_rest(reader), reason

    def wait_for(self, pids: set[int], num_others: int = 0) -> set[int]:
        """Wait until these processes, and some others, wait to be forked; return all that do."""
        num, until = len(self.waiting.keys() - pids) + num_others, time.monotonic() + ANSWER_S
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(0, 0)
        while len(self.waiting.keys() - pids) < num or not pids <= self.waiting.keys():
            events = poll.poll(1e3 * max(0.0, until - time.monotonic()))
            if events != [(self.listener, select.POLLIN)]:
                break  # the time is up, or none is left that could ask, or the host has gone
            self.receive()
        return {*self.waiting}

    def receive(self) -> int:
        """Take one question of the kernel; return the process it is about, 0 for none."""
        buffer = bytearray(NOTIF.size)
        try:
            fcntl.ioctl(self.listener, RECEIVE, buffer)
        except OSError:  # it was killed in the meantime
            return 0
        question, pid, _, _, _, _, _, _, status, *_ = NOTIF.unpack(buffer)
        self.waiting[pid] = Waiting(question, status)
        return int(pid)

    def answer(self, pid: int, value: int, flags: int) -> None:
        """Answer the kernel's question about a process, which then waits no longer."""
        response = RESPONSE.pack(self.waiting.pop(pid).id, value, 0, flags)
        fcntl.ioctl(self.listener, SEND, response)

    def free(self, state: int) -> None:
        """End a process that waits."""
        if self.waiting.pop(state, None) is not None:
            os.kill(state, signal.SIGKILL)
            os.waitpid(state, 0)


def sealed(text: str) -> int:
    """Open a file in memory that holds the text and cannot be changed."""
    fd = os.memfd_create("code", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def read_rest(reader: int) -> bytes:
    """Read what is left in the pipe of a process that writes no longer."""
    output = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(reader, 1 << 16):
            output += chunk
    return output


def die() -> NoReturn:
    """End the session with all its processes."""
    os.killpg(0, signal.SIGKILL)
    os._exit(child.EXIT_RAISED)


def supervise() -> NoReturn:
    """Serve one session until its socket ends."""
    message = child.receive() or die()
    supervisor = Supervisor(child.Limits(**message))
    child.send(supervisor.begin())
    while (message := child.receive()) is not None:
        if "code" in message:
            child.send(supervisor.run(message["state"], message["code"]))
        elif "free" in message:  # else it stops a run that has just ended
            supervisor.free(message["free"])
    die()


def serve(server: socket.socket) -> None:
    """Fork a supervisor for each socket that comes in, and clean up after those that have died."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    pids: dict[int, int] = {}
    while True:
        for fd in [fd for fd, _ in poll.poll()]:
            if fd in pids:
                poll.unregister(fd)
                os.close(fd)
                pid = pids.pop(fd)
                with contextlib.suppress(ProcessLookupError):  # until it is reaped, it is its own
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                continue
            _, fds, _, _ = socket.recv_fds(server, 1, 1)
            if not fds:
                return
            pid = os.fork()
            if pid == 0:
                try:
                    be_supervisor(fds[0])
                finally:
                    os._exit(child.EXIT_RAISED)
            os.close(fds[0])
            pids[pidfd := os.pidfd_open(pid)] = pid
            poll.register(pidfd, select.POLLIN)


def be_supervisor(fd: int) -> NoReturn:
    """Turn a forked process into a supervisor, in a process group of its own."""
    os.setsid()
    os.dup2(fd, 0)
    os.dup2(fd, 1)
    os.closerange(3, 1 << 20)
    supervise()


def main() -> None:
    """Serve until stdin ends."""
    setup = child.Setup(**json.loads(sys.argv[1]))
    child.prepare(setup)
    child.send({})
    serve(socket.socket(fileno=0))


if __name__ == "__main__":
    main()
