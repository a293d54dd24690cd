"""Random test adapters, one for each group of modules."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import numpy as np

from skyrl.backends.common.versions import VersionPool
from skyrl.backends.engines.adapter_folder import Exports
from skyrl.backends.engines.needs import GROUPS
from skyrl.errors import RequestError
from skyrl.types import BackendInfo, LoraConfig

Version = TypeVar("Version")
Score = Callable[[str | None, np.ndarray], Awaitable[np.ndarray]]
"""Scoring function: float32 log-probabilities of all tokens after the first, under a version (None: base model)."""

FARTHER = 5
"""Minimum mean difference of log-probabilities between a probe and the base model, as a multiple of the bound. An
engine that does not apply the probe is then detected."""
FIRST_SCALE, LARGEST_SCALE = 0.05, 10.0
"""First and largest standard deviation of a probe's weights. The deviation is doubled until the probe is far from the
base model.
"""
TOKENS = 48
"""Number of tokens on which the difference from the base model is measured."""


class Probes(Generic[Version]):
    """Test adapters of a backend, created on first use and kept.

    Args:
        make: Returns a deterministic random adapter with this configuration and standard deviation of weights.
        exports: Writes the adapters.
        versions: Pool that the adapters are published to.
        score: Scoring function of the backend's own sampler.
        info: Facts about the backend.
        bound: Allowed mean difference, in nats, between log-probabilities of an engine and ours.
    """

    def __init__(
        self,
        make: Callable[[LoraConfig, float], Version],
        exports: Exports[Version],
        versions: VersionPool[Version],
        score: Score,
        info: BackendInfo,
        bound: float,
    ):
        self._make, self._exports, self._versions, self._score = make, exports, versions, score
        self._info, self._bound = info, bound
        self._made: asyncio.Task[dict[str, tuple[str, str]]] | None = None

    async def __call__(self) -> dict[str, tuple[str, str]]:
        """Return the probe of each group: (id of the version in memory, name of the adapter in the folder)."""
        if self._made is None or (self._made.done() and self._made.exception() is not None):
            self._made = asyncio.create_task(self._make_all())
        return await asyncio.shield(self._made)

    async def _make_all(self) -> dict[str, tuple[str, str]]:
        made = {}
        for group in GROUPS:
            parts: dict[str, Any] = {f"train_{other}": other == group for other in GROUPS}
            config = LoraConfig(rank=self._info.max_lora_rank, **parts)
            try:
                made[group] = await self._probe(f"probe of {group}", config)
            except RequestError:  # the model has no such modules
                continue
        return made

    async def _probe(self, name: str, config: LoraConfig) -> tuple[str, str]:
        count = min(TOKENS, self._info.max_context_length - 1)
        tokens = np.random.default_rng(1).integers(self._info.vocab_size, size=count).astype(np.int32)
        scale = FIRST_SCALE
        base = await self._score(None, tokens)
        while True:
            version = await asyncio.to_thread(self._make, config, scale)
            self._versions.publish(name, version)
            adapted = await self._score(name, tokens)
            if np.abs(adapted - base).mean() > FARTHER * self._bound or scale >= LARGEST_SCALE:
                return name, await asyncio.wrap_future(self._exports.pinned(version))
            scale *= 2
