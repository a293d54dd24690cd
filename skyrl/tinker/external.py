"""Weights for use elsewhere: the files of a sampler checkpoint, encrypted for their readers if that is asked for.

Encryption is age (https://age-encryption.org), by the package `pyrage` of the optional extra `age`. The engine writes
plain files; they are replaced by encrypted ones before the save is recorded, so no link to a plain file is ever given.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from skyrl.errors import RequestError
from skyrl.utils.storage import Written, inspect_folder, open_folder, write_folder

SUFFIX = ".age"
MAX_RECIPIENTS = 10


def read_recipients(texts: Sequence[str]) -> list[Any]:
    """Public keys to encrypt for: `age1...`, or an SSH public key. Raises `RequestError` for anything else."""
    field = "age_encryption_recipients"
    if not 1 <= len(texts) <= MAX_RECIPIENTS:
        raise RequestError(
            f"{field} has {len(texts)} keys; give 1 to {MAX_RECIPIENTS}, or leave it out for plain files"
        )
    try:
        pyrage = _pyrage()
    except ModuleNotFoundError as error:
        raise RequestError(
            f"{field}: this server cannot encrypt; install it with: pip install 'skyrl[age]', or leave the field out"
        ) from error
    recipients = []
    for index, text in enumerate(texts):
        kind = pyrage.ssh if text.lstrip().startswith("ssh-") else pyrage.x25519
        try:
            recipients.append(kind.Recipient.from_str(text.strip()))
        except pyrage.RecipientError as error:
            raise RequestError(
                f"{field}[{index}]={text[:12]!r}... is no key to encrypt for ({error}); use a public key: age1..., "
                "ssh-ed25519 ... or ssh-rsa ..."
            ) from error
    return recipients


def encrypt_folder(folder: str, recipients: Sequence[Any]) -> Written:
    """Replace the files of a folder by encrypted ones, named `.age`. Done a second time, it leaves them as they are.

    Raises `StorageError`.
    """
    encrypt = _pyrage().encrypt_io
    with open_folder(folder) as files:
        plain = [file for file in files if not file.name.endswith(SUFFIX)]
        encrypted = {file.name + SUFFIX: partial(encrypt, file.reader, recipients=recipients) for file in plain}
        if plain:
            return write_folder(folder, encrypted)
    written = inspect_folder(folder)
    assert written is not None, folder
    return written


def _pyrage() -> Any:
    """The package, which only servers that are asked to encrypt need."""
    return importlib.import_module("pyrage")
