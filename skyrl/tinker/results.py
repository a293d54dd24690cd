"""Outcomes of requests: an encoded answer, a failure, or lost."""

from dataclasses import dataclass

from skyrl.types import ErrorCategory

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Answer:
    """An encoded result."""

    body: bytes
    media_type: str = JSON
    fingerprint: str | None = None
    """Hash of the weights that generated a sample."""

    @property
    def size(self) -> int:
        return len(self.body)


@dataclass(frozen=True)
class Failure:
    """An error message, and whether the client or the server is at fault."""

    error: str
    category: ErrorCategory


@dataclass(frozen=True)
class Lost:
    """The request has no result; the client submits it again."""


Outcome = Answer | Failure | Lost
