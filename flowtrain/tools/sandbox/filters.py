"""The seccomp filters of the sandbox: which system calls the kernel lets its code make.

Without a scratch folder the list has the calls to compute, to allocate and to write to a pipe; with
one, those for files too.
"""

from __future__ import annotations

import struct


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

PROT_EXEC = 4
LOAD, JUMP_EQ, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
KILL_PROCESS, REFUSE, ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # REFUSE: with EPERM
NR_OFFSET, ARCH_OFFSET, THIRD_ARGUMENT_OFFSET = 0, 4, 32  # in seccomp_data; its low half


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
