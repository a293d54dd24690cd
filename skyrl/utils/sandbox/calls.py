"""Allowlist of system calls for model-written code (seccomp).

Other calls fail with EPERM, or with ENOSYS if they are so new that C libraries try them first and fall back. Calls with
another numbering (32 bits, x32) kill the process. Some calls are allowed only with certain arguments.

No allowed call reaches another process, a network, a device, or permissions of a file, or creates memory that the
limits of `confinement.py` do not count.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from skyrl.utils.sandbox.linux import call, libc, system_call

# Numbers on x86_64 and aarch64; -1 if the call does not exist.
_ALLOWED = {
    # Open files
    **{"read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67)},
    **{"pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "lseek": (8, 62), "close": (3, 57)},
    **{"close_range": (436, 436), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1)},
    **{"pipe2": (293, 59), "sendfile": (40, 71), "copy_file_range": (326, 285), "fsync": (74, 82)},
    **{"fdatasync": (75, 83), "ftruncate": (77, 46), "fallocate": (285, 47), "poll": (7, -1), "ppoll": (271, 73)},
    **{"select": (23, -1), "pselect6": (270, 72), "epoll_create1": (291, 20), "epoll_ctl": (233, 21)},
    **{"epoll_wait": (232, -1), "epoll_pwait": (281, 22), "eventfd2": (290, 19)},
    # A private socket pair, which asyncio needs
    **{"shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209)},
    **{"recvfrom": (45, 207)},
    # File system queries
    **{"stat": (4, -1), "lstat": (6, -1), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291)},
    **{"statfs": (137, 43), "fstatfs": (138, 44), "access": (21, -1), "faccessat": (269, 48)},
    **{"faccessat2": (439, 439), "readlink": (89, -1), "readlinkat": (267, 78), "getdents64": (217, 61)},
    **{"getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166)},
    # Memory and threads
    **{"mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233)},
    **{"msync": (26, 227), "brk": (12, 214), "futex": (202, 98), "set_robust_list": (273, 99)},
    **{"set_tid_address": (218, 96), "rseq": (334, 293), "membarrier": (324, 283), "sched_yield": (24, 124)},
    **{"sched_getaffinity": (204, 123), "getcpu": (309, 168), "exit": (60, 93), "exit_group": (231, 94)},
    # Time, and its own signals
    **{"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115)},
    **{"nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, -1), "times": (100, 153)},
    **{"getrusage": (98, 165), "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, -1)},
    **{"pause": (34, -1), "restart_syscall": (219, 128), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135)},
    **{"rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137)},
    **{"rt_sigpending": (127, 136), "sigaltstack": (131, 132)},
    # Process and system information
    **{"getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, -1)},
    **{"getpgid": (121, 155), "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175)},
    **{"getresuid": (118, 148), "getgid": (104, 176), "getegid": (108, 177), "getresgid": (120, 150)},
    **{"getgroups": (115, 158), "getrlimit": (97, 163), "setrlimit": (160, 164), "getrandom": (318, 278)},
    **{"uname": (63, 160), "sysinfo": (99, 179)},
}
_WRITES = {
    **{"mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35)},
    **{"rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "truncate": (76, 45)},
}
"""Calls that modify the file system."""
_CONDITIONAL = {
    **{"open": (2, -1), "openat": (257, 56), "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29)},
    **{"prctl": (157, 167), "prlimit64": (302, 261), "socketpair": (53, 199), "sendto": (44, 206)},
    **{"sendmsg": (46, 211)},
}
"""Calls that are allowed with certain arguments; see `_conditions`."""
_SECCOMP = (317, 277)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables of calls, and the kernel's number of the architecture, by machine."""

_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
_SOCK_STREAM, _SOCK_NONBLOCK, _SOCK_CLOEXEC, _AF_UNIX = 1, 0o4000, 0o2000000, 1
_FCNTL = (*range(8), 1030, 1031, 1032)  # duplicates, flags and locks of files; not signal owners or leases
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal check and size; bytes to read; flags
_PRCTL = (15, 16)  # thread names
_NEWER_THAN_2019 = 424
CHANNEL = 200
"""File descriptor for sending the notification descriptor once. Code cannot have such a high descriptor."""
_PR_SET_NO_NEW_PRIVS, _NEW_LISTENER = 38, 8

_ALLOW, _ASK, _KILL, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def is_supported() -> bool:
    """Return True if the system call numbers of this machine are known."""
    return platform.system() == "Linux" and platform.machine() in _MACHINES


