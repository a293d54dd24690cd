"""Choices of the server for a request, typed here and JSON in the log: the one place that knows both.

A request that is done again, after a crash, finds here what was chosen when it was accepted first, and so means the
same. To choose something more, add a field: rows without it read as None.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import JSON, Dialect
from sqlalchemy.types import TypeDecorator

from skyrl.types import GradientEffect


@dataclass(frozen=True)
class LoggedRefusal:
    """Reason why a request was refused when it came, and what that means to the gradient sums."""

    error: str
    gradients: GradientEffect


@dataclass
class Decisions:
    """Choices for one request. None: there was nothing to choose, or it is not chosen yet."""

    held_bytes: int | None = None
    """Bytes that the request counts for in memory."""
    sharer: str | None = None
    """Sharer whose part of the room it takes; see `Caller.sharer`."""
    forward_only: bool | None = None
    """True if a pass leaves its model as it was."""
    seed: int | None = None
    """Seed of the weights of a new model."""
    folder: str | None = None
    """Folder of the checkpoint that a path stood for, or of a version without a name."""
    digest: str | None = None
    """Digest of the checkpoint that a path stood for. None, too, where it has none."""
    lora_config: dict[str, Any] | None = None
    """Configuration of the checkpoint that a path stood for."""
    version: str | None = None
    """A version without a name, which goes on being written after its request is done."""
    saved_to: str | None = None
    """Folder of a named checkpoint. Once it is complete, its save is done."""
    refused: LoggedRefusal | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form of the log: what was chosen, nothing else."""
        has_checkpoint = self.lora_config is not None  # with or without a digest
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None or (name == "digest" and has_checkpoint)
        }

    @classmethod
    def from_json(cls, logged: dict[str, Any]) -> "Decisions":
        """Decisions in the log. Keys of later servers are left out: nothing here could follow them, and no row is
        written twice."""
        known = {name: logged[name] for name in _NAMES if name in logged}
        if (refused := known.get("refused")) is not None:
            known["refused"] = LoggedRefusal(refused["error"], refused["gradients"])
        return cls(**known)


_NAMES = [field.name for field in fields(Decisions)]


class DecisionsColumn(TypeDecorator[Decisions]):
    """A column of JSON that is read and written as `Decisions`."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Decisions | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else value.to_json()

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> Decisions | None:
        return None if value is None else Decisions.from_json(value)
