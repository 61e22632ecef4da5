"""The fork server behind `host.py`: runs each piece of untrusted Python in a fresh process.

It is a script for an interpreter with an environment and open files of its own. Its argument is a
`Setup` as JSON. Requests come in on stdin and answers go out on stdout, each a 4-byte big-endian
length and a JSON object:

    <-  {}                        the server is ready
    ->  {"code": str, "timeout_s": float, "memory_mb": int, "max_chars": int}
    <-  {}                        from the process of the run itself, before the code begins
    ->  {"stop": str}             only where the host finds that a limit of time has struck: which
    <-  {"output": str, "error": str | null, "is_clean": bool, "wall_s": float, "cpu_s": float}

The kernel confines the code, not Python: before its first line runs, the process has no file open
but an empty stdin and one pipe, cannot gain privileges, has caps on memory, time and files, and a
seccomp filter refuses every system call that is not listed below. So Python's own tricks to reach
hidden objects reach nothing. Without a scratch folder the list has the calls to compute, to
allocate and to write to that pipe; with one, those for files too. It has no other processes,
threads, sockets, signals and executes no file. The host decides which files there are.

The server alone decides the status of a run; the code can only choose its output, its exit status
and the wording of its own exception. The host watches the clocks: nothing in here tells sleep from
a wait for a core.
"""

from __future__ import annotations

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


def _table(text: str) -> dict[str, tuple[int, int]]:
    """Read system calls: name, number on x86_64, on aarch64 ("-": none, here -1)."""
    words = ["-1" if word == "-" else word for word in text.split()]
    numbers = zip(map(int, words[1::3]), map(int, words[2::3]), strict=True)
    return dict(zip(words[::3], numbers, strict=True))


SYSCALLS = _table("""
read 0 63 write 1 64 munmap 11 215 brk 12 214 mremap 25 216 madvise 28 233 exit 60 93 futex 202 98
restart_syscall 219 128 clock_gettime 228 113 clock_nanosleep 230 115 exit_group 231 94
getrandom 318 278
""")
"""The allow-list."""
NO_EXEC_SYSCALLS = _table("mmap 9 222 mprotect 10 226")
"""Allowed unless their third argument asks for executable memory."""
FILE_SYSCALLS = _table("""
open 2 - close 3 57 stat 4 - fstat 5 80 lstat 6 - lseek 8 62 newfstatat 262 79 statx 332 291
statfs 137 43 fstatfs 138 44 openat 257 56 access 21 - faccessat 269 48 faccessat2 439 439
getdents64 217 61 getdents 78 - readlink 89 - readlinkat 267 78 getcwd 79 17 chdir 80 49
fchdir 81 50 mkdir 83 - mkdirat 258 34 rmdir 84 - unlink 87 - unlinkat 263 35 rename 82 -
renameat 264 38 renameat2 316 276 link 86 - linkat 265 37 symlink 88 - symlinkat 266 36
truncate 76 45 ftruncate 77 46 fallocate 285 47 fsync 74 82 fdatasync 75 83 flock 73 32 chmod 90 -
fchmod 91 52 fchmodat 268 53 umask 95 166 utimensat 280 88 ioctl 16 29 dup 32 23 dup2 33 -
dup3 292 24 pread64 17 67 pwrite64 18 68 readv 19 65 writev 20 66 copy_file_range 326 285
sendfile 40 71 poll 7 - ppoll 271 73 select 23 - pselect6 270 72 msync 26 227 mincore 27 232
rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 sigaltstack 131 132 sched_yield 24 124
sched_getaffinity 204 123 getcpu 309 168 getpid 39 172 getppid 110 173 gettid 186 178 getuid 102 174
geteuid 107 175 getgid 104 176 getegid 108 177 getgroups 115 158 getrusage 98 165 times 100 153
sysinfo 99 179 uname 63 160 nanosleep 35 101 clock_getres 229 114 gettimeofday 96 169 time 201 -
rseq 334 293 set_robust_list 273 99
""")
"""Allowed with a scratch folder. Left out on purpose: `fcntl`, which can send a signal to another
process, and `memfd_create`, which holds memory that no cap counts."""
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's audit number of each machine, and its column in the tables above."""

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
LOAD, JUMP_EQ, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
KILL_PROCESS, REFUSE, ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # REFUSE: with EPERM
NR_OFFSET, ARCH_OFFSET, THIRD_ARGUMENT_OFFSET = 0, 4, 32  # in seccomp_data; its low half
PROT_EXEC = 4

EXIT_RAISED, EXIT_MEMORY, EXIT_UNLOCKED = 101, 102, 103
MAX_ERROR_CHARS, MAX_FILE_BYTES, SOURCE = 1000, 64 << 20, "<code>"
CPU_ERROR = "CPU time limit of {:g} s exceeded"


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
    must_filter: bool
    """Refuse to run when there can be no seccomp filter; else do without it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run."""

    timeout_s: float
    """CPU time."""
    memory_mb: int
    """Address space in MiB, the interpreter's own 30 or so included."""
    max_chars: int
    """Characters of output."""

    @property
    def max_bytes(self) -> int:
        return 4 * (self.max_chars + MAX_ERROR_CHARS)


