"""Weights for use elsewhere: the files of a sampler checkpoint, encrypted for their readers if that is asked for.

Encryption is age (https://age-encryption.org), by the package `pyrage` of the optional extra `age`. The engine writes
plain files; they are replaced by encrypted ones before the save is recorded, so no link to a plain file is ever given.

The package is written in Rust. Its panics, which some keys cause, arrive as a `BaseException` that is no `Exception`.
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
"""Other exceptions that are no `Exception`, and none of the package's."""


def read_recipients(texts: Sequence[str]) -> list[Any]:
    """Public keys to encrypt for: `age1...`, or an SSH public key. Raises `RequestError` for anything else."""
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
    """Replace the files of a folder by encrypted ones, named `.age`. Done a second time, it leaves them as they are.

    Args:
        folder: On disk.
        recipients: Those who can read them.
        target: Folder that the encrypted ones go to, also in a bucket. None: the same one.

    Raises `StorageError`, also where it cannot be encrypted.
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
    except (OSError, *NOT_PANICS):  # a disk's fault is told as such
        raise
    except BaseException as error:
        raise StorageError(
            f"{name} cannot be encrypted for the keys of {FIELD} ({error}); use other keys, or leave the field out for "
            "plain files"
        ) from error


def _pyrage() -> Any:
    """The package, which only servers that are asked to encrypt need."""
    return importlib.import_module("pyrage")
