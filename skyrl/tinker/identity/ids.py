"""Names of things: model, sampler, version and request ids, `tinker://` paths, checkpoint folders.

Everything that has an id can be told from the id alone: a model is `{session}:train:{n}`, a sampler
`{session}:sample:{n}`, a version `{model}@{seq_id}` (a model's requests are numbered once, so a version never gets a
second meaning), and a request starts with the kind of its operation.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from skyrl.errors import RequestError

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
NAMED = ("weights", "sampler_weights", "external_weights")
"""Kinds of checkpoints that have names, which may be in a bucket."""

SCHEME = "tinker://"
SAMPLE = "sample"
CUSTOM_LOSS = "create_custom_loss"
MAX_NAME = 180
"""Characters of a checkpoint's name. What storage puts around it has to fit into 255 as well."""
KEY_PREFIX = "key-"
"""Prefix of the names of keys."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def tenant_of_key(api_key: bytes) -> str:
    """The tenant that a key stands for. The key cannot be told from it."""
    return KEY_PREFIX + hashlib.sha256(api_key).hexdigest()[:16]


def is_key_name(name: str) -> bool:
    """Return True if a text may be what `tenant_of_key` gives."""
    return re.fullmatch(rf"{KEY_PREFIX}[0-9a-f]{{16}}", name) is not None


def new_session_id() -> str:
    return str(uuid4())


def new_request_id(kind: str) -> str:
    return f"{kind}-{uuid4()}"


def kind_of(request_id: str) -> str:
    """The operation that a request is for."""
    return request_id.partition("-")[0]


def sample_id(sampler: str, seq_id: int) -> str:
    """The request id of a sample: the same for the same place, so that it can be told after a restart."""
    return f"{SAMPLE}-{sampler}-{seq_id}"


def is_sample(request_id: str) -> bool:
    """Return True if the id is of a sample, whose future lives in memory only."""
    return request_id.startswith(f"{SAMPLE}-")


def model_id(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


def custom_loss_id(session_id: str, custom_loss_seq_id: int) -> str:
    return f"{session_id}:loss:{custom_loss_seq_id}"


def custom_loss_request_id(loss_id: str) -> str:
    """The request id of a loss's creation: the loss can be told from it."""
    return f"{CUSTOM_LOSS}-{loss_id}"


def created_custom_loss(request_id: str) -> str | None:
    """The loss whose creation the request id is of; None: it is of something else."""
    return request_id.removeprefix(f"{CUSTOM_LOSS}-") if request_id.startswith(f"{CUSTOM_LOSS}-") else None


def version_id(model: str, seq_id: int) -> str:
    return f"{model}@{seq_id}"


def model_of_version(version: str) -> str:
    return version.rpartition("@")[0]


def session_of_model(model: str) -> str:
    return model.rpartition(":train:")[0]


def session_of(run: str) -> str:
    """Session of a model or a sampler."""
    return run.rsplit(":", 2)[0]


def new_seed() -> int:
    """A seed for a request that came without one: any non-negative int64."""
    return secrets.randbits(63)


def check_name(field: str, name: str) -> None:
    """Raise `RequestError` unless `name` may name a checkpoint."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise RequestError(
            f"{field}={name[:80]!r} is not a checkpoint name; use 1 to {MAX_NAME} letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )


def folder_of_model(model: str) -> str:
    """The folder of all that is stored of a model, below `checkpoints_base`."""
    return model.replace(":", "-")


def folder(model: str, kind: CheckpointKind | Literal["ephemeral", "snapshots"], name: str) -> str:
    """Folder of a model's checkpoint, below `checkpoints_base`, which may lie elsewhere tomorrow.

    `name` ends in the seq_id of its save, so no two saves share a folder.
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
        """Raises `RequestError` where `path` is none."""
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
"""Seq_ids of one client of a sampler."""
Client = tuple[str, int]
"""(sampler id, number of the client)."""


def client_of(key: tuple[str, int]) -> Client:
    """Client that sent the sample with this (sampler id, seq_id)."""
    return key[0], key[1] // CLIENT_BLOCK
