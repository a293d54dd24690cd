"""What Linux refuses to a process that runs code of a model. Standard library only; the process starts from nothing.

Three walls, each of which holds by itself: resource limits, a filter of system calls (seccomp), and namespaces, in
which there is no network, no other process, and no file to write but those in one folder.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Sequence
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET, _CLONE_THREAD = 0x20000000, 0x40000000, 0x00010000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_PRIVATE = 1, 2, 4, 8, 4096, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

# Names and numbers of the calls on each machine. x86_64 first, aarch64 second; -1 where there is no such call.
_DENIED = {
    **{"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)},
    **{"fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424)},
    **{"pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270)},
    **{"process_vm_writev": (311, 271), "setpgid": (109, 154), "setsid": (112, 157), "unshare": (272, 97)},
    **{"setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "io_uring_setup": (425, 425)},
    **{"io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217)},
    **{"request_key": (249, 218), "keyctl": (250, 219)},
}
_CLONE, _CLONE3, _PRLIMIT64 = (56, 220), 435, (302, 261)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table and the kernel's number of the architecture."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def is_supported() -> bool:
    """Whether the filter of system calls is known for this machine."""
    return platform.system() == "Linux" and platform.machine() in _MACHINES


def die_with_parent() -> None:
    """This process is killed when the one that started it ends."""
    _call(_libc.prctl, _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def hide_memory() -> None:
    """Other processes of the same user cannot look into this one, nor into those it starts."""
    _call(_libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)


def enter_namespaces(folder: str, folder_bytes: int, hidden: Iterable[str]) -> None:
    """Go where there is no network and every file is read-only but those in `folder`, which starts empty.

    Processes that are started from now on see no process outside. Files and folders in `hidden` appear empty. Raises
    OSError where the system does not permit it.
    """
    uid, gid = os.getuid(), os.getgid()
    _call(_libc.unshare, _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_RDONLY, propagation=_MS_PRIVATE)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call(_libc.syscall, _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size)
    safe = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("tmpfs", folder, "tmpfs", safe, f"size={folder_bytes},mode=700")
    for path in hidden:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", safe | _MS_RDONLY, "size=4k")
        else:
            _mount("/dev/null", path, None, _MS_BIND, None)


def mount_own_processes() -> None:
    """`/proc` with the processes of this namespace; an empty one where that is not permitted."""
    safe = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        _mount("proc", "/proc", "proc", safe, None)
    except OSError:
        _mount("tmpfs", "/proc", "tmpfs", safe | _MS_RDONLY, "size=4k")


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int, open_files: int = 64) -> None:
    """Limits of this process: seconds of CPU time, address space, size of a file, open files; no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))


def drop_capabilities() -> None:
    """Give up what root, or the owner of a namespace, may do."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    _call(_libc.capset, header, ctypes.create_string_buffer(24))


def forbid_calls() -> None:
    """From now on: no sockets, no processes (threads are fine), no signals, no mounts, no look at other processes."""
    column, architecture = _MACHINES[platform.machine()]
    program = _filter(column, architecture)
    code = ctypes.create_string_buffer(b"".join(program))
    _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    whole = _FilterProgram(len(program), ctypes.cast(code, ctypes.c_void_p))
    _call(_libc.prctl, _PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0)


def _filter(column: int, architecture: int) -> Sequence[bytes]:
    """Instructions of the classic BPF: (operation, steps if true, steps if false, operand)."""

    def step(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", operation, if_true, if_false, operand)

    deny, allow = step(_RETURN, _ERRNO | errno.EPERM), step(_RETURN, _ALLOW)
    first_argument = step(_LOAD, 16)  # its lower half
    program = [step(_LOAD, 4), step(_IF_EQUAL, architecture, 1), step(_RETURN, _KILL), step(_LOAD, 0)]
    program += [step(_IF_AT_LEAST, 0x40000000, 0, 1), deny]  # the other numbering of x86_64
    for numbers in _DENIED.values():
        if numbers[column] >= 0:
            program += [step(_IF_EQUAL, numbers[column], 0, 1), deny]
    # C libraries turn to clone, whose flags can be seen, where there is no clone3.
    program += [step(_IF_EQUAL, _CLONE3, 0, 1), step(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [step(_IF_EQUAL, _CLONE[column], 0, 4), first_argument, step(_IF_ANY_BIT, _CLONE_THREAD, 1), deny, allow]
    program += [step(_IF_EQUAL, _PRLIMIT64[column], 0, 4), first_argument, step(_IF_EQUAL, 0, 1), deny, allow]
    return [*program, allow]


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call(_libc.mount, texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _call(function: Any, *arguments: object) -> None:
    if function(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
