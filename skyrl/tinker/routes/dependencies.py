"""What route functions ask for: the server's parts and the caller."""

from typing import Annotated, Any, cast

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from skyrl.tinker.auth import Caller, authenticate
from skyrl.tinker.parsing import Body, MalformedBody, describe, json_object
from skyrl.tinker.queue import RequestQueue
from skyrl.tinker.server import TinkerServer
from skyrl.tinker.service import Service


def _server(request: Request) -> TinkerServer:
    return cast(TinkerServer, request.app.state.server)


def _service(request: Request) -> Service:
    return _server(request).service


def _queue(request: Request) -> RequestQueue:
    return _server(request).queue


def _caller(request: Request) -> Caller:
    caller = authenticate(request.headers.get("x-api-key"), _server(request).config.api_keys)
    if caller is None:
        raise HTTPException(401, "X-API-Key is not one of this server's keys; set api_key or TINKER_API_KEY to one")
    return caller


async def _body(request: Request) -> Body:
    headers = request.headers
    content_type = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    return Body(await request.body(), content_type, headers.get("content-encoding", "").strip().lower())


ServiceDependency = Annotated[Service, Depends(_service)]
QueueDependency = Annotated[RequestQueue, Depends(_queue)]
CallerDependency = Annotated[Caller, Depends(_caller)]
BodyDependency = Annotated[Body, Depends(_body)]


class JsonBody:
    """A dependency that reads the body as `schema`, with the same rules as those of queued requests."""

    def __init__(self, schema: type[BaseModel]):
        self.schema = schema

    async def __call__(self, body: BodyDependency) -> BaseModel:
        try:
            return self.schema.model_validate(json_object(body))
        except ValidationError as error:
            raise MalformedBody(describe(error.errors())) from error


def json_body(schema: type[BaseModel]) -> Any:
    """The dependency of a route on its JSON body."""
    return Depends(JsonBody(schema))
