"""Verification that an engine serves our base model and applies our adapters, before it gets requests.

The engine generates a few tokens after a fixed prompt, and the backend's own sampler scores them. If the mean
difference of log-probabilities exceeds the bound, the engine serves other weights. The same check runs with a random
adapter for each group of modules. The adapter's weights are large enough to change the model's log-probabilities
clearly. The check also runs with the base model while such adapters occupy all slots, because vLLM 0.32 on CPUs then
applies the last slot's adapter to the base model. Finally, the check determines the engine's log-probability mode.

Engines are compared on one fixed prompt (`FixedPrompt`), with random test adapters (`Probes`).
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from skyrl.backends.common.versions import VersionPool
from skyrl.backends.engines.adapter_folder import PREFIX, Exports
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.continuation import rest
from skyrl.backends.engines.needs import BASE, BY_PLACE, GROUPS, PROCESSED, RAW, WHOLE, adapter_feature
from skyrl.backends.engines.protocol import (
    Admitted,
    Draw,
    Drawn,
    Engine,
    EngineDown,
    EngineFacts,
    EngineFailed,
    Mismatch,
    Refused,
)
from skyrl.backends.engines.reserved import ReservedEngine
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


log = logging.getLogger(__name__)

COPIES = 16
"""Minimum copies of an adapter that are loaded at the same time, to fill all adapter slots of an engine."""
CERTAIN = 1e-5
"""Log-probabilities closer to 0 count as certain."""

PROMPT, DRAWN = 16, 32
"""Tokens of the prompt, and tokens generated after it."""


class FixedPrompt:
    """The fixed prompt and comparisons based on it.

    Args:
        info: Facts about the backend.
        score: Scoring function of the backend's own sampler.
    """

    def __init__(self, info: BackendInfo, score: Score):
        self._info, self._score = info, score
        self._salts = count()
        length = min(PROMPT, info.max_context_length // 2)
        self._prompt = np.random.default_rng(0).integers(info.vocab_size, size=length).astype(np.int32)

    def draw(self, adapter: str | None = None, top_k: int = 0) -> Draw:
        """Request to an engine for a continuation of the fixed prompt."""
        return Draw(
            prompt=self._prompt,
            adapter=adapter,
            max_tokens=min(DRAWN, self._info.max_context_length - len(self._prompt) - 1),
            seed=1,
            temperature=1.0,
            top_k=top_k,
            salt=f"fixed prompt {next(self._salts)}",  # never matches cached prefixes
        )

    async def difference(self, drawn: Drawn, version: str | None) -> float:
        """Mean absolute difference, in nats, between an engine's log-probabilities and ours under a version."""
        return float(np.abs(drawn.logprobs - await self.scores(drawn, version)).mean())

    async def scores(self, drawn: Drawn, version: str | None) -> np.ndarray:
        """Log-probabilities that our own sampler computes for an engine's tokens, under a version."""
        scores = await self._score(version, np.concatenate([self._prompt, drawn.tokens]))
        return scores[len(self._prompt) - 1 :]