def forbid_calls(*, writes: bool, asks: bool) -> int:
    """Apply the allowlist to this process.

    Args:
        writes: True: files may be opened for writing, created, renamed and removed.
        asks: True: each start of a thread waits for permission of the supervisor.

    Returns the file descriptor for notifications; -1 without notifications. If the system does not support them, no
    thread can start.
    """
    code = program(writes, asks)
    if asks:
        with suppress(OSError):  # unsupported by the kernel, or the container uses notifications itself
            return _install(code, _NEW_LISTENER)
    _install(code, 0)
    return -1


def give_up_gains() -> None:
    """Set no_new_privs: programs cannot gain privileges.

    The kernel requires it for unprivileged seccomp and Landlock.
    """
    call(libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


@cache
def program(writes: bool, asks: bool) -> bytes:
    """Return the filter as BPF instructions. Call it early, so that forked processes share the cached result."""
    column, architecture = _MACHINES[platform.machine()]
    kill = _step(_RETURN, _KILL)
    steps = [_step(_LOAD, 4), _step(_IF_EQUAL, architecture, 1), kill, _step(_LOAD, 0)]
    steps += [_step(_IF_AT_LEAST, 0x40000000, 0, 1), kill]  # the x32 numbering of x86_64
    for numbers in ({**_ALLOWED, **_WRITES} if writes else _ALLOWED).values():
        steps += _allow_if(numbers[column])
    for name, conditions in _conditions(writes).items():
        result = _ASK if name == "clone" and asks else _ALLOW
        steps += _allow_if(_CONDITIONAL[name][column], *conditions, result=result)
    steps += [_step(_IF_AT_LEAST, _NEWER_THAN_2019, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    return b"".join([*steps, _refuse()])


def _conditions(writes: bool) -> dict[str, list[list[bytes]]]:
    """Return the conditions on the arguments of some calls."""
    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    streams = [_SOCK_STREAM | flags for flags in (0, _SOCK_NONBLOCK, _SOCK_CLOEXEC, _SOCK_NONBLOCK | _SOCK_CLOEXEC)]
    return {
        "open": [] if writes else [_lacks(1, changing)],
        "openat": [] if writes else [_lacks(2, changing)],
        "clone": [_lacks(0, _CLONE_NEW), _has(0, _CLONE_THREAD)],
        "fcntl": [_one_of(1, *_FCNTL)],
        "ioctl": [_one_of(1, *_IOCTL)],
        "prctl": [_one_of(0, *_PRCTL)],
        "prlimit64": [_one_of(0, 0)],  # only its own limits
        "socketpair": [_one_of(0, _AF_UNIX), _one_of(1, *streams)],
        "sendto": [_one_of(4, 0), _one_of(4.5, 0)],  # without an address
        "sendmsg": [_one_of(0, CHANNEL)],
    }


def _install(code: bytes, flags: int) -> int:
    column, _ = _MACHINES[platform.machine()]
    whole = _FilterProgram(len(code) // 8, code)
    return system_call("seccomp", _SECCOMP[column], 1, flags, ctypes.byref(whole))


def _step(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a classic BPF instruction: (operation, jump if true, jump if false, operand)."""
    return struct.pack("HBBI", operation, if_true, if_false, operand)


def _refuse() -> bytes:
    return _step(_RETURN, _ERRNO | errno.EPERM)


def _allow_if(number: int, *conditions: Sequence[bytes], result: int = _ALLOW) -> list[bytes]:
    """Return instructions that allow a call if all conditions hold. A condition rejects the call or falls through."""
    body = [step for condition in conditions for step in condition] + [_step(_RETURN, result)]
    return [] if number < 0 else [_step(_IF_EQUAL, number, 0, len(body)), *body]


def _load(argument: float) -> bytes:
    """Return an instruction that loads the lower half of an argument. 4.5 loads the upper half of argument 4."""
    return _step(_LOAD, 16 + int(8 * argument))


def _one_of(argument: float, *values: int) -> list[bytes]:
    tests = [_step(_IF_EQUAL, value, len(values) - index) for index, value in enumerate(values)]
    return [_load(argument), *tests, _refuse()]


def _has(argument: int, bit: int) -> list[bytes]:
    return [_load(argument), _step(_IF_ANY_BIT, bit, 1), _refuse()]


def _lacks(argument: int, bits: int) -> list[bytes]:
    return [_load(argument), _step(_IF_ANY_BIT, bits, 0, 1), _refuse()]
