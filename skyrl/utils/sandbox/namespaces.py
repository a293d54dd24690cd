"""Isolation by namespaces: no network, no other processes, and a file system with only what Python needs.

The root is an empty folder in memory. Readable paths are mounted into it, read-only and without devices. No other files
exist there.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

from skyrl.utils.sandbox.confinement import NOBODY
from skyrl.utils.sandbox.library import DEVICES
from skyrl.utils.sandbox.linux import call, libc, system_call

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_SAFE = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MAPS = ("uid_map", "gid_map")
_MAX_FILES = 8192
"""Maximum number of files in the writable folder, because even empty files take memory."""


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def enter_namespaces() -> None:
    """Enter new namespaces. Processes started from now on do not see processes outside.

    In the namespaces, this process has all rights as its current user and, if that is root, as all other users. Mapping
    other users requires a helper process that stays outside, where root may map them. Raises OSError if the system does
    not allow it.
    """
    is_root, ids = os.getuid() == 0, (os.getuid(), os.getgid())
    waiting, entered = os.pipe()
    maps = [_same(name) for name in _MAPS]
    helper = _name_all_users(maps, waiting, entered) if is_root and all(map(_holds_nobody, maps)) else 0
    call(libc.unshare, _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS)
    os.close(waiting)
    os.close(entered)
    if helper and not os.waitpid(helper, 0)[1]:
        return
    _write("/proc/self/setgroups", "deny")
    for name, number in zip(_MAPS, ids, strict=True):
        _write(f"/proc/self/{name}", f"{NOBODY if is_root else number} {number} 1")


def enter_root(folder: str, folder_bytes: int, readable: Sequence[str]) -> None:
    """Restrict the file system to `readable`, a few devices, and the empty `folder`, which is the only writable one.

    Call it in a process started in the new namespaces. Raises OSError if the system does not allow it.
    """
    _set_attributes("/", 0, _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _SAFE, "size=1m,nr_inodes=4096,mode=755")
    for path in readable:
        _bind(path, folder, _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for path in DEVICES:
        _bind(path, folder, _MS_NOSUID | _MS_NOEXEC)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{folder}/dev/{name}")
    _mount_own_processes(f"{folder}/proc")
    os.makedirs(folder + folder)
    _mount("tmpfs", folder + folder, "tmpfs", _SAFE, f"size={folder_bytes},nr_inodes={_MAX_FILES},mode=777")
    os.chdir(folder)
    system_call("pivot_root", _PIVOT_ROOT[os.uname().machine], b".", b".")
    call(libc.umount2, b".", _MNT_DETACH)
    os.chdir("/")
    _set_attributes("/", _MS_RDONLY, 0, whole=False)


def _mount_own_processes(target: str) -> None:
    """Mount `/proc` with only the processes of this namespace; an empty folder if that is not allowed.

    The kernel allows it only if a complete `/proc` is visible, which is not the case in many containers.
    """
    os.mkdir(target)
    with suppress(OSError):
        _mount("proc", target, "proc", _SAFE | _MS_RDONLY, "subset=pid")


def _name_all_users(maps: Sequence[str], waiting: int, entered: int) -> int:
    """Fork a helper that maps users and groups once this process has closed `entered`. It exits with 0 on success."""
    pid = os.getpid()
    if helper := os.fork():
        return helper
    status = 1
    with suppress(OSError):
        os.close(entered)
        os.read(waiting, 1)
        for name, text in zip(_MAPS, maps, strict=True):
            _write(f"/proc/{pid}/{name}", text)
        status = 0
    os._exit(status)


def _same(name: str) -> str:
    """Return a map that maps each user or group to itself."""
    with open(f"/proc/self/{name}") as file:
        lines = [line.split() for line in file]
    return "".join(f"{inner} {inner} {count}\n" for inner, _, count in lines)


def _holds_nobody(text: str) -> bool:
    """Return True if a map contains `NOBODY`, the user that root becomes."""
    ranges = [[int(word) for word in line.split()] for line in text.splitlines()]
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())  # the kernel requires a single write
    finally:
        os.close(file)


def _bind(path: str, root: str, attributes: int) -> None:
    """Bind-mount `path` at the same path below `root`."""
    target = root + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _MS_BIND | _MS_REC, None)
    _set_attributes(target, attributes, _MS_PRIVATE)


def _set_attributes(path: str, attributes: int, propagation: int, whole: bool = True) -> None:
    """Set attributes of a mount, and of all mounts below it if `whole`. Attributes have the values of mount flags."""
    given = _MountAttributes(attr_set=attributes, propagation=propagation)
    flags = _AT_RECURSIVE if whole else 0
    size = ctypes.sizeof(given)
    system_call("mount_setattr", _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(given), size)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    call(libc.mount, texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
