"""Landlock: restricts the files that a process may open, without administrator rights (Linux 5.13, also in containers).

It restricts opening, creating and removing files. Existence, size and times of files can still be queried. Newer
versions ("ABI") restrict more actions; an older version does not restrict what it does not know.
"""

import ctypes
import os
import struct
from collections.abc import Sequence
from contextlib import suppress

from skyrl.utils.sandbox.linux import system_call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file access rights of each version; later versions have 16."""
RESTRICTS_ALL_WRITES = 3
"""First version in which truncating a file is a separate right."""


def version() -> int:
    """Return the version of Landlock; 0 if it is unavailable."""
    with suppress(OSError):
        return system_call("landlock_create_ruleset", _CREATE_RULESET, None, 0, 1)
    return 0


def rules(readable: Sequence[str], devices: Sequence[str]) -> int:
    """Create a ruleset and return its file descriptor: read below `readable`, read and write `devices`, nothing else.

    Versions that support it also deny TCP, abstract sockets of other processes, and signals to other processes.
    """
    known = version()
    every = (1 << _RIGHTS.get(known, 16)) - 1
    # Rights on files, on TCP (bind, connect), and scopes: abstract sockets, signals.
    fields = struct.pack("QQQ", every, 3, 3)[: 8 if known < 4 else 16 if known < 6 else 24]
    ruleset = system_call("landlock_create_ruleset", _CREATE_RULESET, fields, len(fields), 0)
    for path in readable:
        _allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    for path in devices:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Apply the rules to this process and its future children. Closes the file descriptor."""
    system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    below = os.open(path, os.O_PATH)
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, below))
    system_call("landlock_add_rule", _ADD_RULE, ruleset, 1, rule, 0)
    os.close(below)
