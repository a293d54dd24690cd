"""Encryption of external weights, which are the files of a sampler checkpoint for use outside this server.

The format is age (https://age-encryption.org), by the package `pyrage` of the optional extra `age`. The engine writes
plain files. They are replaced by encrypted files before the save is recorded, so no client gets a link to a plain file.

`pyrage` is written in Rust. Some keys cause a panic, which is raised as a `BaseException` that is not an `Exception`.
"""

import asyncio
import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any, BinaryIO

from skyrl.errors import RequestError, StorageError
from skyrl.utils.files.atomic_folders import Written, open_folder, remove_folder
from skyrl.utils.files.stored_folders import inspect_stored, write_stored

SUFFIX = ".age"
MAX_RECIPIENTS = 10
FIELD = "age_encryption_recipients"
NOT_PANICS = (KeyboardInterrupt, SystemExit, asyncio.CancelledError)
"""Exceptions that do not derive from `Exception` and yet are no panics of `pyrage`."""


def read_recipients(texts: Sequence[str]) -> list[Any]:
    """Parse the public keys to encrypt for: `age1...`, or SSH public keys. Raises `RequestError` for anything else."""
    if not 1 <= len(texts) <= MAX_RECIPIENTS:
        raise RequestError(
            f"{FIELD} has {len(texts)} keys; give 1 to {MAX_RECIPIENTS}, or leave it out for plain files"
        )
    try:
        pyrage = _pyrage()
    except ModuleNotFoundError as error:
        raise RequestError(
            f"{FIELD}: this server cannot encrypt; install it with: pip install 'skyrl[age]', or leave the field out"
        ) from error
    recipients = []
    for index, text in enumerate(texts):
        kind = pyrage.ssh if text.lstrip().startswith("ssh-") else pyrage.x25519
        try:
            recipients.append(kind.Recipient.from_str(text.strip()))
        except NOT_PANICS:
            raise
        except BaseException as error:
            raise RequestError(
                f"{FIELD}[{index}]={text[:12]!r}... is no key to encrypt for ({error}); use a public key: age1..., "
                "ssh-ed25519 ... or ssh-rsa ..."
            ) from error
    return recipients


def encrypt_folder(folder: str, recipients: Sequence[Any], target: str | None = None) -> Written:
    """Replace the files of a folder by encrypted files with the suffix `.age`. Idempotent.

    Args:
        folder: Folder on disk.
        recipients: Parsed public keys.
        target: Folder or bucket URL for the encrypted files. None: the same folder.

    Raises `StorageError`, also if encryption fails.
    """
    target = target or folder
    if (written := inspect_stored(target)) is not None and target != folder:
        remove_folder(folder)
        return written
    with open_folder(folder) as files:
        plain = [file for file in files if not file.name.endswith(SUFFIX)]
        encrypted = {file.name + SUFFIX: partial(_encrypt, file.name, file.reader, recipients) for file in plain}
        if plain:
            written = write_stored(target, encrypted)
    if target != folder:
        remove_folder(folder)
    assert written is not None, folder
    return written


def _encrypt(name: str, reader: BinaryIO, recipients: Sequence[Any], writer: BinaryIO) -> None:
    try:
        _pyrage().encrypt_io(reader, writer, recipients)
    except (OSError, *NOT_PANICS):  # storage errors are reported as such
        raise
    except BaseException as error:
        raise StorageError(
            f"{name} cannot be encrypted for the keys of {FIELD} ({error}); use other keys, or leave the field out for "
            "plain files"
        ) from error


def _pyrage() -> Any:
    """Import `pyrage`, which is needed only for encryption."""
    return importlib.import_module("pyrage")
