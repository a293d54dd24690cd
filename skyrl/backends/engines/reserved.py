"""Engines reserved for fully trained models: each serves one version at a time, as its base weights.

The fleet treats such a version as an adapter, and the engine as having one adapter slot: a version waits for the slot,
is evicted when it has no more samples, and is compared with our weights before its first sample. Loading it replaces
the engine's base weights with the version's folder. Before each sample, the engine reports its current weights, which
reveals restarts.
"""

import dataclasses
from typing import Literal

from skyrl.backends.engines.protocol import AdapterMissing, Draw, Drawn, Engine, EngineFacts, EngineFailed, Refused


class _Stamped(list[Drawn]):
    """List of pieces of a sample that also appends each piece, with its origin rewritten, to another list."""

    def __init__(self, pieces: list[Drawn], stamp: "Stamp"):
        super().__init__()
        self._pieces, self._stamp = pieces, stamp

    def append(self, piece: Drawn) -> None:
        super().append(piece)
        self._pieces.append(self._stamp(piece))


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Rewrites the origins of tokens, so that they name the version instead of the engine's base weights."""

    base_id: str
    """Expected content id of the engine's base weights."""
    version: str | None
    of: str
    """Content id of the base model from which the version was trained."""

    def __call__(self, drawn: Drawn) -> Drawn:
        origins = tuple(
            dataclasses.replace(origin, version=self.version, base=self.of)
            if (origin.version, origin.base) == (None, self.base_id)
            else origin
            for origin in drawn.origins
        )
        return dataclasses.replace(drawn, origins=origins)


class ReservedEngine(Engine):
    """An engine whose base weights are replaced by one version after another."""

    max_loras = 1

    def __init__(self, engine: Engine):
        self._engine = engine
        self.name, self.max_requests, self.max_logprobs = engine.name, engine.max_requests, engine.max_logprobs
        self._held: str | None = None
        """Its current version; None: the base model."""
        self._whole = False
        """False while weights are replaced, after a replacement failed, and after the version was unloaded."""

    async def facts(self) -> EngineFacts:
        facts = await self._engine.facts()
        self._held, self._whole = None, True
        return dataclasses.replace(facts, adapters={})

    async def health(self) -> None:
        await self._engine.health()

    async def generate(self, draw: Draw, pieces: list[Drawn] | None = None) -> Drawn:
        if draw.adapter != self._held or not self._whole:
            raise AdapterMissing(f"{self.name} does not have {draw.adapter or 'the base model'}")
        if draw.adapter is not None and (told := await self.base_version()) != self._engine.base_id:
            raise AdapterMissing(f"{self.name} has other weights ({told}) than those of {draw.adapter}")
        stamp = Stamp(self._engine.base_id, self._held, self.base_id)
        kept = _Stamped([] if pieces is None else pieces, stamp)
        return stamp(await self._engine.generate(dataclasses.replace(draw, adapter=None), kept))

    async def load_adapter(self, name: str, path: str) -> None:
        if (self._held, self._whole) != (name, True):
            await self._replace(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Mark the version as unloaded. Its weights stay on the engine until the next replacement."""
        self._whole = self._whole and self._held != name

    async def update_base(self, path: str) -> None:
        await self._replace(None, path)

    async def _replace(self, name: str | None, path: str) -> None:
        self._whole = False
        try:
            await self._engine.update_base(path)
        except Refused as error:
            raise EngineFailed(f"{self.name} refuses the weights of {path}: {error}") from error
        self._held, self._whole = name, True

    async def base_version(self) -> str:
        return await self._engine.base_version()

    async def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        await self._engine.sleep(level)

    async def wake(self) -> None:
        await self._engine.wake()

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        await self._engine.close()