def filter_program(machine: str, has_files: bool = False) -> bytes:
    """Return the BPF program of the allow-list; empty for an unknown machine."""
    if machine not in MACHINES:
        return b""
    arch, column = MACHINES[machine]
    calls = SYSCALLS | FILE_SYSCALLS if has_files else SYSCALLS
    allowed = [numbers[column] for numbers in calls.values() if numbers[column] >= 0]
    code = [(LOAD, 0, 0, ARCH_OFFSET), (JUMP_EQ, 1, 0, arch), (RETURN, 0, 0, KILL_PROCESS)]
    code.append((LOAD, 0, 0, NR_OFFSET))
    for number in allowed:
        code += [(JUMP_EQ, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    prot_exec = 0 if has_files else PROT_EXEC  # compiled packages are loaded into executable memory
    for numbers in NO_EXEC_SYSCALLS.values():
        code += [
            (JUMP_EQ, 0, 4, numbers[column]),
            (LOAD, 0, 0, THIRD_ARGUMENT_OFFSET),
            (JUMP_SET, 1, 0, prot_exec),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, REFUSE),
        ]
    code.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


@functools.cache
def filter_argument(has_files: bool) -> ctypes.Array[ctypes.c_char]:
    """Make a struct sock_fprog, once in the server: a forked process would pay in copied pages."""
    # The kernel refuses an empty program.
    program = ctypes.create_string_buffer(filter_program(os.uname().machine, has_files))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(program))
    argument = ctypes.create_string_buffer(header)
    argument.program = program  # type: ignore[attr-defined]  # keeps it alive
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
    filter_address = ctypes.addressof(filter_argument(bool(setup.scratch)))
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
    """Run the code in the forked process; return its exit status."""
    send({})
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


def watch(pid: int, output_fd: int, max_bytes: int) -> tuple[bytes, str]:
    """Read the child's output until it ends; return it and why the host stopped it, or ""."""
    ended_fd = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (0, output_fd, ended_fd):
        poll.register(fd, select.POLLIN)
    output, reason = b"", ""
    while ready := {fd for fd, _ in poll.poll()}:
        if output_fd in ready:
            chunk = os.read(output_fd, 1 << 16)
            output += chunk
            if len(output) > max_bytes:
                os.kill(pid, signal.SIGKILL)
                chunk = b""
            if not chunk:
                poll.unregister(output_fd)
        elif ended_fd in ready:  # it may have closed the pipe before, or left it to another
            break
        else:
            reason = (receive() or {}).get("stop", "")
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            poll.unregister(0)
    os.close(ended_fd)
    return output, reason


def explain(status: int, last_line: str, limits: Limits) -> str | None:
    """Put a wait status into words; None for success."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    if code == EXIT_UNLOCKED:
        system = f"{os.uname().sysname} {os.uname().machine}"
        return f"the sandbox needs seccomp, which this kernel or machine ({system}) does not offer"
    if code == EXIT_MEMORY:
        return f"memory limit of {limits.memory_mb} MiB exceeded"
    if code == EXIT_RAISED and last_line:
        return last_line
    return f"exited with status {code}" if code else None


def answer(code: str, setup: Setup, limits: Limits) -> dict[str, object]:
    """Run one request in a process of its own."""
    server_pid = os.getpid()
    changed = change_time(setup.scratch)
    reader, writer = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(become_child(code, setup, limits, writer, server_pid))
        finally:
            os._exit(EXIT_RAISED)
    os.close(writer)
    raw, reason = watch(pid, reader, limits.max_bytes)
    _, status, usage = os.wait4(pid, 0)
    wall_s, cpu_s = time.monotonic() - started, usage.ru_utime + usage.ru_stime
    os.close(reader)
    is_clean = change_time(setup.scratch) == changed
    times = {"is_clean": is_clean, "wall_s": wall_s, "cpu_s": cpu_s}
    return judge(raw, reason, status, cpu_s, limits) | times


def judge(raw: bytes, reason: str, status: int, cpu_s: float, limits: Limits) -> dict[str, object]:
    """Return the output of a run, or its error."""
    output = raw.decode("utf-8", "replace")
    if len(raw) > limits.max_bytes or (status == 0 and len(output) > limits.max_chars):
        error: str | None = f"output limit of {limits.max_chars} characters exceeded"
    elif reason or cpu_s >= limits.timeout_s:
        error = reason or CPU_ERROR.format(limits.timeout_s)
    else:
        error = explain(status, output.rpartition("\n")[2], limits)
    return {"output": output if error is None else "", "error": error}


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
    filter_argument(bool(setup.scratch))
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path += setup.path
    for name in setup.preload:
        importlib.import_module(name)
    os.environ.clear()
    if not setup.scratch:
        sys.path.clear()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    gc.disable()
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve until stdin ends."""
    setup = Setup(**json.loads(sys.argv[1]))
    prepare(setup)
    send({})
    while (request := receive()) is not None:
        if "code" in request:  # else it stops a run that has just ended
            send(answer(request.pop("code"), setup, Limits(**request)))


if __name__ == "__main__":
    main()
