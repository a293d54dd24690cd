"""Parsing of request bodies in two steps: first the address, then the content.

A request with a position in a model's order must not be rejected with an HTTP error for a bad value: the client would
never send that seq_id again, and all later requests would wait for it. Therefore, the address is parsed separately. If
the content does not match the schema, the request is queued with the error instead, and fails at its position.
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
"""Number of validation errors above which only their number is reported."""
BEGINNING_BYTES = 2**18
"""Number of bytes that are read from an oversized body. It is twice the maximum block size of zstd, because zstd can
only decode whole blocks."""
MAX_ERROR = 2000
"""Maximum characters of an error message, which may quote names and values of any length from the request."""
JSON_FACTOR = 32
"""Maximum bytes in memory per byte of a JSON text."""

Int64 = Annotated[int, Field(ge=0, lt=2**63)]


class TooLarge(MalformedBody):
    """A JSON body is too large to be parsed. `members` has its scalar members, which include the address."""

    def __init__(self, message: str, body: bytes):
        super().__init__(message)
        self.members = outer_members(body)


@dataclass(frozen=True)
class Body:
    """A request body as it was received."""

    data: bytes
    content_type: str = "application/json"
    content_encoding: str = ""
    too_large: str = ""
    """Error message if the body is too large and `data` is only its beginning; empty otherwise."""


class ModelAddress(BaseModel):
    """A position in a model's order."""

    model_id: str
    seq_id: Int64


class WholeModelAddress(BaseModel):
    """A model, for requests without seq_id. Such requests take their position in the model's order when they arrive."""

    model_id: str


class NewModelAddress(BaseModel):
    """A model to be created. The request that creates it has the model's seq_id 0."""

    session_id: str
    model_seq_id: Int64


class SamplerAddress(BaseModel):
    """A request to a sampler. Requests with equal addresses are duplicates."""

    sampling_session_id: str
    seq_id: Int64
    num_samples: int = 1


Address = ModelAddress | WholeModelAddress | NewModelAddress | SamplerAddress


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """A parsed request, or its error if `request` is None. The address is known in both cases."""

    address: Address
    request: T | None
    error: str = ""
    is_pass: bool = False
    """True for a pass that adds gradients. If it fails, the model's next optimizer step must not run."""
    held_bytes: int = 0
    """Approximate memory of the request in bytes, which may be much more than the size of its body."""


@dataclass(frozen=True)
class Limits:
    """Limits of a body."""

    max_bytes: int
    """Limit of the decompressed body, and of the arrays decoded from it, in bytes."""
    max_parts: int | None = None
    """Maximum number of fields of a protobuf training pass, in all its messages. None: `protobuf.MAX_PARTS`, and
    JSON bodies have the limits of `json_numbers`. Otherwise JSON bodies have no such limits."""
    max_context_length: int = 2**31
    """Approximate maximum number of tokens of a prompt."""


def json_object(body: Body, parse: Callable[[bytes], Any] = parse_short) -> dict[str, Any]:
    """Parse a body with `parse`. An empty body counts as {}. Raises `MalformedBody` unless the body is an object."""
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
    """Read the address in a JSON object. A null counts as missing. Raises `MalformedBody` for an invalid address."""
    try:
        return kind.model_validate({key: child for key, child in value.items() if child is not None})
    except ValidationError as error:
        raise MalformedBody(describe_faults(error)) from error


def json_parser(
    schema: type[R], address: type[Address] | Callable[[dict[str, Any]], type[Address]]
) -> Callable[[Body, Limits], Parsed[R]]:
    """Return a function that parses a JSON body to a request of this schema.

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
    """Describe validation errors in one line. If there are more than `MANY_FAULTS`, give only their number, because
    listing them would take seconds."""
    count = error.error_count()
    if count > MANY_FAULTS:
        return f"{count} values or names do not fit this request; its schema is in /openapi.json"
    return describe(error.errors())


def describe(errors: Sequence[Any]) -> str:
    """Describe the first five pydantic errors in one line: "field: value: rule; field: ..."."""
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
    """Shorten an error message to `MAX_ERROR` characters. Keeps its beginning (the field) and its end (the advice)."""
    if len(error) <= MAX_ERROR:
        return error
    return f"{error[: MAX_ERROR // 2]} ... {error[-MAX_ERROR // 2 :]}"


def _shown(part: int | str) -> str:
    return part if isinstance(part, str) and part.isidentifier() else _shortened(part)


def _shortened(value: object) -> str:
    return _REPR.repr(value)
