"""Rows of samplers of the base model and of checkpoints, for sessions of the Tinker API and of other routes."""

from sqlmodel import Session

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.context import Service
from skyrl.tinker.database.queries.checkpoint_rows import find_checkpoint
from skyrl.tinker.database.tables import CheckpointRow, SamplerRow, SessionRow
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath


async def make_sampler(service: Service, owner: SessionRow, number: int, path: TinkerPath | None) -> str | None:
    """Create a sampler of a checkpoint, or of the base model. Returns its id, or None if the number is in use.

    A sampler with the same session, number and source is returned. Raises `UnknownName` if the checkpoint has gone.
    """
    sampler_id = ids.sampler_id(owner.session_id, number)

    def insert(session: Session) -> bool:
        """Return True if the id is new, or if its sampler has the same source."""
        same = session.get(SamplerRow, sampler_id)
        kind, model_path = ("base", None) if path is None else ("checkpoint", str(path))
        if same is not None:
            return (same.kind, same.model_path) == (kind, model_path)
        row = SamplerRow(
            sampler_id=sampler_id,
            session_id=owner.session_id,
            tenant=owner.tenant,
            kind=kind,
            base_model=service.info.base_model,
            model_path=model_path,
        )
        if path is not None:
            checkpoint = find_checkpoint(session, path)  # once more, as a save may have replaced it meanwhile
            if checkpoint is None:
                raise UnknownName(f"model_path={path}: there is no such checkpoint any more")
            row.model_id, row.version, row.folder = checkpoint.model_id, checkpoint.version, checkpoint.folder
        session.add(row)
        return True

    return sampler_id if await service.database.write(insert) else None


async def join_sampler(service: Service, sampler_id: str) -> int:
    """Add a client to a sampler and return its unique number."""

    def join(session: Session) -> int:
        row = session.get_one(SamplerRow, sampler_id)
        row.clients += 1
        return row.clients - 1

    return await service.database.write(join)


async def checkpoint_to_sample(service: Service, field: str, path: TinkerPath, caller: Caller) -> CheckpointRow:
    """Return the checkpoint at a path.

    Raises:
        UnknownName: The caller sees no such checkpoint.
        RequestError: It cannot be sampled here.
    """
    checkpoint = await service.directory.checkpoint(field, path, caller)
    if path.kind == "external_weights":
        raise RequestError(
            f"{field}={path} is for use elsewhere; sample from what save_weights_for_sampler made: "
            "tinker://MODEL/sampler_weights/NAME"
        )
    if checkpoint.base_model != service.info.base_model:
        raise RequestError(
            f"{field}={path} was trained on base model {checkpoint.base_model!r}, which is not the one served here "
            f"({service.info.base_model!r}); start the server with --base-model {checkpoint.base_model}"
        )
    return checkpoint
