"""The fork server behind `sandbox.py`: runs each piece of untrusted Python in a fresh process that can do nothing but compute.

It is a script for an interpreter of its own, with an environment and open files of its own; nothing imports it. Requests come in on
stdin and answers go out on stdout, each a 4-byte big-endian length and a JSON object:

    ->  {"code": str, "timeout_s": float, "memory_mb": int, "max_chars": int}
    <-  {"output": str, "error": str | null}        (an empty one first, when the server is ready)

What confines the code is the kernel, not Python: before the first line of it runs, the process has no file open but an empty stdin and
one pipe, may not gain privileges, and a seccomp filter refuses every system call that is not needed to compute, to allocate and to
write to that pipe. Python's own tricks to reach hidden objects therefore reach nothing. The server alone decides what the
status of a run is; the code can only choose its output, its exit status and the wording of its own exception.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import json
import math
import os
import random
import resource
import signal
import struct
import sys
import types
from dataclasses import dataclass
from types import FrameType

PRELOADED = """
array bisect calendar cmath collections collections.abc contextlib copy datetime decimal enum fractions functools heapq io itertools
numbers operator re statistics string textwrap time typing unicodedata _strptime encodings.ascii encodings.latin_1 encodings.utf_16
"""
"""Besides what this script imports: all the modules that the code can import."""

# System call: its number on x86_64, on aarch64.
SYSCALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "exit": (60, 93),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
"""The allow-list."""
NO_EXEC_SYSCALLS = {"mmap": (9, 222), "mprotect": (10, 226)}
"""Allowed as long as their third argument does not ask for executable memory."""
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine: the kernel's audit number of its architecture, its column in the tables above."""

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
LOAD, JUMP_EQ, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
KILL_PROCESS, REFUSE, ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # REFUSE: the call fails with EPERM
NR_OFFSET, ARCH_OFFSET, THIRD_ARGUMENT_OFFSET = 0, 4, 32  # in struct seccomp_data; of the argument the low half
PROT_EXEC = 4

EXIT_RAISED, EXIT_MEMORY, EXIT_UNLOCKED = 101, 102, 103
MAX_ERROR_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use."""

    timeout_s: float
    """Wall time."""
    memory_mb: int
    """Address space in MiB, the interpreter's own 30 or so included."""
    max_chars: int
    """Characters of output."""


def filter_program(machine: str) -> bytes:
    """The BPF program that implements the allow-list; empty where the system call numbers are not known."""
    if machine not in MACHINES:
        return b""
    arch, column = MACHINES[machine]
    code = [(LOAD, 0, 0, ARCH_OFFSET), (JUMP_EQ, 1, 0, arch), (RETURN, 0, 0, KILL_PROCESS), (LOAD, 0, 0, NR_OFFSET)]
    for numbers in SYSCALLS.values():
        code += [(JUMP_EQ, 0, 1, numbers[column]), (RETURN, 0, 0, ALLOW)]
    for numbers in NO_EXEC_SYSCALLS.values():
        code += [(JUMP_EQ, 0, 4, numbers[column]), (LOAD, 0, 0, THIRD_ARGUMENT_OFFSET), (JUMP_SET, 1, 0, PROT_EXEC)]
        code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


