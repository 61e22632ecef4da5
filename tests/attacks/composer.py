"""Hostile programs that are put together at random, from the pieces that attacks are made of."""

from __future__ import annotations

import random

from tests.attacks.programs import NATIVE

WON = "GOT" + "THROUGH"
"""A program prints this when something succeeds that the sandbox denies."""
MARK = "flowtrain-hostile"
"""In the names of all files that a program tries to make."""

PRELUDE = f"""
import os, sys
def won(what):
    os.write(1, ("GOT" + "THROUGH " + what).encode())
    os._exit(0)
{NATIVE}
def pointer(text):
    kept.append(native["create_string_buffer"](text.encode() + bytes(200)))
    return native["addressof"](kept[-1])
kept = []
"""
DENIED = (
    "os.fork()",
    "os.forkpty()",
    "os.posix_spawn('/bin/true', ['true'], {{}})",
    "os.execv('/bin/true', ['true'])",
    "os.kill(os.getppid(), {signal})",
    "os.kill(-1, {signal})",
    "os.kill(1, 0)",
    "os.killpg(0, {signal})",
    "os.setsid()",
    "os.setuid(0)",
    "os.setpriority(0, 0, -5)",
    "os.sched_setaffinity(0, [0])",
    "os.nice(-1)",
    "os.pipe()",
    "os.memfd_create('x')",
    "os.eventfd(0)",
    "os.mkfifo('{mark}')",
    "os.mknod('{mark}', 0o60666, 1)",
    "os.chroot('.')",
    "os.unshare(0)",
    "os.pidfd_open(os.getppid())",
    "os.open('/proc/{process}/mem', os.O_RDWR)",
    "os.open('/proc/{process}/environ', os.O_RDONLY)",
    "os.listdir('/proc/{other}/fd')",
    "os.open('/dev/kmsg', os.O_RDWR)",
    "os.open('/etc/shadow', os.O_RDONLY)",
    "os.open('/usr/lib/{mark}', os.O_RDWR | os.O_CREAT)",
    "os.open('/etc/{mark}', os.O_RDWR | os.O_CREAT)",
    "os.symlink('/etc', '/usr/lib/{mark}')",
    "os.rename('/etc/passwd', '/etc/{mark}')",
    "os.write(3 + {small}, b'x')",
    "__import__('_socket').socket()",
    "__import__('_posixsubprocess').fork_exec",
    "__import__('_thread').start_new_thread(print, ())",
    "__import__('signal').setitimer(2, {small} + 1.0)",
    "__import__('resource').setrlimit(7, (4096, 4096))",
    "__import__('fcntl').fcntl(0, 1031, 4096)",
    "__import__('mmap').mmap(-1, 4096, prot=1)",
)
"""Expressions of which none may have a value."""
ALLOWED = ("_posixsubprocess", "mmap(-1")
"""What stands in an expression that may have one where there are packages and files."""
PARENT = "' + str(os.getppid()) + '"
NUISANCES = (
    "sys.stdout.write('x' * 10 ** {small})",
    "os.write(1, bytes(range(256)) * {small})",
    "os.write(1, b'\\xff\\xfe\\x00\\x1b[2J\\x07\\r' * {small})",
    "os.write(1, b'\\0\\0\\0\\x02{{}}')",
    "print('\\ud800' * {small}, '\\U0001f600', '\\x1b]0;title\\x07')",
    "sys.stdout = None",
    "sys.stdout = type('S', (), {{'write': lambda *a: 1 / 0, 'flush': lambda *a: 1 / 0}})()",
    "sys.stdout.close()",
    "sys.stderr = sys.stdin = None",
    "os.close({small})",
    "os.closerange(0, 99)",
    "os.dup2(1, {small})",
    "sys.setrecursionlimit(10 ** {small} + 100)",
    "(lambda f: f(f))(lambda f: f(f))",
    "[].__class__.__base__.__subclasses__()",
    "bytearray(10 ** ({small} + 3))",
    "[bytearray(1 << 24) for _ in range({small})]",
    "9 ** 9 ** {small}",
    "'a' * 10 ** {small} in 'b' * 10 ** {small}",
    "__import__('time').sleep({small} / 20)",
    "__import__('gc').get_objects().clear()",
    "[m.__dict__.clear() for m in (sys.modules.get('json'), sys.modules.get('random')) if m]",
    "sys.modules.clear()",
    "__builtins__.__dict__.update(print=None, len=None, isinstance=None)",
    "sys.addaudithook(lambda *a: 1 / 0)",
    "sys.settrace(lambda *a: 1 / 0)",
    "setattr(os, '_exit', lambda *a: None)",
    "sys.exit({small})",
    "os._exit({small})",
    "os.abort()",
    "native['memset'](native['addressof'](native['c_int']()) + 10 ** 6, 0, 10 ** {small})",
    "open('{mark}', 'w').write('x' * 10 ** {small})",
    "os.mkdir('{mark}')",
    "os.chmod('.', 0)",
    "os.unlink('{mark}')",
)
FRAMES = (
    "{body}",
    "for _ in range({small}):\n{body}",
    "while True:\n{body}",
    "class D:\n  def __del__(self):\n  {body}\nd = D()\nd.me = d",
    "import atexit\n@atexit.register\ndef last():\n{body}",
    "def hook(*a):\n{body}\nsys.excepthook = sys.unraisablehook = hook\n1 / 0",
    "class E(BaseException):\n  def __str__(self):\n  {body}\nraise E",
    "def g():\n  try:\n    yield\n  finally:\n  {body}\nh = g(); next(h)",
)


