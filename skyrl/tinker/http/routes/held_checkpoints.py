"""Routes that create a checkpoint in a run of its own: copies of checkpoints, and uploaded adapters.

A file is uploaded to a signed link, without a key. It is written to disk while it arrives, up to the size in the link.
"""

import re
from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency, json_body
from skyrl.tinker.http.routes.links import end_of_link, link
from skyrl.tinker.identity.tokens import BadToken
from skyrl.tinker.operations.copy_weights import copy_checkpoint
from skyrl.tinker.operations.upload_weights import begin_upload, finish_upload, receive_file
from skyrl.tinker.wire import management_schemas as rest
from skyrl.tinker.wire.sharing import announced_length

router = APIRouter()
public = APIRouter()
"""Routes that need no key."""

UPLOADS = "/uploads/{token}/{name}"
HEADERS_SINCE = (0, 40)
"""First SDK version that expects {"url", "headers"} where 0.39 expects a URL."""
MAX_FILE_BYTES = 2**63
"""Maximum bytes of a body on the upload path. The link of a file has the limit for that file."""


@router.post("/copy_weights")
async def copy_weights(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[rest.CopyWeightsRequest, json_body(rest.CopyWeightsRequest)],
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> rest.CopyWeightsResponse:
    """Copy a checkpoint, which the caller or the owner of the access token may read, into a new run."""
    token = x_tinker_weights_access_token or request.weights_access_token
    request = request.model_copy(update={"weights_access_token": token})
    return rest.CopyWeightsResponse(tinker_path=str(await copy_checkpoint(service, caller, request, x_idempotency_key)))


@router.post("/external_weights_upload_start")
async def external_weights_upload_start(
    http: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[rest.UploadStartRequest, json_body(rest.UploadStartRequest)],
    x_stainless_package_version: Annotated[str | None, Header()] = None,
) -> rest.UploadStartResponse:
    """Start the upload of a PEFT adapter that was trained elsewhere; returns links for PUT requests."""
    expires = end_of_link(caller)
    begun = begin_upload(service, caller, request, expires)
    urls = {name: link(http, service, "upload", token, name) for name, token in begun.files.items()}
    if _reads_headers(x_stainless_package_version):
        urls = {name: rest.UploadUrl(url=url) for name, url in urls.items()}
    return rest.UploadStartResponse(upload_id=begun.id, urls=urls, expires=rest.moment(expires))


def _reads_headers(sdk_version: str | None) -> bool:
    """Return True if an SDK of this version reads the URLs of an upload as objects. Older SDKs read strings."""
    told = re.match(r"(\d{1,9})\.(\d{1,9})", sdk_version or "")
    return told is not None and (int(told[1]), int(told[2])) >= HEADERS_SINCE


@public.put(UPLOADS, response_class=Response)
async def upload(token: str, name: str, request: Request, service: ServiceDependency) -> None:
    """Store a file that is uploaded to its link. A repeated upload replaces the file."""
    try:
        claims = service.keys.signer.read("upload_file", token)
    except BadToken as error:
        raise HTTPException(403, f"the link {error}; start another upload") from error
    if claims["name"] != name:
        raise HTTPException(403, "the link was changed; start another upload")
    await receive_file(service, claims, request.stream(), announced_length(request.scope))


@router.post("/external_weights_upload_finish", response_model_exclude_none=True)
async def external_weights_upload_finish(
    service: ServiceDependency,
    caller: CallerDependency,
    request: Annotated[rest.UploadFinishRequest, json_body(rest.UploadFinishRequest)],
) -> rest.UploadFinishResponse:
    """Create a training checkpoint from the uploaded files."""
    finished = await finish_upload(service, caller, request.upload_id)
    return rest.UploadFinishResponse(tinker_path=str(finished.path), warning=finished.warning)
