"""From a request's bytes to its schema, in two steps: whose it is, then what it says.

A request with a place in a model's order must not be turned away at the door for a bad value: the client would never
send that seq_id again, and everything after it would wait. So the address is read by itself; if the rest does not fit
the schema, the request goes on with the error instead of its content, and fails in its place.
"""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from skyrl.tinker.errors import MalformedBody
from skyrl.tinker.wire.json_numbers import JsonTooLarge, outer_members, parse_short

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100

MANY_FAULTS = 1000
BEGINNING_BYTES = 2**18
"""Bytes read of a body that is too large. A block of zstd, of which a part is of no use, may have half as many."""
MAX_ERROR = 2000
"""Characters. A client may send, and so be told, names and values of any length."""
JSON_FACTOR = 32
"""Bytes that the values of a JSON text take in memory per byte of it, at most."""

Int64 = Annotated[int, Field(ge=0, lt=2**63)]


class TooLarge(MalformedBody):
    """A body is JSON of more than is read, but for those of its `members` that say whose it is."""

    def __init__(self, message: str, body: bytes):
        super().__init__(message)
        self.members = outer_members(body)


@dataclass(frozen=True)
class Body:
    """A request as it was sent."""

    data: bytes
    content_type: str = "application/json"
    content_encoding: str = ""
    too_large: str = ""
    """Reason why `data` is only its beginning, where it is."""


class ModelAddress(BaseModel):
    """A place in a model's order."""

    model_id: str
    seq_id: Int64


class WholeModelAddress(BaseModel):
    """A model; the request's place in its order is where it arrives."""

    model_id: str


class NewModelAddress(BaseModel):
    """A model to be made; the request is its number 0."""

    session_id: str
    model_seq_id: Int64


class SamplerAddress(BaseModel):
    """A request to a sampler. The same address means the same request."""

    sampling_session_id: str
    seq_id: Int64
    num_samples: int = 1


Address = ModelAddress | WholeModelAddress | NewModelAddress | SamplerAddress


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """A request, or what is wrong with it; its address is known either way."""

    address: Address
    request: T | None
    error: str = ""
    is_pass: bool = False
    """True if it was to add gradients, so that the next optimizer step must not go ahead without it."""
    held_bytes: int = 0
    """Bytes that the request takes in memory, roughly. A small body may stand for a large one."""


@dataclass(frozen=True)
class Limits:
    """Limits of a body."""

    max_bytes: int
    """After decompression, and of the arrays made of it."""
    max_parts: int | None = None
    """Fields of a training pass in protobuf, in all its messages. None: `wire_scan.MAX_PARTS`, and
    those of `json_numbers` hold for JSON."""
    max_context_length: int = 2**31
    """Tokens that a prompt may have, roughly."""


def json_object(body: Body, parse: Callable[[bytes], Any] = parse_short) -> dict[str, Any]:
    """The JSON object in a body, read by `parse`. Raises `MalformedBody` if there is none."""
    if body.content_encoding not in ("", "identity"):
        raise MalformedBody(f"Content-Encoding: {body.content_encoding} is not served for JSON; send it uncompressed")
    try:
        value = parse(body.data or b"{}")
    except JsonTooLarge as error:
        raise TooLarge(str(error), body.data) from error
    except ValueError as error:
        raise MalformedBody(f"the body is not JSON ({error}); send a JSON object") from error
    if not isinstance(value, dict):
        raise MalformedBody(f"the body is a JSON {type(value).__name__}; send an object")
    return value


def read_address(kind: type[Address], value: dict[str, Any]) -> Address:
    """The address in a JSON object, in which null means left out. Raises `MalformedBody` if there is none."""
    try:
        return kind.model_validate({key: child for key, child in value.items() if child is not None})
    except ValidationError as error:
        raise MalformedBody(describe_faults(error)) from error


def json_parser(
    schema: type[R], address: type[Address] | Callable[[dict[str, Any]], type[Address]]
) -> Callable[[Body, Limits], Parsed[R]]:
    """A function from a JSON body to its request.

    Args:
        schema: Schema of the request.
        address: Class of the request's address, or a function that chooses the class from the body.
    """

    def parse(body: Body, limits: Limits) -> Parsed[R]:
        error = ""
        try:
            value = json_object(body, partial(parse_short, bounded=limits.max_parts is None))
        except TooLarge as fault:
            value, error = fault.members, str(fault)
        kind = address if isinstance(address, type) else address(value)
        where = read_address(kind, value)
        if error:
            return Parsed(where, None, error)
        try:
            return Parsed(where, schema.model_validate(value), held_bytes=JSON_FACTOR * len(body.data))
        except ValidationError as error:
            return Parsed(where, None, describe_faults(error))

    return parse


def describe_faults(error: ValidationError) -> str:
    """Faults against a schema, in one line. Of very many faults only their number: to list them takes seconds."""
    count = error.error_count()
    if count > MANY_FAULTS:
        return f"{count} values or names do not fit this request; its schema is in /openapi.json"
    return describe(error.errors())


def describe(errors: Sequence[Any]) -> str:
    """Validation errors of pydantic in one line: "field: value rule; field: ..."."""
    return "; ".join(_describe(error) for error in errors[:5])


def _describe(error: ErrorDetails) -> str:
    field = ".".join(_shown(part) for part in error["loc"]) or "body"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if error["type"] == "missing":
        return f"{field}: is required"
    if error["type"] == "extra_forbidden":
        return f"{field}: is not a field of this request; remove it"
    return f"{field}: {_shortened(error['input'])}: {message[:1].lower()}{message[1:]}"


def brief(error: str) -> str:
    """An error of which not more comes back than is of use: the field at its beginning, the way out at its end."""
    if len(error) <= MAX_ERROR:
        return error
    return f"{error[: MAX_ERROR // 2]} ... {error[-MAX_ERROR // 2 :]}"


def _shown(part: int | str) -> str:
    return part if isinstance(part, str) and part.isidentifier() else _shortened(part)


def _shortened(value: object) -> str:
    return _REPR.repr(value)
