"""Uploads of adapters that were trained elsewhere. Each upload becomes a training checkpoint of a separate run.

An upload has no row in the database. Its id is a token that describes the upload and that this server has signed.
`Service.uploads` manages its files.
"""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError

from skyrl.backends.common.models.checkpoint_folder import PEFT_CONFIG, PEFT_TENSORS, TRAINING_STATE, pack_header
from skyrl.backends.common.models.kind import Kind
from skyrl.errors import RequestError, StorageError, UnknownName
from skyrl.tinker.checkpoints.transfer.uploads import Upload, too_large
from skyrl.tinker.context import Service
from skyrl.tinker.database.tables import CheckpointRow, RequestRow
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.identity.tokens import BadToken
from skyrl.tinker.operations.held_checkpoints import RunPosition, earlier, path_of, record
from skyrl.tinker.operations.models import check_rank
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire.json_numbers import parse_short
from skyrl.types import BackendInfo, LoraConfig
from skyrl.utils.adapters.fitting import fitted_adapter, most_numbers
from skyrl.utils.adapters.naming import tensors_of
from skyrl.utils.adapters.plain import rank_of
from skyrl.utils.adapters.stored import adapter_tensors
from skyrl.utils.files.atomic_folders import Content
from skyrl.utils.files.hf_files import peft_config
from skyrl.utils.files.stored_folders import remove_stored, write_stored
from skyrl.utils.files.tensor_file import LENGTH, Tensor, tensor_file

log = logging.getLogger(__name__)

KIND = "external_weights_upload_finish"
NAME = "upload"
"""Name of the checkpoint of an upload."""
KNOWN_S = 24 * 3600
"""Seconds for which an upload's id stays valid after the upload has expired, so that a repeated finish gets the same
answer."""
MAX_CONFIG_BYTES = 2**20
HEADER_BYTES = 512
"""Maximum bytes per tensor in the header of a safetensors file."""
MOST_COPIES = 2
"""Maximum number of copies of vocabulary weights in an adapter's file. By default, PEFT saves the base weights of each
adapted vocabulary layer (lm_head, embed_tokens)."""
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
"""Name of a model on the hub: organisation and model."""
WAYS_OUT = {
    PEFT_CONFIG: "save it with PEFT's save_pretrained",
    PEFT_TENSORS: "save the adapter alone, by PEFT's save_pretrained(save_embedding_layers=False), or send it by "
    "`skyrl adapter import`, which leaves out copies of base weights",
}
"""Advice for files that are too large."""


@dataclass(frozen=True)
class StartedUpload:
    """An upload in progress."""

    id: str
    """Signed token that describes the upload."""
    files: dict[str, str]
    """Signed token that names the destination of each file, by file name."""


@dataclass(frozen=True)
class FinishedUpload:
    """A finished upload, which is a checkpoint now."""

    path: TinkerPath
    warning: str | None = None
    """Reason to doubt that the adapter belongs to this base model."""


def begin_upload(service: Service, caller: Caller, request: rest.UploadStartRequest, expires: int) -> StartedUpload:
    """Start an upload. Its files can be sent until `expires`, a Unix time.

    Raises RequestError for another base model, for an unsupported rank, and if the backend cannot import adapters.
    """
    info = service.info
    service.check_base_model(request.base_model)
    config = request.lora_config
    if not info.adaptable or not config.rank:
        raise RequestError(
            f"lora_config.rank={config.rank}: only adapters are uploaded, to a backend that imports them; "
            f"use a rank of 1 or more{'' if info.adaptable else ', and another --backend'}"
        )
    check_rank(config, info)
    upload, signer = Upload.begin(caller.name), service.keys.signer
    claims = {"tenant": upload.tenant, "until": upload.expires, "id": upload.id}
    about = {
        "base_model": info.base_model,
        "lora_config": config.model_dump(exclude={"alpha"}),
        "project": request.destination_project_id,
    }
    limits = _limits(info)
    files = {
        name: signer.sign(
            "upload_file", claims | {"name": name, "limit": limit, "largest": max(limits.values())}, expires
        )
        for name, limit in limits.items()
    }
    return StartedUpload(signer.sign("upload", claims | about, upload.expires + KNOWN_S), files)


