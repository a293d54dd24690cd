"""Shared parts of routes in OpenAI's form: errors, streams of events, and clients that go."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from skyrl.errors import UnknownName
from skyrl.tinker.errors import SampleFailed
from skyrl.utils.log import REQUEST_ID

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEPALIVE_S = 15.0
"""Seconds without an event after which a stream sends a comment, so that proxies keep the connection."""
_PARAMETER = re.compile(r"(\w+)(?:[=:\[.]| has | is empty| with )")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CONTEXT = "context_length_exceeded"
_TOO_LONG = re.compile(r"exceeds the model's context|leaves no room to generate|holds sequences of at most")


class ClientGone(Exception):
    """The client has closed its connection."""


class OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                return await error_of(request, error)

        return answer


async def error_of(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an exception, with the status that it has for other routes, in the form of its route."""
    status, message, headers = await _explained(request, error)
    if is_anthropic(request):
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return JSONResponse({"type": "error", "error": {"type": kind, "message": message}}, status, headers)
    named = _PARAMETER.match(message)
    unknown = isinstance(error, UnknownName) and message.startswith("model=")
    code = "model_not_found" if unknown else CONTEXT if _TOO_LONG.search(message) else None
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    said = {"message": message, "type": kind, "param": named[1] if named and status == 400 else None, "code": code}
    return JSONResponse({"error": said}, status, headers)


def is_anthropic(request: Request) -> bool:
    """Return True if the route is one of Anthropic's API."""
    return request.url.path.rpartition("/v1/")[2].startswith("messages")


async def _explained(request: Request, error: Exception) -> tuple[int, str, dict[str, str]]:
    """Return the status, message and headers for an exception."""
    if isinstance(error, ClientGone):
        return 499, "the client has gone", {}
    if isinstance(error, SampleFailed):
        return 500, str(error), {}
    handlers = request.app.exception_handlers
    kinds = [kind for kind in type(error).__mro__ if kind in handlers and kind is not Exception]
    if not kinds:
        log.error("internal error in %s", request.url.path, exc_info=error)
        return 500, f"internal error; the server's log has the details at request {REQUEST_ID.get()}", {}
    response: Any = handlers[kinds[0]](request, error)
    if asyncio.iscoroutine(response):
        response = await response
    kept = {name: value for name, value in response.headers.items() if name in ("retry-after", "www-authenticate")}
    return response.status_code, json.loads(bytes(response.body))["detail"], kept


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises `ClientGone` and cancels `work` if the client closes its connection first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(request: Request, events: AsyncGenerator[Any, None]) -> Response:
    """Return a response that streams events as JSON.

    Events of Messages and Responses have names; others end with `[DONE]`.

    The first event decides the status: an error before it is an ordinary one. A later error is an event, the last.
    """
    first = await unless_gone(request, anext(events))
    named = is_anthropic(request) or request.url.path.endswith("/v1/responses")

    async def lines() -> AsyncIterator[str]:
        yield _line(first, named)
        coming: asyncio.Future[Any] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(anext(events))
                while not (await asyncio.wait({coming}, timeout=KEEPALIVE_S))[0]:
                    yield ": keep-alive\n\n"
                yield _line(coming.result(), named)
        except StopAsyncIteration:
            if not named:
                yield "data: [DONE]\n\n"
        except Exception as error:
            yield _line(json.loads(bytes((await error_of(request, error)).body)), named)
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.wait({coming})
            await events.aclose()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _line(event: Any, named: bool) -> str:
    name = f"event: {event.get('type', 'error')}\n" if named else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
