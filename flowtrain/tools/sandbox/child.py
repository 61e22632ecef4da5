"""The fork server behind `host.py`: runs each piece of untrusted Python in a fresh process.

The script runs in an interpreter with its own environment and open files. Its argument is a `Setup`
as JSON. Requests come in on stdin and answers go out on stdout, each a 4-byte big-endian length and
a JSON object:

    <-  {}                        the server is ready
    ->  {"code": str, "timeout_s": float, "wall_s": float, "memory_mb": int, "max_chars": int}
    <-  {"output": str, "error": str | null, "is_clean": bool, "wall_s": float, "cpu_s": float}

The output is what was printed before the error, too.

The kernel confines the code, not Python: before its first line runs, the process has no file open
but an empty stdin and one pipe, cannot gain privileges, has caps on memory, time and files, and a
seccomp filter (`filters.py`) refuses every system call that is not on a list. So Python's own
tricks to reach hidden objects reach nothing. The code gets no processes, threads, sockets or
signals, and executes no file. The host decides which files there are.

The server alone decides the status of a run; the code can only choose its output, its exit status
and the wording of its own exception.
"""

from __future__ import annotations

import builtins
import codecs
import ctypes
import functools
import gc
import importlib
import json
import math
import os
import random
import resource
import select
import signal
import struct
import sys
import time
import types
from dataclasses import dataclass
from typing import Any

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2

EXIT_RAISED, EXIT_MEMORY, EXIT_UNLOCKED = 101, 102, 103
MAX_ERROR_CHARS, MAX_FILE_BYTES, MAX_OUTPUT_MB = 1000, 64 << 20, 16
SOURCE = "<code>"
CPU_ERROR, WALL_ERROR = "CPU time limit of {:g} s exceeded", "wall time limit of {:g} s exceeded"
LOOK_MS = 50
"""Milliseconds between two looks at the clocks of a run that prints nothing."""
CPU_CLOCK = 2
"""Of the clock ids of Linux: the time of all threads of a process."""
LEFT_OUT = "\n... {} characters left out ...\n"
ENCODINGS = (
    *("utf-8-sig", "utf-16", "cp1250", "cp1251", "cp1252", "cp1254", "iso8859-2", "iso8859-15"),
    *("koi8-r", "cp874", "gb18030", "big5", "cp932", "euc-jp", "cp949"),
)
"""Encodings of web pages."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The options of all runs of a server."""

    preload: list[str]
    """Modules that are imported before the first run."""
    path: list[str]
    """Folders to import from besides the standard library; they need a scratch folder."""
    scratch: str
    """Folder that the code starts in and may write into; "": none, and no file system calls."""
    uid: int
    """User and group that the code runs as; 0: those of this process."""
    filter: str
    """The program of the seccomp filter, in hex; "": this machine's system calls are not known."""
    must_filter: bool
    """Refuse to run when there can be no seccomp filter; else do without it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run."""

    timeout_s: float
    """CPU time."""
    wall_s: float
    """Wall time, which ends what sleeps or gets no core."""
    memory_mb: int
    """Address space in MiB, the interpreter's own 30 or so included."""
    max_chars: int
    """Characters of output that are kept; a longer one loses its middle."""


@functools.cache
def filter_argument(program: str) -> ctypes.Array[ctypes.c_char]:
    """Make a struct sock_fprog, once in the server: a forked process would pay in copied pages."""
    code = ctypes.create_string_buffer(bytes.fromhex(program))  # the kernel refuses an empty one
    header = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
    argument = ctypes.create_string_buffer(header)
    argument.program = code  # type: ignore[attr-defined]  # keeps it alive
    return argument


def prctl(option: int, argument: int = 0, address: int = 0) -> bool:
    """Call Linux's prctl; False when the kernel refuses it or is not Linux."""
    if sys.platform != "linux":
        return False
    arguments = [ctypes.c_ulong(number) for number in (argument, address, 0, 0)]
    return bool(LIBC.prctl(option, *arguments) == 0)


