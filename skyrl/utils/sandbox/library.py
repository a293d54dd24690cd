"""Paths that model-written code may read: Python's library and packages, shared libraries, a few devices."""

import os
import sys

_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICES = [path for path in _HARMLESS if os.path.exists(path)]
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store")
_DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")


def readable() -> list[str]:
    """Return the readable folders and files. No path is inside another one.

    Packages that are installed in place (`pip install -e`) are excluded, because they are the user's project.
    """
    own = [f"{prefix}/{name}" for prefix in (sys.base_prefix, sys.base_exec_prefix) for name in ("lib", "lib64")]
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    paths = {path for path in (*_SYSTEM, *_DATA, *own, *packages) if os.path.isabs(path) and os.path.exists(path)}
    return sorted(path for path in paths if not any(path.startswith(other + os.sep) for other in paths))
