"""Dependencies of route functions: the server's parts and the caller.

All dependencies are coroutines, because FastAPI would run other functions in a thread.
"""

from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from typing import Annotated, Any, cast

from fastapi import Depends, Query, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from skyrl.tinker.context import Service
from skyrl.tinker.errors import BadKey, BodyTooLarge, MalformedBody
from skyrl.tinker.http.body_limit import UNTIL_ANSWERED
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import CheckpointKind, TinkerPath
from skyrl.tinker.requests.queue import RequestQueue
from skyrl.tinker.sampling.capture_store import Captures
from skyrl.tinker.server import TinkerServer
from skyrl.tinker.wire.parsing import BEGINNING_BYTES, Body, describe_faults, json_object
from skyrl.tinker.wire.sharing import Reservation, announced_length

SESSION = "/sessions/"
"""Text between a key and the captured session of its requests, for programs with no other setting than a key."""
TENANT = "skyrl.tenant"
"""Key in a request's scope: name of the sender, once it is known."""


def _server(request: Request) -> TinkerServer:
    return cast(TinkerServer, request.app.state.server)


async def _service(request: Request) -> Service:
    return _server(request).service


async def _captures(request: Request) -> Captures:
    return _server(request).captures


async def _queue(request: Request) -> RequestQueue:
    return _server(request).queue


async def _caller(request: Request) -> Caller:
    """Return the caller by its key, in X-API-Key or, as clients of OpenAI and Prometheus send it, as a bearer token."""
    keys, address = _server(request).service.keys, _address(request)
    try:
        caller = replace(keys.caller(_key(request)), address=address)
    except BadKey as error:
        raise _wrong_key(request, error) from error
    request.scope[TENANT] = caller.display_name
    return caller


async def operator(request: Request) -> None:
    """Require an operator key."""
    try:
        may = _server(request).service.keys.is_operator(_key(request))
    except BadKey as error:
        raise _wrong_key(request, error) from error
    if not may:
        raise HTTPException(403, "this is for operators: send a key of the server's --operator-keys-file")


def _given_key(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else None)


def _key(request: Request) -> str | None:
    given = _given_key(request)
    return None if given is None else given.partition(SESSION)[0]


def session_name(request: Request) -> str | None:
    """Return the captured session that a request names in its path, its header X-Session-ID, or after its key."""
    given = request.path_params.get("session") or request.headers.get("x-session-id")
    return given or (_given_key(request) or "").partition(SESSION)[2] or None


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _wrong_key(request: Request, error: BadKey) -> HTTPException:
    _server(request).service.wrong_keys.note(_address(request))
    # Clients that get this header for a token create a new token and retry.
    challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'} if error.is_token else None
    return HTTPException(401, str(error), challenge)


async def _path(run_id: str, kind: CheckpointKind, name: str) -> TinkerPath:
    return TinkerPath(run_id, kind, name)


ServiceDependency = Annotated[Service, Depends(_service)]
CapturesDependency = Annotated[Captures, Depends(_captures)]
QueueDependency = Annotated[RequestQueue, Depends(_queue)]
CallerDependency = Annotated[Caller, Depends(_caller)]


async def _body(request: Request, caller: CallerDependency) -> Body:
    """Read the body within the caller's memory quota. The reserved memory is released when the request is answered."""
    headers = request.headers
    content_type = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    too_large = ""
    with ExitStack() as while_read:
        room = while_read.enter_context(_server(request).service.body_quota.keep(caller.sharer))
        room.grow_to(announced_length(request.scope))
        whole = BytesIO()  # `getvalue` makes no copy; joining many pieces would block the event loop
        try:
            async for piece in request.stream():
                room.grow_to(whole.tell() + len(piece))
                whole.write(piece)
        except BodyTooLarge as error:
            if error.beginning is None:
                raise
            too_large = str(error)
            whole.write(error.beginning)
            whole.truncate(BEGINNING_BYTES)
        data = whole.getvalue()
        whole.close()
        request.scope[UNTIL_ANSWERED].push(while_read.pop_all())
    return Body(data, content_type, headers.get("content-encoding", "").strip().lower(), too_large)


BodyDependency = Annotated[Body, Depends(_body)]


async def _answer_room(request: Request, caller: CallerDependency) -> Reservation:
    """Memory reservation for the answer. It is empty at first, and released when the answer is sent."""
    return request.scope[UNTIL_ANSWERED].enter_context(_server(request).service.answers.room.keep(caller.sharer))


AnswerRoomDependency = Annotated[Reservation, Depends(_answer_room)]

PathDependency = Annotated[TinkerPath, Depends(_path)]
"""The checkpoint of a URL with `run_id`, `kind` and `name`."""
Limit = Annotated[int, Query(ge=0, le=10_000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
"""Offset of a page of a list."""


class JsonBody:
    """FastAPI dependency that parses the body as `schema` in the decode pool.

    Args:
        schema: Schema of the request.
        max_bytes: Maximum bytes of a body. None: the configured limit.
    """

    def __init__(self, schema: type[BaseModel], max_bytes: int | None = None):
        self.schema = schema
        self.max_bytes = max_bytes

    async def __call__(self, request: Request, caller: CallerDependency, body: BodyDependency) -> BaseModel:
        if self.max_bytes is not None and len(body.data) > self.max_bytes:
            raise BodyTooLarge(f"the body has {len(body.data)} bytes; send at most {self.max_bytes}")
        try:
            return await _server(request).service.decode_pool.run(
                caller.sharer, len(body.data), lambda: self.schema.model_validate(json_object(body))
            )
        except ValidationError as error:
            raise MalformedBody(describe_faults(error)) from error


def json_body(schema: type[BaseModel], max_bytes: int | None = None) -> Any:
    """Return the `JsonBody` dependency of a route."""
    return Depends(JsonBody(schema, max_bytes))
