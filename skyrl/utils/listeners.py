"""Owners of listening sockets, from the tables of the Linux kernel."""

import os
from pathlib import Path

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENS = "0A"
"""State of a listening socket in these tables."""


def belongs_to_this_user(port: int) -> bool:
    """Return True if a program of this user, or of root, listens on a port, and no socket there is of anybody else.

    Call it after connecting, so that it is about the program that has accepted, or will accept, the connection.
    """
    owners: set[int] = set()
    listening = False
    for table in TABLES:
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, _, _, _, user, *_ = line.split()
            if int(local.rpartition(":")[2], 16) == port:
                owners.add(int(user))
                listening = listening or state == LISTENS
    return listening and owners <= {os.geteuid(), 0}
