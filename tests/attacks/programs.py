"""Hostile programs, and what each kind of sandbox makes of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """Expectations are regular expressions that the output or the error must match."""

    code: str
    seccomp: str
    bubblewrap: str
    limits: str
    """"": it does not stop this, and the program is not run there."""


def program(
    code: str, seccomp: str, bubblewrap: str | None = None, limits: str | None = None
) -> Program:
    """Write a program; results that are not given are as in the stricter sandbox before."""
    bubblewrap = seccomp if bubblewrap is None else bubblewrap
    return Program(code, seccomp, bubblewrap, bubblewrap if limits is None else limits)


# Reaches libc from inside, where `import ctypes` is barred: what stays forbidden even so is
# forbidden by the kernel.
NATIVE = """
cdll = next(c for c in object.__subclasses__() if c.__name__ == "CDLL")
native = cdll.__init__.__globals__
libc = cdll(None, use_errno=True)
libc.syscall.restype = native["c_long"]
def call(*arguments):
    native["set_errno"](0)
    result = libc.syscall(*[native["c_long"](a) for a in arguments])
    return result, native["get_errno"]()
"""

TIME = "^CPU time limit of 0.3 s exceeded$"
FLOOD = f"{TIME}|^output limit of 16 MiB exceeded$"
ASLEEP = "^wall time limit of 1 s exceeded$"

ATTACKS = {
    "infinite loop": program("while True: pass", TIME),
    "sleep": program("import time; time.sleep(1000)", ASLEEP),
    "dead lock": program(
        "import _thread\nk = _thread.allocate_lock()\nk.acquire()\nk.acquire()", ASLEEP
    ),
    "closed pipe, then loop": program("import os\nos.closerange(0, 9)\nwhile True: pass", TIME),
    "loop in except": program(
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass", TIME
    ),
    "regex": program("import re; re.match('(a+)+$', 'a' * 60 + 'b')", TIME),
    "huge power": program("9 ** 9 ** 9", TIME),
    "huge integer printed": program("10 ** 100000", "ValueError: Exceeds the limit"),
    "memory bomb": program("bytearray(10 ** 9)", "memory limit of 128 MiB exceeded"),
    "memory in small steps": program(
        "a = []\nwhile True: a.append(bytes(8 << 20))", "memory limit of 128 MiB exceeded"
    ),
    "print flood": program("while True: print('x' * 100)", FLOOD),
    "stderr flood": program("import sys\nwhile True: sys.stderr.write('x' * 100)", FLOOD),
    "flood of the pipe": program("import os\nwhile True: os.write(1, bytes(1 << 16))", FLOOD),
    "a little too much": program(
        "print('x' * 2000)", "^x{975,990}\n... 3. char.* out ...\nx{975,990}$"
    ),
    "recursion": program(
        "def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"
    ),
    "recursion without limit": program(
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): return max([1], key=lambda _: "
        "f())\nf()",
        "killed by SIGSEGV|memory limit",
    ),
    "nested source": program(
        "(" * 5000 + ")" * 5000, "SyntaxError|memory limit|MemoryError|RecursionError"
    ),
    "fork": program("import os\nos.fork()", "PermissionError"),
    "fork bomb": program("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", TIME),
    "posix_spawn": program(
        "import os\nos.posix_spawn('/bin/true', ['true'], {})", "PermissionError"
    ),
    "exec": program("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
    "system": program("import os\nprint(os.system('exit 0'))", "^(-1|32512)$"),
    "subprocess": program(
        "import subprocess\nsubprocess.run(['true'])",
        "No module named 'subprocess'",
        "PermissionError",
        "No module|PermissionError",
    ),
    "socket": program(
        "import socket\nsocket.socket()",
        "No module named 'socket'",
        "PermissionError",
        "No module|PermissionError",
    ),
    "ctypes": program(
        "import ctypes\nprint(ctypes.CDLL(None, use_errno=True).kill(1, 0), ctypes.get_errno())",
        "No module named 'ctypes'",
        "^-1 1$",
    ),
    "numpy": program("import numpy", "No module named 'numpy'"),
    "read a file": program(
        "open('/etc/passwd').read()", "PermissionError", "FileNotFoundError", ""
    ),
    "read through io": program(
        "import io; io.FileIO('/etc/hostname').read()", "PermissionError", "FileNotFoundError", ""
    ),
    "stat": program(
        "import os; os.stat('/etc/passwd')", "PermissionError", "FileNotFoundError", ""
    ),
    "list": program(
        "import os\nprint({'proc', 'sys', 'run', 'var', 'boot', 'sbin'} & {*os.listdir('/')})",
        "PermissionError",
        r"^set\(\)$",
        "",
    ),
    "read proc": program(
        "open('/proc/self/environ').read()",
        "PermissionError",
        "FileNotFoundError",
        "PermissionError",
    ),
    "write a file": program(
        "open('/tmp/flowtrain-hostile', 'w')",
        "PermissionError",
        "Read-only file system|FileNotFoundError",
        "",
    ),
    "unlink": program(
        "import os; os.unlink('/etc/passwd')",
        "PermissionError",
        "Read-only file system|FileNotFoundError",
        "",
    ),
    "chdir": program("import os\nos.chdir('/proc')", "PermissionError", "FileNotFoundError", ""),
    "pipe": program("import os; os.pipe()", "PermissionError"),
    "kill the server": program(
        "import os; os.kill(os.getppid(), 9)", "PermissionError|OverflowError|ProcessLookupError"
    ),
    "kill the group": program("import os; os.killpg(0, 9)", "PermissionError"),
    "kill everybody": program("import os; os.kill(-1, 9)", "PermissionError"),
    "signal handlers": program(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        "OSError|PermissionError",
        TIME,
    ),
    "timers": program(
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass", "itimer_error"
    ),
    "thread": program(
        "import _thread; _thread.start_new_thread(print, (1,))",
        "RuntimeError: can't start new thread",
    ),
    "raise the limits": program(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "No module named 'resource'",
        "PermissionError|ValueError",
    ),
    "stdin": program("input()", "EOFError"),
    "abort": program("import os; os.abort()", "killed by SIG"),
    "exit with a status": program("import os; os._exit(7)", "exited with status 7"),
    "sys.exit with a text": program("import sys; sys.exit('enough')", "SystemExit: enough"),
    "exception": program(
        "print('partial')\n1 / 0", r"^ZeroDivisionError: division by zero \(line 2: 1 / 0\)$"
    ),
    "exception that cannot speak": program(
        "class E(Exception):\n  def __str__(self): raise self\nraise E", "exited with status 101"
    ),
    "exception of a megabyte": program(
        "raise ValueError('x' * 10 ** 6)", "^ValueError: x{900,1000}$"
    ),
    "exception of many lines": program("raise ValueError('a\\n\\nb')", "^ValueError: a b$"),
    "keyboard interrupt": program("raise KeyboardInterrupt", "^KeyboardInterrupt$"),
    "syntax": program("x = = 1", "SyntaxError: invalid syntax"),
    "null byte": program("1 +\0 1", "SyntaxError|ValueError"),
    "lone surrogate": program("'\ud800'", "UnicodeEncodeError"),
    "forged error": program(
        "import os\nos.write(1, b'\\nAllIsWell')\nos._exit(101)", "^AllIsWell$"
    ),
    "no way to exit": program(
        "import os\nos._exit = print\nclass E(Exception):\n  def __str__(self): raise self\nraise "
        "E",
        "^exited with status 1$",
    ),
    "builtins broken": program(
        "import builtins\nbuiltins.BaseException = builtins.isinstance = None\n1 / 0",
        "exited with status|TypeError",
    ),
    "server functions": program(
        (
            "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\n"
            "g = f.f_globals\ng['answer']('1', g['Setup']([], [], '', 0, '', True), None)"
        ),
        "PermissionError",
    ),
    "ptrace": program(NATIVE + "print(libc.ptrace(16, 1, 0, 0), native['get_errno']())", "^-1 1$"),
    "connect": program(
        "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)",
        "No module",
        "PermissionError",
        "No module|PermissionError",
    ),
    "listen": program(
        "import socket\nsocket.create_server(('', 0))",
        "No module",
        "PermissionError",
        "No module|PermissionError",
    ),
    "DNS": program(
        "import socket\nsocket.getaddrinfo('example.org', 80)",
        "No module",
        "gaierror",
        "No module|gaierror",
    ),
    "socket by its number": program(
        NATIVE + "print([call(n, 2, 1, 0) for n in (41, 198)])", r"^\[\(-1, 1\), \(-1, 1\)\]$"
    ),
    "environment of init": program(
        "open('/proc/1/environ').read()", "PermissionError", "FileNotFoundError", "PermissionError"
    ),
    "own memory": program(
        "open('/proc/self/mem', 'r+b')", "PermissionError", "FileNotFoundError", "PermissionError"
    ),
    "the server's memory": program(
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')",
        "PermissionError",
        "FileNotFoundError",
        "PermissionError",
    ),
    "symlink out": program(
        "import os\nos.symlink('/etc/hosts', 'x')\nprint(open('x').read())",
        "PermissionError",
        "FileNotFoundError",
        "",
    ),
    "write through a symlink": program(
        "import os\nos.symlink('/usr/lib', 'x')\nopen('x/flowtrain-hostile', 'w')",
        "PermissionError",
        "Read-only file system",
        "PermissionError",
    ),
    "hard link out": program(
        "import os\nos.link('/usr/lib/os-release', 'x')\nopen('x', 'w')",
        "PermissionError",
        "FileNotFoundError|Invalid cross-device|PermissionError",
    ),
    "write beside the scratch folder": program(
        "open('../flowtrain-hostile', 'w')", "PermissionError", "Read-only file system", ""
    ),
    "write into the system": program(
        "open('/usr/lib/flowtrain-hostile', 'w')",
        "PermissionError",
        "Read-only file system",
        "PermissionError",
    ),
    "scratch folder removed": program(
        "import os\nos.rmdir(os.getcwd())", "PermissionError", "Read-only file system", "^$"
    ),
    "scratch folder locked": program(
        "import os\nos.chmod(os.getcwd(), 0)\nprint(1)",
        "PermissionError",
        "PermissionError|^1$",
        "^1$",
    ),
    "folders that cannot be entered": program(
        "import os\nos.makedirs('a/b')\nos.chmod('a', 0)", "PermissionError", "^$"
    ),
    "scratch folder flooded": program(
        "for n in range(10 ** 6):\n  with open(str(n), 'wb') as f: f.write(bytes(1 << 20))",
        "PermissionError",
        "No space left on device",
        "",
    ),
    "endless file": program(
        "with open('x', 'wb') as f:\n  while True: f.write(bytes(1 << 20))",
        "PermissionError",
        "File too large|No space left",
    ),
    "memory that no cap counts": program(
        "import os\nos.memfd_create('x')", "PermissionError|AttributeError"
    ),
    "daemon": program(
        "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    while True: pass",
        "PermissionError",
    ),
    "shell": program("import os\nos.execv('/bin/sh', ['sh', '-c', 'echo out'])", "PermissionError"),
    "thread flood": program(
        "import _thread, time\nwhile True: _thread.start_new_thread(time.sleep, (9,))",
        "can't start new thread",
    ),
    "stop the server": program(
        "import os\nos.kill(os.getppid(), 19)", "PermissionError|OverflowError|ProcessLookupError"
    ),
    "limits of the server": program(
        NATIVE + "import os\nprint([call(n, os.getppid(), 7, 0, 0) for n in (302, 261)])",
        r"^\[\(-1, 1\), \(-1, 1\)\]$",
    ),
    "become root": program("import os\nos.setuid(0)", "PermissionError"),
    "another root": program("import os\nos.chroot('/')", "PermissionError"),
    "all files closed": program(
        "import os\nos.closerange(0, 99)\nprint(1)", "^1$", "exited with status"
    ),
}