def lock_down(setup: Setup, limits: Limits, server_pid: int) -> bool:
    """Give up, for good, all that the setup does not grant; False when that is impossible here."""
    files = {"FSIZE": MAX_FILE_BYTES, "NOFILE": 64} if setup.scratch else {"FSIZE": 0, "NOFILE": 3}
    set_caps(limits, NPROC=0, **files)
    if setup.scratch:
        os.chdir(setup.scratch)
    if setup.uid:  # root may read and write too much
        os.setgroups([])
        os.setgid(setup.uid)
        os.setuid(setup.uid)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    if os.getppid() != server_pid:  # the server died before the line above took effect
        return False
    filter_address = ctypes.addressof(filter_argument(setup.filter))
    is_safe = prctl(PR_SET_DUMPABLE, 0) and prctl(PR_SET_NO_NEW_PRIVS, 1)
    is_locked = is_safe and prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_address)
    return is_locked or not setup.must_filter


def set_caps(limits: Limits, **caps: int) -> None:
    """Cap CPU time, memory, core files, and what `caps` names."""
    fixed = {"CPU": math.ceil(limits.timeout_s) + 1, "AS": limits.memory_mb << 20, "CORE": 0}
    for name, cap in (fixed | caps).items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        # A stricter limit of the host stays: only root could raise it.
        if hard == resource.RLIM_INFINITY or cap < hard:
            resource.setrlimit(kind, (cap, cap))


def run_as_main(code: str) -> None:
    """Print the value of an expression, or run a program as the module `__main__`."""
    variables = sys.modules["__main__"].__dict__
    try:
        expression = compile(code.strip(), SOURCE, "eval")
    except SyntaxError:
        exec(compile(code, SOURCE, "exec"), variables)
        return
    if (value := eval(expression, variables)) is not None:
        print(value)


def execute(code: str) -> int:
    """Run the code and return the exit status; an exception becomes the last line of the output."""
    stdout = sys.stdout
    try:
        try:
            run_as_main(code)
        finally:
            stdout.flush()
    except MemoryError:
        return EXIT_MEMORY
    # The code may raise anything, SystemExit and KeyboardInterrupt included.
    except BaseException as error:  # noqa: BLE001
        if isinstance(error, SystemExit) and not error.code:
            return 0
        where = location(error, code)
        line = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[
            : MAX_ERROR_CHARS - len(where)
        ]
        os.write(2, b"\n" + (line + where).encode("utf-8", "backslashreplace"))
        return EXIT_RAISED
    return 0


def location(error: BaseException, code: str) -> str:
    """Return the innermost line of the program in the traceback; "" for a program of one line."""
    lines = code.splitlines()
    number, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == SOURCE:
            number = trace.tb_lineno
        trace = trace.tb_next
    if len(lines) < 2 or not 0 < number <= len(lines):
        return ""
    return f" (line {number}: {lines[number - 1].strip()[:80]})"


def become_child(code: str, setup: Setup, limits: Limits, output_fd: int, server_pid: int) -> int:
    """Run the program in the forked process; return its exit status."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.closerange(3, 1 << 20)
    if not lock_down(setup, limits, server_pid):
        return EXIT_UNLOCKED
    if not setup.scratch:
        for name in ("ctypes", "_ctypes", "resource", "select"):
            del sys.modules[name]
    gc.enable()
    random.seed(0)
    return execute(code)


class Output:
    """The beginning and the end of what a run prints."""

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._head, self._tail = "", ""
        self._num_chars = 0

    def add(self, chunk: bytes) -> None:
        text = self._decode(chunk)
        self._num_chars += len(text)
        room = self.max_chars - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-max(self.max_chars, 2 * MAX_ERROR_CHARS) :]

    def last_line(self) -> str:
        return (self._head + self._tail).rpartition("\n")[2]

    def text(self, num_dropped: int = 0) -> str:
        """Return all but its last characters, or with a note in its middle as much as there is room
        for.
        """
        num_chars = self._num_chars - num_dropped
        text = self._head + self._tail
        text = text[: len(text) - num_dropped]
        if num_chars <= self.max_chars:
            return text
        room = max(2, self.max_chars - len(LEFT_OUT.format(num_chars)))
        note = LEFT_OUT.format(num_chars - room)
        return self._head[: room - room // 2] + note + text[-(room // 2) :]


def watch(pid: int, output_fd: int, output: Output, limits: Limits) -> str:
    """Read the child's output until it ends; kill it and return why where it exceeds a limit."""
    ended_fd = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (output_fd, ended_fd):
        poll.register(fd, select.POLLIN)
    until = time.monotonic() + limits.wall_s
    num_bytes = 0
    try:
        while True:
            ready = {fd for fd, _ in poll.poll(LOOK_MS)}
            if output_fd in ready:
                chunk = os.read(output_fd, 1 << 16)
                output.add(chunk)
                num_bytes += len(chunk)
                if not chunk:
                    poll.unregister(output_fd)
            elif ended_fd in ready:  # it may have closed the pipe before, or left it to another
                return ""
            reason = ""
            if num_bytes > MAX_OUTPUT_MB << 20:
                reason = f"output limit of {MAX_OUTPUT_MB} MiB exceeded"
            elif time.clock_gettime(~pid << 3 | CPU_CLOCK) >= limits.timeout_s:
                reason = CPU_ERROR.format(limits.timeout_s)
            elif time.monotonic() >= until:
                reason = WALL_ERROR.format(limits.wall_s)
            if reason:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
                return reason
    finally:
        os.close(ended_fd)


