"""Comparison of an engine's copy of a version with ours, before the version's first sample on that engine.

The engine generates tokens, and the backend's own sampler scores them.

This detects failures in the delivery of an adapter, such as silent load errors, slots with another adapter's weights
and corrupted files, before they reach training data.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, TypeVar

from skyrl.backends.common.versions import VersionPool
from skyrl.backends.engines.adapter_folder import Exports
from skyrl.backends.engines.admission import FixedPrompt
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.protocol import Admitted, Engine, EngineDown, EngineFailed, Mismatch
from skyrl.backends.engines.router import Ticket

log = logging.getLogger(__name__)

Version = TypeVar("Version")
Check = Callable[[Engine, Ticket, Admitted], Awaitable[None]]
"""Compares the version of a sample on an engine with ours. Raises `Mismatch` or the errors of `Engine.generate`."""
Restore = Callable[[str, bool], Awaitable[bool]]
"""Writes the folder of an adapter again if files are missing or, if the second argument is True, damaged. Returns True
if it wrote the folder. Raises `StorageError`."""

TIMES = 10
"""Allowed difference of a version, as a multiple of the difference measured at admission."""
LEAST = 1e-3
"""Minimum bound, in nats."""


async def nothing_restored(adapter: str, verify: bool) -> bool:
    """Leave the folder of an adapter as it is."""
    return False


class SyncCheck(Generic[Version]):
    """Compares versions on engines with ours.

    Args:
        options: Options, which include the bound.
        prompt: The fixed prompt.
        exports: Maps names on engines to versions.
        versions: Pool to which versions are published for our own sampler.
    """

    def __init__(
        self, options: EngineOptions, prompt: FixedPrompt, exports: Exports[Version], versions: VersionPool[Version]
    ):
        self._options, self._prompt, self._exports, self._versions = options, prompt, exports, versions
        self._numbers = count()

    def bound(self, admitted: Admitted) -> float:
        """Largest accepted mean difference, in nats, between log-probabilities of an engine's version and ours."""
        if self._options.sync_logprob_bound is not None:
            return self._options.sync_logprob_bound
        return min(max(TIMES * admitted.difference, LEAST), self._options.logprob_bound)

    async def __call__(self, engine: Engine, ticket: Ticket, admitted: Admitted) -> None:
        """Compare the version that a sample needs. Raises `Mismatch` or the errors of `Engine.generate`."""
        if ticket.adapter is None:
            drawn = await engine.generate(self._prompt.draw())
            self._compare(engine, ticket, admitted, await self._prompt.difference(drawn, None))
            return
        version = self._exports.version(ticket.adapter)
        if version is None:
            raise EngineFailed(f"version={ticket.request.version} is not in memory any more: its requests are gone")
        name = f"check {next(self._numbers)} of {ticket.adapter}"
        self._versions.publish(name, version)
        try:
            drawn = await engine.generate(self._prompt.draw(ticket.adapter))
            difference = await self._prompt.difference(drawn, name)
        finally:
            self._versions.drop(name)
        self._compare(engine, ticket, admitted, difference)

    def _compare(self, engine: Engine, ticket: Ticket, admitted: Admitted, difference: float) -> None:
        bound = self.bound(admitted)
        if not difference <= bound:
            raise Mismatch(
                f"sampling engine {engine.name} draws from version={ticket.request.version} ({ticket.adapter}) with "
                f"log-probabilities that differ from ours by {difference:.3g} on average, past the bound of "
                f"{bound:.3g}; it has other weights under that name; if they are the same, raise "
                "engines.sync_logprob_bound"
            )


class Checks:
    """Results of comparisons. A version is compared once on an engine, as long as it stays loaded there.

    Args:
        check: Compares one version.
        path: Returns the folder of an adapter.
        restore: Restores the folder of an adapter.
    """

    def __init__(self, check: Check, path: Callable[[str], str], restore: Restore = nothing_restored):
        self._check, self._path, self._restore = check, path, restore
        self._begun: dict[tuple[str, str | None], asyncio.Task[None]] = {}
        """Tasks by engine and adapter."""
        self._woken: set[str] = set()
        """Engines whose base model has to be compared again, after sleeping."""

    async def passed(self, engine: Engine, ticket: Ticket, admitted: Admitted) -> None:
        """Wait for the comparison of a sample's version on its engine. Raises the errors of `Check`; the next call then
        retries."""
        if ticket.adapter is None and engine.name not in self._woken:  # compared at admission
            return
        key = engine.name, ticket.adapter
        if key not in self._begun:
            self._begun[key] = asyncio.create_task(self._compare(engine, ticket, ticket.adapter, admitted))
        await asyncio.shield(self._begun[key])

    def forget(self, engine: str, adapter: str | None = None, woken: bool = False) -> None:
        """Drop the result for one adapter of an engine, or for all its adapters (None).

        `woken` is True if the engine slept, so that its base model is compared again, too.
        """
        if adapter is None:
            (self._woken.add if woken else self._woken.discard)(engine)
        for key in [key for key in self._begun if key[0] == engine and adapter in (None, key[1])]:
            self._begun.pop(key).cancel()

    async def _compare(self, engine: Engine, ticket: Ticket, adapter: str | None, admitted: Admitted) -> None:
        """Compare a version. On a mismatch, reload it, from new files if its files are damaged, and compare again."""
        try:
            try:
                await self._check(engine, ticket, admitted)
            except Mismatch as error:
                if adapter is None:
                    raise EngineDown(str(error)) from error  # the engine has to be admitted again
                log.error("%s", error)
                await self._restore(adapter, True)
                await engine.unload_adapter(adapter)
                await engine.load_adapter(adapter, self._path(adapter))
                await self._check(engine, ticket, admitted)
        except Exception:
            self._begun.pop((engine.name, adapter), None)
            raise
