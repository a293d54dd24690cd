"""Outcomes of requests: an encoded answer, a failure, or neither."""

from dataclasses import dataclass

from skyrl.types import ErrorCategory

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Answer:
    """An encoded result."""

    body: bytes
    media_type: str = JSON

    @property
    def size(self) -> int:
        return len(self.body)


@dataclass(frozen=True)
class Failure:
    """Reason why there is no result, and whose fault it is."""

    error: str
    category: ErrorCategory


@dataclass(frozen=True)
class Lost:
    """The request is gone without a result; the client submits it again."""


Outcome = Answer | Failure | Lost
