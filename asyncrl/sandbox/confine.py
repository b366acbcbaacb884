"""Confines the calling process for good with means of the Linux kernel. Needs no root, and also confines root.

- resource limits on CPU time, address space, file size and number of open files;
- Landlock: files can be read only below some folders, and written only below one;
- seccomp: an allow-list of harmless system calls; all others (sockets, processes, signals to other processes, mounts,
  changes of owner or mode, io_uring, bpf and the like) fail with EPERM.

Runs inside the sandbox's process, so this module imports only the standard library. Linux on x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Iterator

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG = (
    1 << bit for bit in (1, 2, 3, 4, 5, 7, 8)
)
TRUNCATE = 1 << 14
WHOLE_FOLDER = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE
ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15}
"""Landlock version -> number of access rights; 16 since version 5."""

PACKAGES = ("site-packages", "dist-packages")
"""Folders next to the standard library that are not part of it."""
READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache")
DEVICES = {"/dev/null": READ_FILE | WRITE_FILE, "/dev/zero": READ_FILE, "/dev/urandom": READ_FILE}

# Numbers on x86_64 and aarch64; -1 where the call does not exist.
SYSCALLS: dict[str, tuple[int, int]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "lseek": (8, 62), "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79),
    "stat": (4, -1), "lstat": (6, -1), "statx": (332, 291), "access": (21, -1), "faccessat": (269, 48),
    "faccessat2": (439, 439), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "brk": (12, 214), "madvise": (28, 233), "futex": (202, 98), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "gettimeofday": (96, 169),
    "time": (201, -1), "times": (100, 153), "getrusage": (98, 165), "dup": (32, 23), "dup2": (33, -1),
    "dup3": (292, 24), "pipe2": (293, 59), "flock": (73, 32), "ftruncate": (77, 46), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276), "readlink": (89, -1), "readlinkat": (267, 78), "statfs": (137, 43),
    "fstatfs": (138, 44), "sendfile": (40, 71), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293), "membarrier": (324, 283), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "exit": (60, 93), "exit_group": (231, 94), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "setitimer": (38, 103), "getitimer": (36, 102),
    "alarm": (37, -1), "pause": (34, -1), "restart_syscall": (219, 128), "poll": (7, -1), "ppoll": (271, 73),
    "select": (23, -1), "pselect6": (270, 72), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "getpid": (39, 172),
    "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getgroups": (115, 158), "getpgrp": (111, -1), "getpgid": (121, 155),
    "getsid": (124, 156), "getresuid": (118, 148), "getresgid": (120, 150), "uname": (63, 160),
    "sysinfo": (99, 179), "getrandom": (318, 278), "getrlimit": (97, 163), "arch_prctl": (158, -1),
}  # fmt: skip
CLONE, CLONE3, IOCTL, FCNTL, OPENAT, PRLIMIT64 = (56, 220), (435, 435), (16, 29), (72, 25), (257, 56), (302, 261)
MKDIR, MKDIRAT = (83, -1), (258, 34)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
OWNER_BITS = (0o400, 0o200, 0o100)
UMASK = 0o077
TERMINAL_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: used when files are read and written."""
FILE_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""Duplicates, flags and locks; not F_SETOWN, by which the kernel sends any signal to any process of the user."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Codes of the packet filter's instructions: load a word, three jumps, return."""
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]


class Unconfined(Exception):
    """The kernel lacks or refused a means of confinement."""


