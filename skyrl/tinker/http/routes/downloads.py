"""Downloads of checkpoint files by links."""

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from skyrl.errors import DamagedFiles, RequestError, UnknownName
from skyrl.tinker.checkpoints.transfer.tar_stream import Stream, stream_archive, stream_file
from skyrl.tinker.context import Service
from skyrl.tinker.database.ledger.audit import note_checkpoint
from skyrl.tinker.database.queries.checkpoint_rows import find_checkpoint
from skyrl.tinker.database.tables import CheckpointRow
from skyrl.tinker.http.routes.checkpoints import CHECKPOINT
from skyrl.tinker.http.routes.dependencies import CallerDependency, PathDependency, ServiceDependency
from skyrl.tinker.http.routes.links import end_of_link, link
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import TinkerPath
from skyrl.tinker.identity.tokens import BadToken
from skyrl.tinker.wire import management_schemas as rest
from skyrl.utils.files.stored_folders import sign_stored

log = logging.getLogger(__name__)

T = TypeVar("T")

router = APIRouter()
public = APIRouter()
"""Routes that need no key."""

DOWNLOADS = "/downloads/{token}/{name}"


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    path: PathDependency, request: Request, service: ServiceDependency, caller: CallerDependency
) -> rest.ExternalWeightsUrlsResponse:
    """A link to each file of weights that were saved for external use."""
    if path.kind != "external_weights":
        raise RequestError(
            f"path={path} holds {path.kind}; only what save_weights_external made has links to its files"
        )
    row = await service.directory.checkpoint("path", path, caller)
    await _note_read(service, row, caller)
    expires = end_of_link(caller)
    signed = await _read(path, partial(_signed_files, service.path_of(row.folder), expires))
    urls = {name: url or _link(request, service, path, row, name, name, expires) for name, url in signed.items()}
    return rest.ExternalWeightsUrlsResponse(urls=urls, expires=rest.moment(expires))


@router.get(f"{CHECKPOINT}/archive", response_model=None, responses={302: {"description": "The link."}})
async def archive(
    path: PathDependency, request: Request, service: ServiceDependency, caller: CallerDependency
) -> Response:
    """Return a link to a tar archive of a checkpoint, for clients before 0.36: a redirect or, on request, JSON."""
    row = await service.directory.checkpoint("path", path, caller)
    await _note_read(service, row, caller)
    expires = end_of_link(caller)
    url = _link(request, service, path, row, f"{path.name}.tar", None, expires)
    accepted = ", ".join(request.headers.getlist("accept"))  # clients before 0.22 send two, "json" and then "gzip"
    if "json" in accepted and "gzip" not in accepted:
        answer = rest.ArchiveUrlResponse(url=url, expires=rest.moment(expires))
        return JSONResponse(answer.model_dump(mode="json"))
    return RedirectResponse(url, 302, {"Expires": formatdate(expires, usegmt=True)})


@public.get(DOWNLOADS, response_model=None, responses={200: {"content": {"application/octet-stream": {}}}})
async def download(token: str, name: str, service: ServiceDependency) -> Response:
    """Return the file, or the archive of a checkpoint, to which a link refers."""
    try:
        claims = service.keys.signer.read("download", token)
    except BadToken as error:
        raise HTTPException(403, f"the link {error}; ask for another") from error
    if claims["name"] != name:
        raise HTTPException(403, "the link was changed; ask for another")
    path = TinkerPath.parse("path", claims["path"])
    row = await service.database.read(partial(find_checkpoint, path=path))
    if row is None or row.version != claims["version"]:
        raise UnknownName(f"path={path}: the checkpoint was deleted or replaced, or it has expired")
    member = claims["member"]
    folder = service.path_of(row.folder)
    open_stream = partial(stream_archive, folder) if member is None else partial(stream_file, folder, member)
    return _response(await _read(path, open_stream), name)


async def _note_read(service: Service, row: CheckpointRow, caller: Caller) -> None:
    note = partial(note_checkpoint, event="checkpoint_read", row=row, by=caller.name, purpose="download")
    await service.database.write(note)


def _link(
    request: Request,
    service: Service,
    path: TinkerPath,
    row: CheckpointRow,
    name: str,
    member: str | None,
    expires: int,
) -> str:
    """Create a link to a file. `member` is a file of the checkpoint, or None for an archive of all files."""
    claims = {"path": str(path), "version": row.version, "name": name, "member": member}
    return link(request, service, "download", service.keys.signer.sign("download", claims, expires), name)


async def _read(path: TinkerPath, function: Callable[[], T]) -> T:
    """Call `function` in a thread. If files of the checkpoint are missing or damaged, raises an error of status 410."""
    try:
        return await asyncio.to_thread(function)
    except DamagedFiles as error:
        log.error("files of %s cannot be read: %s", path, error)
        raise HTTPException(410, f"path={path}: its files are missing or damaged; use another checkpoint") from error


def _response(stream: Stream, name: str) -> Response:
    headers = {"Content-Length": str(stream.size_bytes), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(stream.pieces, headers=headers, media_type="application/octet-stream")


def _signed_files(folder: str, expires: int) -> dict[str, str | None]:
    """Return the object store's signed URL of each file, by file name. None: there is no signed URL."""
    return sign_stored(folder, expires - time.time())
