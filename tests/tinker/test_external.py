"""Exports for keys on which the package that encrypts breaks down: they fail by name, and the model goes on."""

import base64
import struct
from pathlib import Path

import pytest

from skyrl.errors import StorageError
from skyrl.tinker.checkpoints.transfer.age_encryption import encrypt_folder
from skyrl.utils.files.atomic_folders import read_folder, write_folder
from tests.tinker.harness import LiveServer

pyrage = pytest.importorskip("pyrage", reason="needs the age extra")


def ssh_rsa(exponent: bytes, modulus: bytes) -> str:
    """A public key of these numbers."""
    parts = [struct.pack(">I", len(part)) + part for part in (b"ssh-rsa", exponent, modulus)]
    return "ssh-rsa " + base64.b64encode(b"".join(parts)).decode()


PANICKING = {
    "modulus 0": ssh_rsa(b"\x01\x00\x01", b"\x00"),
    "exponent 0": ssh_rsa(b"\x00", b"\x00" + b"\xff" * 256),
}


class Panic(BaseException):
    """As the package's: no `Exception`."""


def panic(*_: object) -> None:
    raise Panic("index out of bounds")


def export(server: LiveServer, model: str, seq_id: int, recipient: str) -> str:
    body = {"model_id": model, "seq_id": seq_id, "path": "x", "age_encryption_recipients": [recipient]}
    return server.ok("/save_weights_external", body)["request_id"]


@pytest.mark.parametrize("name", PANICKING)
def test_key_that_makes_the_package_panic_fails_its_request_alone(server, name):
    model = server.model()
    failure = server.failure(export(server, model, 1, PANICKING[name]))
    assert failure["category"] == "user" and "age_encryption_recipients[0]" in failure["error"]
    server.result(server.submit_step(model, 2))


def test_encryption_that_panics_fails_the_save_and_leaves_no_files(server, monkeypatch):
    monkeypatch.setattr(pyrage, "encrypt_io", panic)
    model = server.model()
    failure = server.failure(export(server, model, 1, str(pyrage.x25519.Identity.generate().to_public())))
    assert failure["category"] == "server" and "cannot be encrypted" in failure["error"]
    server.result(server.submit_step(model, 2))
    assert not list(server.folder.rglob("external_weights/*"))


def test_folder_that_cannot_be_encrypted_stays_as_it_is(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pyrage, "encrypt_io", panic)
    write_folder(tmp_path / "x", {"a": b"data"})
    with pytest.raises(StorageError, match="a cannot be encrypted"):
        encrypt_folder(str(tmp_path / "x"), [pyrage.x25519.Identity.generate().to_public()])
    assert read_folder(tmp_path / "x") == {"a": b"data"}


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch):
    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyrage, "encrypt_io", fill)
    write_folder(tmp_path / "x", {"a": b"data"})
    with pytest.raises(StorageError, match="No space left on device; free space"):
        encrypt_folder(str(tmp_path / "x"), [pyrage.x25519.Identity.generate().to_public()])


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_server_is_no_fault_of_a_key(tmp_path: Path, monkeypatch, end):
    def stop(*_: object) -> None:
        raise end

    monkeypatch.setattr(pyrage, "encrypt_io", stop)
    write_folder(tmp_path / "x", {"a": b"data"})
    with pytest.raises(end):
        encrypt_folder(str(tmp_path / "x"), [pyrage.x25519.Identity.generate().to_public()])