async def receive_file(service: Service, claims: dict[str, Any], pieces: AsyncIterator[bytes], announced: int) -> None:
    """Store a file of an upload; see `Uploads.receive`.

    Args:
        service: The server's shared parts.
        claims: Claims of the signed token that names the file's destination.
        pieces: Content of the file.
        announced: Length of the file in bytes, or 0 if unknown.

    Raises UnknownName if the upload is finished, before or during the transfer.
    """
    upload = upload_of(claims)
    await _check_unfinished(service, upload)
    await service.uploads.receive(
        upload,
        claims["name"],
        pieces,
        announced=announced,
        limit=claims["limit"],
        largest=claims["largest"],
        way_out=WAYS_OUT[claims["name"]],
        make_room=service.disk.make_room_for,
    )
    try:
        await _check_unfinished(service, upload)
    except UnknownName:
        await service.uploads.remove(upload)
        raise


async def _check_unfinished(service: Service, upload: Upload) -> None:
    row = await service.database.read(lambda session: session.get(RequestRow, _request_id(upload)))
    if row is not None:
        raise UnknownName("the upload is finished, so no file of it is taken any more; start another upload")


def _request_id(upload: Upload) -> str:
    """Id of the request that finishes an upload."""
    return f"{KIND}-{upload.id}"


async def finish_upload(service: Service, caller: Caller, upload_id: str) -> FinishedUpload:
    """Create a checkpoint from an upload's files, unless it exists already. Returns the checkpoint's path.

    If the checkpoint existed already, there is no warning.

    Raises RequestError if the upload is unknown or expired, or if its files are not an adapter of the announced kind.
    Also raises StorageError and Busy.
    """
    try:
        claims = service.keys.signer.read("upload", upload_id)
    except BadToken as error:
        raise UnknownName(f"upload_id {error}; start another upload") from error
    if not caller.may_touch(claims["tenant"]):
        raise UnknownName("upload_id is of another key's upload; send that key, or start another upload")
    upload = upload_of(claims)
    session_id = ids.new_session_id()
    tenant = caller.tenant_of(session_id)
    place = RunPosition(session_id, 0, tenant, _request_id(upload), new_session=True, project_id=claims["project"])
    async with service.uploads.turn_to_import(caller.sharer):  # of two equal requests the second finds the first
        before = await service.database.read(lambda session: earlier(session, place))
        if before is not None:
            return FinishedUpload(before)
        if upload.expires <= time.time():
            raise UnknownName("the upload has expired; start another")
        info, declared = service.info, LoraConfig(**claims["lora_config"])
        if info.base_model != claims["base_model"]:
            raise RequestError(
                f"the upload was begun for base model {claims['base_model']!r}, and this server serves "
                f"{info.base_model!r} now; start another upload"
            )
        folder = service.uploads.path(upload, PEFT_CONFIG).parent
        config, files, size_bytes, warning = await asyncio.to_thread(_converted, folder, declared, info)
        await service.disk.make_room_for(size_bytes)
        checkpoint = CheckpointRow(
            model_id=place.model_id,
            kind="weights",
            name=NAME,
            tenant=tenant,
            version=place.version,
            folder=place.folder("weights", NAME),
            base_model=info.base_model,
            lora_config=config.model_dump(),
        )
        path = service.path_of(checkpoint.folder)
        checkpoint.size_bytes, checkpoint.digest = await asyncio.to_thread(write_stored, path, files)
        del files
        try:
            await service.database.write(lambda session: record(session, KIND, place, checkpoint, caller.name))
        except DatabaseFull:  # after another error, the row may be stored; if not, the collector removes the folder
            await asyncio.to_thread(remove_stored, path)
            raise
        await service.uploads.remove(upload)
        if warning is not None:
            log.warning("upload of %s as %s: %s", caller.alias or tenant, path_of(checkpoint), warning)
        return FinishedUpload(path_of(checkpoint), warning)


def upload_of(claims: dict[str, Any]) -> Upload:
    """Return the upload that the claims of a signed token describe."""
    return Upload(claims["tenant"], claims["until"], claims["id"])


def _limits(info: BackendInfo) -> dict[str, int]:
    """Return the maximum bytes of each file, by file name.

    The file of weights may have the size of the largest adapter in float32 plus copies of vocabulary weights.
    """
    numbers = most_numbers(info.adaptable, info.max_lora_rank)
    projections = (features for features in info.adaptable.values() if features.group == "unembed")
    numbers += MOST_COPIES * sum(features.inner * features.outer for features in projections)
    return {PEFT_CONFIG: MAX_CONFIG_BYTES, PEFT_TENSORS: 4 * numbers + _header_bytes(info)}


