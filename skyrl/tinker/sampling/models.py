"""Models by their names in requests: the base model, its aliases, and checkpoints by their paths."""

from dataclasses import dataclass

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.context import Service
from skyrl.tinker.database.tables import CheckpointRow
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import SCHEME, TinkerPath
from skyrl.tinker.sampling.samplers import checkpoint_to_sample


@dataclass(frozen=True)
class NamedModel:
    """A model that a request names. `checkpoint` is None for the base model."""

    name: str
    path: TinkerPath | None = None
    checkpoint: CheckpointRow | None = None

    @property
    def source(self) -> str:
        """Text that differs for different weights, also if a later save has replaced those at the same path."""
        return "" if self.checkpoint is None else f"{self.path} {self.checkpoint.version}"


async def find_model(service: Service, caller: Caller, name: str) -> NamedModel:
    """Find the model with a name: a name of the base model, tinker://MODEL/sampler_weights/NAME, or both with a
    semicolon between them.

    Raises:
        UnknownName: There is no such model.
        RequestError: It cannot be sampled here.
    """
    base, semicolon, path = ("", "", name) if name.startswith(SCHEME) else name.partition(";")
    names = service.served_names()
    if base and base not in names:
        raise UnknownName(
            f"model={name[:300]!r} is not served here; use one of: {', '.join(names)}, or the path of a checkpoint for "
            "sampling (tinker://MODEL/sampler_weights/NAME)"
        )
    if base and not semicolon:
        return NamedModel(name)
    try:
        where = TinkerPath.parse("model", path)
    except RequestError as error:
        raise UnknownName(str(error)) from error
    return NamedModel(name, where, await checkpoint_to_sample(service, "model", where, caller))
