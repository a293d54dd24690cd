"""Identifiers: model, sampler, version and request ids, `tinker://` paths, checkpoint folders.

Ids are structured: a model is `{session}:train:{n}`, a sampler `{session}:sample:{n}`, a version `{model}@{seq_id}` (a
model's seq_ids are never reused, so a version is unique), and a request id starts with the kind of its operation.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Literal
from uuid import UUID, uuid4, uuid5

from skyrl.errors import RequestError

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
NAMED = ("weights", "sampler_weights", "external_weights")
"""Kinds of named checkpoints, which may be in a bucket."""

SCHEME = "tinker://"
SAMPLE = "sample"
CUSTOM_LOSS = "create_custom_loss"
MAX_NAME = 180
"""Maximum characters of a checkpoint's name. Storage adds characters, and the total is limited to 255."""
KEY_PREFIX = "key-"
"""Prefix of the names of keys."""
_OWN = UUID("0f0a7a34-6d1b-5b43-9a55-6f2b1a0a1c55")
"""Namespace of the ids of the server's own sessions."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def tenant_of_key(api_key: bytes) -> str:
    """Return the name of a key's tenant. The key cannot be derived from this name."""
    return KEY_PREFIX + hashlib.sha256(api_key).hexdigest()[:16]


def is_key_name(name: str) -> bool:
    """Return True if a text has the form of a `tenant_of_key`."""
    return re.fullmatch(rf"{KEY_PREFIX}[0-9a-f]{{16}}", name) is not None


def new_session_id() -> str:
    return str(uuid4())


def own_session_id(what: str) -> str:
    """Return the id of the session that the server itself makes for something."""
    return str(uuid5(_OWN, what))


def is_own_session(session_id: str) -> bool:
    """Return True for a session that the server itself has made."""
    return re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", session_id) is not None


def new_request_id(kind: str) -> str:
    return f"{kind}-{uuid4()}"


def kind_of(request_id: str) -> str:
    """Return the operation kind of a request id."""
    return request_id.partition("-")[0]


def sample_id(sampler: str, seq_id: int) -> str:
    """Return the request id of a sample. It depends only on the sampler and the seq_id, so it is the same after a
    restart."""
    return f"{SAMPLE}-{sampler}-{seq_id}"


def is_sample(request_id: str) -> bool:
    """Return True for the request id of a sample, whose future is only in memory."""
    return request_id.startswith(f"{SAMPLE}-")


def model_id(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


def custom_loss_id(session_id: str, custom_loss_seq_id: int) -> str:
    return f"{session_id}:loss:{custom_loss_seq_id}"


def custom_loss_request_id(loss_id: str) -> str:
    """Return the id of the request that creates a loss. It contains the loss's id."""
    return f"{CUSTOM_LOSS}-{loss_id}"


def created_custom_loss(request_id: str) -> str | None:
    """Return the id of the loss that a request created, or None for other requests."""
    return request_id.removeprefix(f"{CUSTOM_LOSS}-") if request_id.startswith(f"{CUSTOM_LOSS}-") else None


def version_id(model: str, seq_id: int) -> str:
    return f"{model}@{seq_id}"


def model_of_version(version: str) -> str:
    return version.rpartition("@")[0]


def session_of_model(model: str) -> str:
    return model.rpartition(":train:")[0]


def session_of(run: str) -> str:
    """Return the session of a model or a sampler."""
    return run.rsplit(":", 2)[0]


def new_seed() -> int:
    """Draw a seed for a request without one: any non-negative int64."""
    return secrets.randbits(63)


def check_name(field: str, name: str) -> None:
    """Raise `RequestError` unless `name` is a valid checkpoint name."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise RequestError(
            f"{field}={name[:80]!r} is not a checkpoint name; use 1 to {MAX_NAME} letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )


def folder_of_model(model: str) -> str:
    """Return the folder of all files of a model, relative to `checkpoints_base`."""
    return model.replace(":", "-")


def folder(model: str, kind: CheckpointKind | Literal["ephemeral", "snapshots"], name: str) -> str:
    """Return the folder of a model's checkpoint. It is relative to `checkpoints_base`, so this folder may be moved.

    `name` ends in the seq_id of the save, so no two saves share a folder.
    """
    return f"{folder_of_model(model)}/{kind}/{name}"


@dataclass(frozen=True)
class TinkerPath:
    """`tinker://{model}/{kind}/{name}`, or, for samplers, `tinker://{model}/{name}` (kind None)."""

    model: str
    kind: CheckpointKind | None
    name: str

    def __str__(self) -> str:
        return SCHEME + "/".join(part for part in (self.model, self.kind, self.name) if part)

    @classmethod
    def parse(cls, field: str, path: str) -> "TinkerPath":
        """Parse a path. Raises `RequestError` for a malformed `path`."""
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and all(parts):
            match parts:
                case [model, "weights" | "sampler_weights" | "external_weights" as kind, name]:
                    return cls(model, kind, name)
                case [model, name]:
                    return cls(model, None, name)
                case _:
                    pass
        raise RequestError(
            f"{field}={path[:300]!r} is not a checkpoint path; use the `path` that a save returned, such as "
            "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
        )


CLIENT_BLOCK = 10**9
"""Size of the range of seq_ids that each client of a sampler uses."""
Client = tuple[str, int]
"""(sampler id, number of the client)."""


def client_of(key: tuple[str, int]) -> Client:
    """Return the client that sent the sample with this (sampler id, seq_id)."""
    return key[0], key[1] // CLIENT_BLOCK