# Made once, in the server: what a forked process computes costs it far more, in copied pages. An empty program is refused by the kernel.
FILTER = ctypes.create_string_buffer(filter_program(os.uname().machine))
FPROG = ctypes.create_string_buffer(struct.pack("HP", len(FILTER) // 8, ctypes.addressof(FILTER)))  # struct sock_fprog


def prctl(option: int, argument: int = 0, address: int = 0) -> bool:
    """Linux's prctl; False when the kernel refuses it or is another one."""
    if sys.platform != "linux":
        return False
    arguments = [ctypes.c_ulong(number) for number in (argument, address, 0, 0)]
    return bool(LIBC.prctl(option, *arguments) == 0)


def lock_down(limits: Limits, server_pid: int) -> bool:
    """Give up, for good, everything but computing; False when that is not possible here."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:  # the server died before the line above took effect
        return False
    cpu_s = math.ceil(limits.timeout_s) + 1
    caps = {"CPU": cpu_s, "AS": limits.memory_mb << 20, "FSIZE": 0, "NOFILE": 3, "CORE": 0, "NPROC": 0}
    for name, cap in caps.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or cap < hard:  # a stricter limit of the host stays: only root could raise it
            resource.setrlimit(kind, (cap, cap))
    address = ctypes.addressof(FPROG)
    return prctl(PR_SET_DUMPABLE, 0) and prctl(PR_SET_NO_NEW_PRIVS, 1) and prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address)


def run_as_main(code: str) -> None:
    """Print the value of an expression, or run a program as the module `__main__`."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    try:
        expression = compile(code.strip(), "<code>", "eval")
    except SyntaxError:
        exec(compile(code, "<code>", "exec"), module.__dict__)
        return
    value = eval(expression, module.__dict__)
    if value is not None:
        print(value)


def execute(code: str) -> int:
    """Run the code and return the exit status of the process; an exception becomes the last line of the output."""
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
        line = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        os.write(2, b"\n" + line[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace"))
        return EXIT_RAISED
    return 0


def become_child(code: str, limits: Limits, output_fd: int, server_pid: int) -> int:
    """What the forked process does; returns its exit status."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.closerange(3, 1 << 20)
    if not lock_down(limits, server_pid):
        return EXIT_UNLOCKED
    gc.enable()
    random.seed(0)
    return execute(code)


def watch(pid: int, output_fd: int, timeout_s: float, max_bytes: int) -> tuple[bytes, int, bool]:
    """Read the child's output and wait for its end; returns (output, wait status, whether its time ran out)."""
    expired = False

    def on_alarm(_signum: int, _frame: FrameType | None) -> None:
        nonlocal expired
        expired = True
        os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    output = b""
    while len(output) <= max_bytes and (chunk := os.read(output_fd, 1 << 16)):
        output += chunk
    if len(output) > max_bytes:
        os.kill(pid, signal.SIGKILL)
    # The pipe ends with the process, which may not close it. The alarm goes off duty before the process is reaped, so that it can never
    # kill another one that was given the same number.
    signal.setitimer(signal.ITIMER_REAL, 0)
    return output, os.waitpid(pid, 0)[1], expired


def explain(status: int, last_line: str, limits: Limits) -> str | None:
    """What a wait status says in words; None for success."""
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


def answer(code: str, limits: Limits) -> dict[str, str | None]:
    """Run one request in a process of its own."""
    server_pid = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(become_child(code, limits, writer, server_pid))
        finally:
            os._exit(EXIT_RAISED)
    os.close(writer)
    max_bytes = 4 * (limits.max_chars + MAX_ERROR_CHARS)
    raw, status, expired = watch(pid, reader, limits.timeout_s, max_bytes)
    os.close(reader)
    output = raw.decode("utf-8", "replace")
    if expired:
        error: str | None = f"time limit of {limits.timeout_s:g} s exceeded"
    elif len(raw) > max_bytes or (status == 0 and len(output) > limits.max_chars):
        error = f"output limit of {limits.max_chars} characters exceeded"
    else:
        error = explain(status, output.rpartition("\n")[2], limits)
    return {"output": output if error is None else "", "error": error}


def read_exactly(num_bytes: int) -> bytes:
    """Bytes from stdin; fewer only at its end."""
    data = b""
    while len(data) < num_bytes and (chunk := os.read(0, num_bytes - len(data))):
        data += chunk
    return data


def send(message: dict[str, str | None]) -> None:
    """Write one answer to stdout."""
    body = json.dumps(message).encode()
    data = len(body).to_bytes(4, "big") + body
    while data:
        data = data[os.write(1, data) :]


def prepare() -> None:
    """Load all that the code may import, then make the rest unreachable and runs repeatable."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in PRELOADED.split():
        importlib.import_module(name)
    sys.path.clear()
    os.environ.clear()
    for name in ("ctypes", "_ctypes", "resource"):
        del sys.modules[name]
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    gc.disable()
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve until stdin ends."""
    prepare()
    send({})
    while len(header := read_exactly(4)) == 4:
        request = json.loads(read_exactly(int.from_bytes(header, "big")))
        send(answer(request.pop("code"), Limits(**request)))


if __name__ == "__main__":
    main()
