"""The OpenAPI document (`/openapi.json`): FastAPI's description of the routes, plus the bodies that FastAPI does not
read.

Bodies are not FastAPI parameters here, because FastAPI would reject an invalid request before it gets its position in a
model's order (`parsing.py`). Their schemas are therefore added to the document afterwards. The schema of a route's body
comes from the route's `JsonBody` dependency or from its entry in the table of operations.
"""

import asyncio
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, cast, get_args, get_type_hints

from fastapi import APIRouter, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from skyrl.tinker.http.routes.dependencies import CallerDependency, JsonBody
from skyrl.tinker.identity.ids import SAMPLE
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.results import JSON, PROTOBUF
from skyrl.tinker.wire import schemas, strict_json

PASSES: dict[str, type[BaseModel]] = {
    "forward_backward": schemas.ForwardBackwardRequest,
    "forward": schemas.ForwardRequest,
}
"""Body schemas of operations whose bodies are JSON or protobuf."""
BODIES = {**PASSES, "asample": schemas.SampleRequest}
"""Body schemas of operations whose `accept` takes another type, to which the body is converted."""


class ErrorDetail(BaseModel):
    """The body of every error."""

    detail: str


_REFERENCE = "#/components/schemas/{model}"

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {JSON: {"schema": {"$ref": _REFERENCE.format(model=ErrorDetail.__name__)}}},
    }
    for status, description in {
        400: "The request cannot be served as sent.",
        401: "The key is not one of this server's.",
        403: "Nobody may do this here, or the link was changed.",
        404: "There is no such thing, or it is another tenant's.",
        408: "The body did not arrive.",
        410: "It is finished or gone for good.",
        413: "The body is too large.",
        429: "Too much is queued; send it again in a moment.",
        503: "The engine is not ready yet; send it again in a moment.",
    }.items()
}
"""Error responses that every route may give. They refer to a schema by `$ref`. With classes in their place, FastAPI
would create a validator per class and route at the first request, which takes longer than the rest of that request."""

_reads_key = get_args(CallerDependency)[1].dependency


def complete(app: FastAPI, prefix: str, routers: Iterable[APIRouter]) -> None:
    """Make the document of `app` include the bodies and keys that the routes of `routers` read.

    The document is created in a thread when it is first requested, and then cached. This takes a tenth of a second.
    """
    made_by_fastapi = app.openapi
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]

    @cache
    def openapi() -> dict[str, Any]:
        document = made_by_fastapi()
        components = document.setdefault("components", {})
        components.setdefault("schemas", {})[ErrorDetail.__name__] = ErrorDetail.model_json_schema()
        components["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
        for route in routes:
            for method in route.methods or ():
                entry = document["paths"][prefix + route.path][method.lower()]
                dependencies = list(_dependencies(route.dependant))
                if _reads_key in dependencies:
                    entry["security"] = [{"key": []}]
                schema = _schema(route, dependencies)
                if schema is not None:
                    entry["requestBody"] = _body(schema, components.setdefault("schemas", {}))
        return document

    lock, text = asyncio.Lock(), cache(lambda: strict_json.dumps(openapi()))

    async def document(request: Request) -> Response:
        await _reads_key(request)
        async with lock:
            return Response(await asyncio.to_thread(text), media_type=JSON)

    app.openapi = openapi
    app.router.routes[:] = [route for route in app.routes if getattr(route, "path", None) != app.openapi_url]
    app.add_route(cast(str, app.openapi_url), document, include_in_schema=False)


def _dependencies(dependant: Dependant) -> Iterator[Any]:
    for child in dependant.dependencies:
        yield child.call
        yield from _dependencies(child)


def _schema(route: APIRoute, dependencies: list[Any]) -> type[BaseModel] | None:
    for call in dependencies:
        if isinstance(call, JsonBody):
            return call.schema
    name = route.path.removeprefix("/")
    operation = OPERATIONS.get(SAMPLE if name == "asample" else name)
    if operation is None:
        return None
    return BODIES.get(name) or get_type_hints(operation.accept)["request"]


def _body(schema: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a body, and add its classes to the document."""
    described = schema.model_json_schema(ref_template=_REFERENCE)
    definitions.update(described.pop("$defs", {}))
    definitions[schema.__name__] = described
    content: dict[str, Any] = {JSON: {"schema": {"$ref": _REFERENCE.format(model=schema.__name__)}}}
    if schema in PASSES.values():
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"content": content, "required": any(field.is_required() for field in schema.model_fields.values())}