def _header_bytes(info: BackendInfo) -> int:
    return 2**16 + HEADER_BYTES * 2 * len(info.adaptable)


def _converted(
    folder: Path, declared: LoraConfig, info: BackendInfo
) -> tuple[LoraConfig, dict[str, Content], int, str | None]:
    """Return an upload's configuration, the files of its checkpoint, their size in bytes, and a warning."""
    with _opened(folder / PEFT_CONFIG, MAX_CONFIG_BYTES) as file:
        config = _config_of(file.read())
    rank = rank_of(config)
    if rank != declared.rank:
        raise RequestError(
            f"adapter_config.json: the adapter has rank {rank}, and lora_config.rank={declared.rank} was announced; "
            "start another upload with the rank that it has"
        )
    tensors = _tensors_of(folder / PEFT_TENSORS, info)
    with np.errstate(over="ignore", invalid="ignore"):  # the results are checked below
        pairs, rank, alpha = fitted_adapter(tensors, config, info.adaptable)
    wrong = next((module for module, pair in pairs.items() if not all(np.isfinite(x).all() for x in pair)), None)
    if wrong is not None:
        raise RequestError(f"adapter: lora_A or lora_B of {wrong} has numbers that are not finite; train it again")
    groups = {info.adaptable[module].group for module in pairs}
    hidden = sorted(group for group in groups if not getattr(declared, f"train_{group}"))
    if hidden:
        raise RequestError(
            f"adapter: it has tensors of modules that lora_config leaves out; start another upload with "
            f"train_{hidden[0]}=true"
        )
    found = LoraConfig.of_groups(rank, alpha, groups)
    made = {name: Tensor(tensor.shape, tensor.dtype, lambda x=tensor: x) for name, tensor in tensors_of(pairs).items()}
    small = {
        TRAINING_STATE: pack_header(Kind(found), info.base_model, 0, 0),
        PEFT_CONFIG: json.dumps(peft_config(info.base_model, found, list(pairs)), indent=1).encode(),
    }
    size = sum(map(len, small.values())) + most_numbers({module: info.adaptable[module] for module in pairs}, rank) * 4
    return found, {**small, PEFT_TENSORS: tensor_file(made)}, size, _other_base(config, info)


def _other_base(config: dict[str, Any], info: BackendInfo) -> str | None:
    """Return a warning if an adapter names another base model by its hub id. Otherwise, return None."""
    named = config.get("base_model_name_or_path")
    if not all(isinstance(name, str) and HUB_ID.fullmatch(name) for name in (named, info.base_model)):
        return None
    if str(named).casefold() == info.base_model.casefold():
        return None
    return (
        f"{PEFT_CONFIG}: base_model_name_or_path={named!r}, and {info.base_model!r} is served; the shapes fit, but the "
        "adapter computes something else if these have different weights"
    )


def _tensors_of(path: Path, info: BackendInfo) -> dict[str, np.ndarray]:
    """Return the tensors of an upload, without copies of base weights. Raises the errors of `_opened`."""
    with _opened(path, _limits(info)[PEFT_TENSORS]) as file:
        if int.from_bytes(file.read(LENGTH.size), "little") > _header_bytes(info):
            raise RequestError(
                f"{PEFT_TENSORS} has the header of more than one adapter; save it with PEFT's save_pretrained"
            )
        try:
            return adapter_tensors(path)
        except (SafetensorError, KeyError, ValueError) as error:
            raise RequestError(
                f"{PEFT_TENSORS} is no safetensors file that can be read ({error}); save it with PEFT's save_pretrained"
            ) from error


def _config_of(data: bytes) -> dict[str, Any]:
    try:
        config = parse_short(data)
    except ValueError as error:
        raise RequestError(
            f"{PEFT_CONFIG} cannot be read as JSON ({error}); save it with PEFT's save_pretrained"
        ) from error
    if not isinstance(config, dict):
        raise RequestError(f"{PEFT_CONFIG} holds no object; save it with PEFT's save_pretrained")
    return config


@contextmanager
def _opened(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open a file of an upload.

    Raises RequestError if the file is missing or has more than `limit` bytes, which happens if the upload was started
    with another backend. Raises StorageError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise too_large(path.name, f"{size} bytes", limit, WAYS_OUT[path.name])
            yield file
    except FileNotFoundError as error:
        raise RequestError(f"{path.name} was not uploaded; PUT it to its URL before the upload is finished") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