def explain(status: int, output: Output, limits: Limits) -> str:
    """Put a wait status into words; "" for success."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    if code == EXIT_UNLOCKED:
        system = f"{os.uname().sysname} {os.uname().machine}"
        return f"the sandbox needs seccomp, which this kernel or machine ({system}) does not offer"
    if code == EXIT_MEMORY:
        return f"memory limit of {limits.memory_mb} MiB exceeded"
    if code == EXIT_RAISED and (line := output.last_line()):
        return line
    return f"exited with status {code}" if code else ""


def answer(code: str, setup: Setup, limits: Limits) -> dict[str, object]:
    """Run one request in a process of its own."""
    server_pid = os.getpid()
    changed = change_time(setup.scratch)
    reader, writer = os.pipe()
    output = Output(limits.max_chars)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(become_child(code, setup, limits, writer, server_pid))
        finally:
            os._exit(EXIT_RAISED)
    os.close(writer)
    reason = watch(pid, reader, output, limits)
    _, status, usage = os.wait4(pid, 0)
    wall_s, cpu_s = time.monotonic() - started, usage.ru_utime + usage.ru_stime
    os.close(reader)
    if not reason and cpu_s >= limits.timeout_s:
        reason = CPU_ERROR.format(limits.timeout_s)
    error = reason or explain(status, output, limits)
    # The line of an exception is its program's last, behind a line break.
    has_raised = not reason and os.WIFEXITED(status) and os.WEXITSTATUS(status) == EXIT_RAISED
    return {
        "output": output.text(len(error) + 1 if has_raised and error == output.last_line() else 0),
        "error": error or None,
        "is_clean": change_time(setup.scratch) == changed,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
    }


def change_time(scratch: str) -> int:
    """Return the time of the last change in the folder, which no program can set."""
    try:
        return os.stat(scratch).st_ctime_ns if scratch else 0  # noqa: PTH116
    except OSError:  # it was removed
        return -1


def receive() -> Any:
    """Read one message from stdin; None at its end."""
    body = read_exactly(int.from_bytes(read_exactly(4), "big"))
    return json.loads(body) if body else None


def read_exactly(num_bytes: int) -> bytes:
    """Read bytes from stdin; fewer only at its end."""
    data = b""
    while len(data) < num_bytes and (chunk := os.read(0, num_bytes - len(data))):
        data += chunk
    return data


def send(message: dict[str, object]) -> None:
    """Write one message to stdout."""
    body = json.dumps(message).encode()
    data = len(body).to_bytes(4, "big") + body
    while data:
        data = data[os.write(1, data) :]


def prepare(setup: Setup) -> None:
    """Load the modules for the code, then make the rest unreachable and runs repeatable."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Or else code that runs as the same user could open this process's memory as a file.
    prctl(PR_SET_DUMPABLE, 0)
    filter_argument(setup.filter)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path += setup.path
    for name in setup.preload:
        importlib.import_module(name)
    for name in ENCODINGS if setup.preload else ():
        codecs.lookup(name)  # which loads it; the code's user may not read the standard library
    os.environ.clear()
    if not setup.scratch:
        sys.path.clear()
    # What says where things are on this machine.
    sys.argv[:] = sys.orig_argv[:] = ["main.py"]
    sys.executable = ""
    # Only the module `site` would add them.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    # By lines, so that what was printed is there when a limit ends the run.
    sys.stdout.reconfigure(  # type: ignore[union-attr]
        errors="backslashreplace", line_buffering=True
    )
    gc.disable()
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve until stdin ends."""
    setup = Setup(**json.loads(sys.argv[1]))
    prepare(setup)
    send({})
    while (request := receive()) is not None:
        send(answer(request.pop("code"), setup, Limits(**request)))


if __name__ == "__main__":
    main()
