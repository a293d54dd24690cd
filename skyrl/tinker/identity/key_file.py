"""Key files: which keys a server accepts, and the display names of their tenants.

A line is `KEY` or `NAME KEY`. The tenant of a key is its hash, so a tenant keeps its objects when its name changes. A
key that replaces an older one is followed by the older key's hash (`KEY key-...`), and belongs to the older key's
tenant. No error message contains a key.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from skyrl.tinker.identity.ids import KEY_PREFIX, is_key_name, tenant_of_key
from skyrl.utils.private import is_open_to_others

SDK_PREFIX = "tml-"
"""Prefix of the keys that the SDK sends. It refuses all others, except tokens, which expire."""
MAX_NAME = 64
"""Maximum characters of a display name."""
TAKEN = ("local", "other", "nobody", "server")
"""Names that metrics, logs and the audit log use for something other than a key."""


@dataclass(frozen=True)
class ApiKey:
    """A key of a client, with its tenant."""

    number: int
    """Line of the key in its file, or position in its list; from 1."""
    key: str = field(repr=False)
    tenant: str
    """Hash of the key, or of the older key that it replaces."""
    name: str
    """Display name of the tenant; "" if the entry has none."""


def parse_keys(
    entries: Iterable[tuple[int, str]], noun: str = "line", *, spaces: bool = False
) -> tuple[list[ApiKey], list[str]]:
    """Parse entries with their numbers. Returns (the keys, a message for each wrong entry).

    Args:
        entries: (number, text) of each entry.
        noun: Name of an entry in messages.
        spaces: True if keys may have spaces in them.
    """
    keys: list[ApiKey] = []
    problems: list[str] = []
    by_key: dict[str, ApiKey] = {}
    by_name: dict[str, ApiKey] = {}
    by_tenant: dict[str, ApiKey] = {}
    for number, entry in entries:
        try:
            key = parse_key(number, entry)
            if not spaces and len(key.key.split()) > 1:
                raise ValueError("unexpected space; write one key per line, or a name and a key")
            same_key = by_key.setdefault(key.key, key)
            if same_key.tenant != key.tenant:
                raise ValueError(f"duplicate key, given for two tenants (also in {noun} {same_key.number}); remove one")
            if key.name:
                same_name, same_tenant = by_name.setdefault(key.name, key), by_tenant.setdefault(key.tenant, key)
                if same_name.tenant != key.tenant:
                    raise ValueError(f"{noun} {same_name.number} has the name {key.name}, too; choose another name")
                if same_tenant.name != key.name:
                    raise ValueError(
                        f"the tenant {key.tenant} is called {key.name} here and {same_tenant.name} in {noun} "
                        f"{same_tenant.number}; use one name"
                    )
        except ValueError as error:
            problems.append(f"{noun} {number}: {error}")
        else:
            keys.append(key)
    return keys, problems


def parse_key(number: int, entry: str) -> ApiKey:
    """Parse one entry. Raises `ValueError` for a key that the SDK refuses or a name that cannot be used."""
    replaces = re.fullmatch(r"(.*\S)\s+(\S+)", entry)
    older = replaces[2] if replaces and is_key_name(replaces[2]) else ""
    rest = replaces[1] if replaces and older else entry
    name, key = "", rest
    if not rest.startswith(SDK_PREFIX) and len(words := rest.split(maxsplit=1)) == 2:
        name, key = words
    if not key.startswith(SDK_PREFIX):
        raise ValueError(
            f"the key does not begin with {SDK_PREFIX!r}, so the SDK refuses it; give this client a key that does"
        )
    if name:
        _check_name(name)
    return ApiKey(number, key, older or tenant_of_key(key.encode()), name)


def _check_name(name: str) -> None:
    if wrong := re.search(r"[^A-Za-z0-9._@-]", name):
        raise ValueError(f"{wrong[0]!r} in a name; use letters, digits, '.', '_', '-' and '@'")
    if len(name) > MAX_NAME:
        raise ValueError(f"a name has {len(name)} characters; use at most {MAX_NAME}")
    if re.fullmatch(rf"{KEY_PREFIX}[0-9A-Fa-f]+", name) or name in TAKEN:
        raise ValueError(f"the name {name} is reserved; choose another name")


def read_key_file(option: str, file: Path) -> list[tuple[int, str]]:
    """Return (number, text) of each line with a key.

    Raises:
        ValueError: The file cannot be read, has no keys, or other users can read or change it.
    """
    try:
        with file.expanduser().open() as opened:
            lines = [line.strip() for line in opened.read().splitlines()]
            status = os.fstat(opened.fileno())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{option}={file}: it cannot be read ({type(error).__name__}); check its path and permissions"
        ) from None
    if is_open_to_others(status):
        raise ValueError(
            f"{option}={file}: others can read or change it (mode {stat.S_IMODE(status.st_mode):04o}); keep it to "
            f"yourself with: chmod 600 {file}, or mount a container's secret with mode 0440 or 0400 (Kubernetes: "
            "defaultMode, Docker: mode)"
        )
    found = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"{option}={file}: it contains no keys; write one key per line")
    return found
