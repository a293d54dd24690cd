"""The server's choices for a request: typed objects in memory, JSON in the log. Only this module converts between both.

When a request is replayed after a crash, the choices of its first acceptance apply, so that it has the same effect. To
add a choice, add a field. In rows that were logged earlier, the field is None.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import JSON, Dialect
from sqlalchemy.types import TypeDecorator

from skyrl.types import GradientEffect


@dataclass(frozen=True)
class LoggedRefusal:
    """A refusal: its error, and its effect on the gradient sums."""

    error: str
    gradients: GradientEffect


@dataclass
class Decisions:
    """Choices for one request. A field is None if its choice was not necessary or is not made yet."""

    held_bytes: int | None = None
    """Bytes that the request counts for in memory."""
    sharer: str | None = None
    """Sharer whose quota the request counts against; see `Caller.sharer`."""
    forward_only: bool | None = None
    """True if a pass does not change its model."""
    seed: int | None = None
    """Seed of the weights of a new model."""
    folder: str | None = None
    """Folder of the checkpoint at a path, or of an unnamed version."""
    digest: str | None = None
    """Digest of the checkpoint at a path. Also None if this checkpoint has no digest."""
    lora_config: dict[str, Any] | None = None
    """Configuration of the checkpoint at a path."""
    version: str | None = None
    """Unnamed version whose files may be written after its request is done."""
    saved_to: str | None = None
    """Folder of a named checkpoint. When the folder is complete, the save is done."""
    refused: LoggedRefusal | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the choices in the form of the log, without fields that are None."""
        has_checkpoint = self.lora_config is not None  # with or without a digest
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None or (name == "digest" and has_checkpoint)
        }

    @classmethod
    def from_json(cls, logged: dict[str, Any]) -> "Decisions":
        """Parse choices from the log. Unknown keys of later versions are ignored; rows are never rewritten."""
        known = {name: logged[name] for name in _NAMES if name in logged}
        if (refused := known.get("refused")) is not None:
            known["refused"] = LoggedRefusal(refused["error"], refused["gradients"])
        return cls(**known)


_NAMES = [field.name for field in fields(Decisions)]


class DecisionsColumn(TypeDecorator[Decisions]):
    """JSON column that is read and written as `Decisions`."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Decisions | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else value.to_json()

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> Decisions | None:
        return None if value is None else Decisions.from_json(value)
