"""Access to the checkpoints that a request names."""

from skyrl.errors import RequestError
from skyrl.tinker.context import Service
from skyrl.tinker.database.tables import CheckpointRow
from skyrl.tinker.errors import BadKey
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath


async def readable_checkpoint(
    service: Service, field: str, path: TinkerPath, caller: Caller, access_token: str | None = None
) -> CheckpointRow:
    """Return the checkpoint at a path, if the caller or the owner of `access_token` (a key or token) may read it.

    Raises `RequestError` otherwise.
    """
    if access_token is None:
        return await service.directory.checkpoint(field, path, caller)
    try:
        other = service.keys.caller(access_token)
    except BadKey as error:
        raise RequestError(
            "weights_access_token is not a key of this server; send the key of the account that owns the checkpoint, "
            "or leave it out"
        ) from error
    return await service.directory.checkpoint(field, path, caller, other)


async def training_checkpoint(
    service: Service, path: TinkerPath, caller: Caller, access_token: str | None = None
) -> CheckpointRow:
    """Return the checkpoint at a path, if it is a training checkpoint. Raises `RequestError` otherwise."""
    if path.kind not in ("weights", None):
        raise RequestError(
            f"path={path} holds {path.kind}, which have no optimizer state; load a checkpoint that save_weights "
            "(save_state) made: tinker://MODEL/weights/NAME"
        )
    if path.kind is None:
        path = TinkerPath(path.model, "weights", path.name)
    row = await readable_checkpoint(service, "path", path, caller, access_token)
    if row.base_model != service.info.base_model:
        raise RequestError(
            f"path={path} was trained on base model {row.base_model!r}, which is not the one served here "
            f"({service.info.base_model!r}); start the server with --base-model {row.base_model}"
        )
    return row
