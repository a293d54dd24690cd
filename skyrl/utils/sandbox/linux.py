"""Calls of the C library, and Linux system calls that it has no function for."""

import ctypes
import os
from typing import Any

libc: Any = ctypes.CDLL(None, use_errno=True)


def call(function: Any, *arguments: object) -> int:
    """Call a function of the C library. Raises OSError if it fails."""
    if (result := function(*arguments)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
    return result


def system_call(name: str, number: int, *arguments: object) -> int:
    """Make a system call. Raises OSError if it fails. Integers are passed as 64 bits, as the kernel reads them."""
    wide = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    if (result := libc.syscall(ctypes.c_long(number), *wide)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