def confine(ruleset: int, folder: str, *, cpu_s: int, memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Confines this process; it may write files only below `folder`. `ruleset`: as `readable_files` returns it; the
    folder is added to it. Raises Unconfined when the kernel cannot."""
    _limit(resource.RLIMIT_CPU, cpu_s)
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_NOFILE, open_files)
    _limit(resource.RLIMIT_CORE, 0)
    os.umask(UMASK)  # permanent, so that the watcher can list and remove every file of the program
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise Unconfined(f"PR_SET_NO_NEW_PRIVS: {_reason()}")
    _allow(libc, ruleset, folder, WHOLE_FOLDER & _handled(libc))
    if libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0):
        raise Unconfined(f"landlock_restrict_self: {_reason()}")
    os.close(ruleset)
    _restrict_calls(libc)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def readable_files() -> int:
    """Returns the descriptor of a Landlock ruleset in which the interpreter's files can be read and no file be written.
    Raises Unconfined when the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    handled = _handled(libc)
    attributes = struct.pack("=Q", handled)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise Unconfined(f"landlock_create_ruleset: {_reason()}")
    readable = dict.fromkeys(map(os.path.realpath, (*READABLE, os.path.join(sys.base_prefix, "lib"), *sys.path)))
    rules = {part: access for path in readable for part, access in _without_packages(path)}
    for path, access in (rules | DEVICES).items():
        _allow(libc, ruleset, path, access & handled)
    return ruleset


def _handled(libc: ctypes.CDLL) -> int:
    """The access rights that this kernel's Landlock knows."""
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        raise Unconfined(f"Landlock (Linux 5.13 or later, in its list of security modules): {_reason()}")
    return (1 << ACCESSES.get(version, 16)) - 1


def _without_packages(path: str) -> Iterator[tuple[str, int]]:
    """Rules that allow reading everything below the path except installed packages, whose names can be listed. Packages
    are in the folder itself, or in a subfolder that is named after Python."""
    names = os.listdir(path) if os.path.isdir(path) else []
    if not any(name in PACKAGES or name.startswith("python") for name in names):
        yield path, READ_FILE | READ_DIR
        return
    yield path, READ_DIR
    for name in names:
        if name.startswith("python"):
            yield from _without_packages(os.path.join(path, name))
        elif name not in PACKAGES:
            yield os.path.join(path, name), READ_FILE | READ_DIR


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> None:
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        access &= READ_FILE | WRITE_FILE | TRUNCATE
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", access, file)
    if libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0):
        raise Unconfined(f"landlock_add_rule for {path}: {_reason()}")
    os.close(file)


def _restrict_calls(libc: ctypes.CDLL) -> None:
    if platform.machine() not in AUDIT_ARCH:
        raise Unconfined(f"a system call table of {platform.machine()} (there are {', '.join(AUDIT_ARCH)})")
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in filter_program(platform.machine()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise Unconfined(f"seccomp filters: {_reason()}")


def filter_program(machine: str) -> list[Instruction]:
    """The seccomp filter: (code, jump if true, jump if false, operand) of each instruction."""
    column = list(AUDIT_ARCH).index(machine)
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[machine]), _give(KILL), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, 0, 1, 0x40000000), _give(KILL)]  # the second table of x86_64
    # Only threads, which share the table of open files: the watcher counts the files in it.
    thread = [(ANY_BIT, 0, 2, CLONE_THREAD), (ANY_BIT, 0, 1, CLONE_FILES), _give(ALLOW), _deny(errno.EPERM)]
    program += _when(CLONE[column], [_argument(0), *thread])
    # The flags of clone3 are in memory, which a filter cannot read; without it threads are made by clone.
    program += _when(CLONE3[column], [_deny(errno.ENOSYS)])
    program += _when(IOCTL[column], [_argument(1), *_one_of(TERMINAL_IOCTLS), _deny(errno.ENOTTY)])
    program += _when(FCNTL[column], [_argument(1), *_one_of(FILE_FCNTLS), _deny(errno.EPERM)])
    # Early versions of Landlock allow truncating a read-only file while opening it.
    truncates = [(ANY_BIT, 0, 1, os.O_TRUNC), (ANY_BIT, 0, 1, os.O_ACCMODE), _give(ALLOW), _deny(errno.EPERM)]
    program += _when(OPENAT[column], [_argument(2), *truncates])
    # The watcher could neither count nor remove a folder that its owner cannot list or enter.
    for number, mode in ((MKDIR[column], 1), (MKDIRAT[column], 2)):
        if number >= 0:
            bits = [(ANY_BIT, 0, len(OWNER_BITS) - place, bit) for place, bit in enumerate(OWNER_BITS)]
            program += _when(number, [_argument(mode), *bits, _give(ALLOW), _deny(errno.EPERM)])
    no_new_limit = [(EQUAL, 0, 3, 0), (LOAD, 0, 0, 16 + 8 * 2 + 4), (EQUAL, 0, 1, 0), _give(ALLOW), _deny(errno.EPERM)]
    program += _when(PRLIMIT64[column], [_argument(2), *no_new_limit])
    program += _one_of(numbers[column] for numbers in SYSCALLS.values() if numbers[column] >= 0)
    return [*program, _deny(errno.EPERM)]


def _when(number: int, block: list[Instruction]) -> list[Instruction]:
    """The block, which returns on every path, for one system call only."""
    return [(EQUAL, 0, len(block), number), *block]


def _one_of(values: Iterable[int]) -> list[Instruction]:
    return [instruction for value in values for instruction in ((EQUAL, 0, 1, value), _give(ALLOW))]


def _argument(index: int) -> Instruction:
    """Loads the lower half of an argument of the system call (both machines are little-endian)."""
    return LOAD, 0, 0, 16 + 8 * index


def _give(answer: int) -> Instruction:
    return RETURN, 0, 0, answer


def _deny(code: int) -> Instruction:
    return RETURN, 0, 0, DENY | code


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
