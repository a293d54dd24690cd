"""Landlock: what a process may open, without any right of an administrator (Linux 5.13 and later, containers too).

It holds for opening, making and removing; whether a file is there, its size and its times can still be asked for.
Versions of it ("ABI") know ever more: what they do not know is not restricted.
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
"""Number of rights on files that each version knows; later ones know 16."""
RESTRICTS_ALL_WRITES = 3
"""From this version on, cutting a file short is a right too."""


def version() -> int:
    """Version of Landlock here; 0 without it."""
    with suppress(OSError):
        return system_call("landlock_create_ruleset", _CREATE_RULESET, None, 0, 1)
    return 0


def rules(readable: Sequence[str], devices: Sequence[str]) -> int:
    """A file that holds the rules: read what is below `readable`, read and write `devices`, and nothing else.

    The network (TCP), abstract sockets of others and signals to others are refused too, by versions that know them.
    """
    known = version()
    every = (1 << _RIGHTS.get(known, 16)) - 1
    # Rights on files, on TCP (bind, connect), and what is kept within: abstract sockets, signals.
    fields = struct.pack("QQQ", every, 3, 3)[: 8 if known < 4 else 16 if known < 6 else 24]
    ruleset = system_call("landlock_create_ruleset", _CREATE_RULESET, fields, len(fields), 0)
    for path in readable:
        _allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    for path in devices:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    return ruleset


def restrict_self(ruleset: int) -> None:
    """This process, and all that it starts, keep to the rules from now on. The file is closed."""
    system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    below = os.open(path, os.O_PATH)
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, below))
    system_call("landlock_add_rule", _ADD_RULE, ruleset, 1, rule, 0)
    os.close(below)