def compose(rng: random.Random, denied_calls: list[int], has_files: bool) -> str:
    """Write a program; `denied_calls` are numbers of system calls that must be refused."""
    parts = [PRELUDE]
    for _ in range(rng.randint(1, 5)):
        steps = [_step(rng, denied_calls, has_files) for _ in range(rng.randint(1, 4))]
        body = "\n".join(f"  {line}" for step in steps for line in step.split("\n"))
        # A frame within a class has two more spaces before it.
        frame = rng.choice(FRAMES)
        if "  {body}" in frame:
            body = body.replace("\n", "\n  ")
        elif frame == "{body}":
            body = f"if 1:\n{body}"
        parts.append(frame.replace("{body}", body).replace("{small}", str(rng.randint(0, 9))))
    return "\n".join(parts)


def _step(rng: random.Random, denied_calls: list[int], has_files: bool) -> str:
    """Write a step of a program, which goes on when it fails."""
    kind = rng.random()
    names = {
        "signal": rng.choice([0, 9, 15, 17, 19, 29]),
        "small": rng.randint(0, 9),
        "mark": MARK,
        "process": rng.choice(["1", "self", "thread-self", PARENT]),
        "other": rng.choice(["1", PARENT]),
    }
    if kind < 0.4:
        call = rng.choice(DENIED).format(**names)
        if has_files and any(name in call for name in ALLOWED):
            return f"try: {call}\nexcept BaseException: pass"
        return f"try: {call}; won({call!r})\nexcept BaseException: pass"
    if kind < 0.7:
        number = rng.choice(denied_calls) | rng.choice([0, 0, 0, 1 << 30])
        arguments = ", ".join(_argument(rng) for _ in range(6))
        return (
            f"try:\n  if call({number}, {arguments})[0] != -1: won('call {number}')\n"
            "except Exception: pass"
        )
    nuisance = rng.choice(NUISANCES).format(**names)
    return f"try: {nuisance}\nexcept {rng.choice(['Exception', 'BaseException'])}: pass"


def _argument(rng: random.Random) -> str:
    """Write an argument of a system call: a number, a flag, a descriptor, a process, an address."""
    return rng.choice(
        [
            str(rng.choice([0, 1, 2, 3, -1, 7, 4096, 1 << rng.randint(0, 62)])),
            "os.getppid()",
            f"pointer({rng.choice([MARK, '/etc/passwd', '/proc/1/root', '', '/'])!r})",
        ]
    )