class Admission:
    """Checks engines before they are used.

    Args:
        options: Options, which include the bound.
        info: Facts about the backend.
        exports: Folder for adapters, and the versions in it.
        prompt: The fixed prompt.
        probes: Test adapters.
        base: Folder of the base model.
    """

    def __init__(
        self,
        options: EngineOptions,
        info: BackendInfo,
        exports: Exports[Any],
        prompt: FixedPrompt,
        probes: Probes[Any],
        base: Path,
    ):
        self._options, self._info, self._prompt, self._probes = options, info, prompt, probes
        self._exports, self._folder, self._base = exports, exports.folder, base

    async def __call__(self, engine: Engine) -> Admitted:
        """Check an engine. Raises `EngineDown`, `EngineFailed`, `Mismatch`."""
        try:
            facts = await engine.facts()
            if isinstance(engine, ReservedEngine):
                return await self._reserved(engine, facts)
            ours = [name for name in facts.adapters if name.startswith(PREFIX)]
            kept = [name for name in ours if name in self._folder][: engine.max_loras]
            for name in ours:
                if name not in kept:
                    await engine.unload_adapter(name)
            off = await self._prompt.difference(await engine.generate(self._prompt.draw()), None)
            features, difference = await self._features(engine, off, facts)
        except Refused as error:
            raise EngineFailed(f"sampling engine {engine.name} rejected a standard request: {error}") from error
        if facts.longest < self._info.max_context_length:
            log.warning(
                "sampling engine %s takes sequences of %d tokens, not of %d as we do: longer ones are sampled here; "
                "start it with a larger --max-model-len",
                *(engine.name, facts.longest, self._info.max_context_length),
            )
        engine.base_id = self._info.base_id  # verified above
        return Admitted(facts.longest, frozenset(features), kept, engine.base_id, difference)

    async def _reserved(self, engine: ReservedEngine, facts: EngineFacts) -> Admitted:
        """Admit an engine that is reserved for fully trained models, after restoring the base model's weights."""
        if await engine.base_version() not in ("", self._info.base_id):  # weights of a version, or partly replaced ones
            await engine.update_base(str(self._base))
        off = await self._prompt.difference(await engine.generate(self._prompt.draw()), None)
        if off > self._options.logprob_bound:
            raise self._mismatch(engine, off, facts)
        engine.base_id = self._info.base_id
        features = {WHOLE, await self._mode(engine)} | await self._seeds(engine)
        return Admitted(facts.longest, frozenset(features), [], engine.base_id, off)

    async def _features(self, engine: Engine, off: float, facts: EngineFacts) -> tuple[set[str], float]:
        """Return the engine's features, and the largest mean difference of log-probabilities among the passed checks.

        `off` is the mean difference that was measured for the engine's base model without adapters.
        """
        features, troubles, largest = set[str](), [], 0.0
        probes = await self._probes()
        for _, name in probes.values():
            await asyncio.wrap_future(self._exports.restored(name, verify=True))
        for group, (version, name) in probes.items():
            try:
                difference = await self._prompt.difference(await self._adapted(engine, name), version)
            except EngineDown:
                raise
            except (EngineFailed, Refused) as error:
                troubles.append(f"adapters on {group}: {error}")
                continue
            if difference <= self._options.logprob_bound:
                features.add(adapter_feature(group))
                largest = max(largest, difference)
            else:
                troubles.append(f"adapters on {group}: log-probabilities differ by {difference:.3g} on average")
        well = off <= self._options.logprob_bound
        if not features:
            if not well:
                raise self._mismatch(engine, off, facts)
            raise EngineFailed(f"sampling engine {engine.name} did not apply any test adapter: {'; '.join(troubles)}")
        if well:
            last = next(name for group, (_, name) in reversed(probes.items()) if adapter_feature(group) in features)
            off = await self._prompt.difference(await self._base_beside(engine, last), None)
        if off <= self._options.logprob_bound:
            features.add(BASE)
            largest = max(largest, off)
        else:
            troubles.append(f"the base model beside adapters: log-probabilities differ by {off:.3g} on average")
        for trouble in troubles:
            log.warning("sampling engine %s: %s; such samples are drawn here", engine.name, trouble)
        return features | {await self._mode(engine)} | await self._seeds(engine), largest

    async def _adapted(self, engine: Engine, name: str) -> Drawn:
        try:
            await engine.load_adapter(name, self._folder.path(name))
            return await engine.generate(self._prompt.draw(adapter=name))
        finally:
            await engine.unload_adapter(name)

    def _mismatch(self, engine: Engine, off: float, facts: EngineFacts) -> Mismatch:
        ours = self._info.base_model
        causes = "another --dtype, quantization, --hf-overrides, or a --logprobs-mode of logits"
        same = Path(facts.root).name == Path(ours).name
        here = f"other weights of that name, another safetensors file in its folder, {causes}"
        causes = here if same else f"it is another model ({facts.root})"
        return Mismatch(
            f"sampling engine {engine.name} serves {facts.root}, whose log-probabilities differ from those of {ours} "
            f"here by {off:.3g} on average, past the bound of {self._options.logprob_bound:g}, with adapters too; "
            f"likely {causes}. Serve the same weights there, or raise engines.logprob_bound"
        )

    async def _mode(self, engine: Engine) -> str:
        """Log-probability mode of the engine, determined from a sample with top_k=1.

        If the engine computes log-probabilities after filtering, the tokens of this sample have log-probability 0.
        """
        drawn = await engine.generate(self._prompt.draw(top_k=1))
        ours = await self._prompt.scores(drawn, None)
        certain = np.abs(drawn.logprobs).max() < CERTAIN < np.abs(ours).max()
        return PROCESSED if certain else RAW

    async def _seeds(self, engine: Engine) -> set[str]:
        """`{BY_PLACE}` if the engine reproduces the second half of a sample from the same seed, otherwise empty."""
        whole = self._prompt.draw()
        drawn = await engine.generate(whole)
        half = dataclasses.replace(drawn, tokens=drawn.tokens[: len(drawn.tokens) // 2])
        again = await engine.generate(rest(whole, half, keeps_seed=True))
        return {BY_PLACE} if np.array_equal(again.tokens, drawn.tokens[len(half.tokens) :]) else set()

    async def _base_beside(self, engine: Engine, name: str) -> Drawn:
        """Sample the base model while copies of an adapter fill all slots and are sampled too."""
        copies = [f"{name}-{number}" for number in range(max(COPIES, engine.max_loras))]
        try:
            for copy in copies:
                await engine.load_adapter(copy, self._folder.path(name))
            beside = [engine.generate(self._prompt.draw(adapter=copy)) for copy in copies[-engine.max_loras :]]
            base, *_ = await asyncio.gather(engine.generate(self._prompt.draw()), *beside)
            return base
        finally:
            for copy in copies:
                await engine.unload_adapter(copy)
