"""Definition of a queued operation: a request schema, an `accept` function, and the storage of its result.

An `accept` function turns a request into an operation for the engine (`skyrl.backends.operations`), or raises
`RequestError`, which fails the request at its position in the model's order. The function also defines the effects on
the database when the request is logged (`on_log`) and when its result is stored (`record`, which returns the JSON for
the client). It stores its choices in `Admission.decided`, because after a crash the request is accepted again and must
have the same effect.

Routes, parsing, the log and the engine use the table of operations. To add an operation, add a function with
`@operation` to a file in this folder (and import a new file in `table`).
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
    """A queued operation of the server, as its module defines it."""

    name: str
    """Path under /api/v1, which is also the kind of its requests in the log."""
    parse: Parse
    """Parses a body. Raises `MalformedBody`."""
    accept: Accept
    encode: Encode | None
    """Encodes the result as protobuf. None: `record` returns it as JSON."""
    max_body_bytes: int | None
    """Maximum bytes of a body. None: the configured limit."""
    changes_model: bool
    """True if the operation must be replayed to restore the model."""


OPERATIONS: dict[str, QueuedOperation] = {}


def operation(
    name: str,
    parse: Parse,
    encode: Encode | None = None,
    max_body_bytes: int | None = SMALL_BODY,
    changes_model: bool = False,
) -> Callable[[Accept], Accept]:
    """Add the decorated `accept` function to the table."""

    def register(accept: Accept) -> Accept:
        OPERATIONS[name] = QueuedOperation(name, parse, accept, encode, max_body_bytes, changes_model)
        return accept

    return register


def refuse_unserved(request: schemas.RequestModel) -> None:
    if (error := request.unserved()) is not None:
        raise RequestError(error)
