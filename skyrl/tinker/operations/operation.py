"""A queued operation of the API: a request schema, its acceptance, and what becomes of its result.

An `accept` function turns a request into work for the engine (`skyrl.backends.operations`), or raises `RequestError`,
which fails the request in its place in the model's order. It also says what the request means to the database: when it
is logged (`on_log`) and when its result is stored (`record`, which returns the JSON that the client reads). What it
chooses goes into `Admission.decided`, because after a crash the request is accepted again and must mean the same.

Routes, parsing, the log and the engine read the table: to add an operation, add a function with `@operation` to the
file of its kind in this folder (a new file is named in `table` too).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from skyrl.errors import RequestError
from skyrl.tinker.operations.admission import Accepted, Admission
from skyrl.tinker.wire import schemas
from skyrl.tinker.wire.parsing import Body, Limits, Parsed

Parse = Callable[[Body, Limits], Parsed]
Accept = Callable[[Admission, Any], Awaitable[Accepted]]
Encode = Callable[[Any], bytes]
SMALL_BODY = 2**20


@dataclass(frozen=True)
class QueuedOperation:
    """Definition of an operation for the server."""

    name: str
    """Its path under /api/v1, and its kind in the log."""
    parse: Parse
    """From a body to its request. Raises `MalformedBody`."""
    accept: Accept
    encode: Encode | None
    """Its result as protobuf. None: `record` returns it as JSON."""
    max_body_bytes: int | None
    """None: as the configuration says."""
    changes_model: bool
    """True if a model has to do it again to become what it was after it."""


OPERATIONS: dict[str, QueuedOperation] = {}


def operation(
    name: str,
    parse: Parse,
    encode: Encode | None = None,
    max_body_bytes: int | None = SMALL_BODY,
    changes_model: bool = False,
) -> Callable[[Accept], Accept]:
    """Put the decorated `accept` function into the table."""

    def register(accept: Accept) -> Accept:
        OPERATIONS[name] = QueuedOperation(name, parse, accept, encode, max_body_bytes, changes_model)
        return accept

    return register


def refuse_unserved(request: schemas.RequestModel) -> None:
    if (error := request.unserved()) is not None:
        raise RequestError(error)
