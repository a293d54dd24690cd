"""A sampling engine for tests: slots, eviction, pauses, sleep and faults of its own, in this process or behind HTTP.

Adapters that are loaded but in no slot are read from disk again when they are sampled, as vLLM does.
"""

import asyncio
import os
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from skyrl.backends.base_id import base_id
from skyrl.backends.engines.continuation import together
from skyrl.backends.engines.protocol import (
    AdapterMissing,
    Draw,
    Drawn,
    Engine,
    EngineDown,
    EngineFacts,
    EngineFailed,
    Refused,
)
from skyrl.types import Origin
from tests.backends.engines.numpy_models import Adapter, Model, NumpyQwen3, log_softmax, softmax

Fault = Literal["die", "hang", "refuse", "reset", "mixed", "silent"]
MODES = ("raw", "processed")


@dataclass
class Sizes:
    max_loras: int = 2
    max_lora_rank: int = 8
    longest: int = 256
    unembed: Literal["adapted", "refused", "ignored"] = "adapted"
    """Treatment of adapters on lm_head."""
    wraps: bool = False
    """True if the last slot's adapter is taken for none, as vLLM 0.32 does on CPUs."""
    mode: str = "raw"
    token_s: float = 0.0
    """Seconds for each token."""
    sleeps: bool = True
    """False: it has no sleep mode."""
    keeps: bool = False
    """True if it says that it has replaced its weights, and has not."""
    by_place: bool = True
    """True if a token is drawn by seed and place alone."""


class PretendEngine(Engine):
    """An engine in this process. `fault` is what becomes of the next samples."""

    def __init__(self, name: str, model: Model, base: str = "base", sizes: Sizes | None = None, max_requests: int = 8):
        self.name, self._first, self.base = name, model, base
        self.sizes = sizes or Sizes()
        self.max_requests, self.max_loras, self.max_logprobs = max_requests, self.sizes.max_loras, 20
        self.fault: Fault | None = None
        self.after = 0
        """Tokens of a sample after which it dies, where that is the fault."""
        self.most_at_once = 0
        """Sequences that were drawn at the same time at most."""
        self.most_adapters = 0
        self.restart()

    def restart(self) -> None:
        """Forget everything that is not on disk."""
        self.model, self.weight_version, self.reloads, self.naps = self._first, "default", 0, 0
        self.fingerprint = uuid4().hex
        self.registered: dict[str, str] = {}
        self.slots: OrderedDict[str, Adapter] = OrderedDict()
        self.loads = self.drawn = self.running = self.tokens = 0
        self.awake, self.dead = asyncio.Event(), False
        self.awake.set()
        self.sleeping: int | None = None
        self.paused = False

    async def facts(self) -> EngineFacts:
        self._check()
        return EngineFacts(self.base, self.base, self.sizes.longest, "pretend", dict(self.registered))

    async def health(self) -> None:
        self._check()

    async def load_adapter(self, name: str, path: str) -> None:
        self._check()
        if name in self.registered:
            return
        self._read(name, path)
        self.registered[name] = path
        self.most_adapters = max(self.most_adapters, len(self.registered))

    async def unload_adapter(self, name: str) -> None:
        self._check()
        self.registered.pop(name, None)

    async def generate(self, draw: Draw, pieces: list[Drawn] | None = None) -> Drawn:
        self._check()
        fault = self.fault
        if fault == "refuse":
            raise EngineFailed(f"{self.name} refuses")
        if fault == "hang":
            await asyncio.Event().wait()
        if self.sleeping is not None:
            raise EngineFailed(f"{self.name} is asleep")
        if len(draw.prompt) + draw.max_tokens > self.sizes.longest:
            raise Refused(f"{len(draw.prompt)} + {draw.max_tokens} tokens are above {self.sizes.longest}")
        told, adapter = draw.adapter, None if draw.adapter is None else self._adapter(draw.adapter)
        if fault in ("mixed", "silent"):
            other, adapter = next((held for held in self.slots.items() if held[0] != told), (None, None))
            told = other if fault == "mixed" else told
        if adapter is None and self.sizes.wraps and len(self.slots) == self.sizes.max_loras:
            adapter = next(reversed(self.slots.values()))
        incarnation = self.fingerprint
        self.running += 1
        self.drawn += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            pieces = [] if pieces is None else pieces
            return await self._draw(draw, adapter, pieces, (Origin(0, told, self.base_id, self.name),))
        finally:
            if self.fingerprint == incarnation:
                self.running -= 1

    async def _draw(
        self, draw: Draw, adapter: Adapter | None, pieces: list[Drawn], origins: tuple[Origin, ...]
    ) -> Drawn:
        numbers = np.random.default_rng(draw.seed)
        tokens = list(draw.prompt)
        incarnation, before = self.fingerprint, len(tokens)
        while len(tokens) - before < draw.max_tokens:
            await self.awake.wait()
            await asyncio.sleep(self.sizes.token_s)
            dies = self.fault == "die" and len(tokens) - before >= self.after
            if dies or self.dead or self.fingerprint != incarnation:
                self.dead = self.dead or dies
                raise EngineDown(f"{self.name} has died")
            logits = self.model.logits(np.asarray(tokens), adapter)
            kept = self._kept(logits, draw, tokens[before:])
            greedy = draw.temperature == 0
            if self.sizes.by_place:
                numbers = np.random.default_rng([draw.seed, len(tokens)])
            token = int(kept.argmax()) if greedy else int(numbers.choice(len(kept), p=softmax(kept.astype(np.float64))))
            told = log_softmax(kept if self.sizes.mode == "processed" else logits)
            best = np.argsort(-told, kind="stable")[: draw.top]
            table = (best[None].astype(np.int32), told[best][None].astype(np.float32)) if draw.top else None
            tokens.append(token)
            self.tokens += 1
            own = np.asarray([token], np.int32), np.asarray([told[token]], np.float32)
            pieces.append(Drawn(*own, False, table, origins=origins))
            if token in draw.stop_ids and len(tokens) - before > draw.options.min_tokens:
                break
        return replace(together(pieces), stopped=tokens[-1] in draw.stop_ids)

    def _kept(self, logits: np.ndarray, draw: Draw, drawn: list[int]) -> np.ndarray:
        """Logits after temperature, filters and what must not stop yet."""
        kept = logits.astype(np.float64) / (draw.temperature or 1.0)
        if len(drawn) < draw.options.min_tokens:
            kept[list(draw.stop_ids)] = -np.inf
        order = np.argsort(-kept, kind="stable")
        if draw.top_k:
            kept[order[draw.top_k :]] = -np.inf
        share = softmax(kept)
        if draw.options.min_p:
            kept[share < draw.options.min_p * share.max()] = -np.inf
        if draw.top_p < 1:
            kept[order[1:][np.cumsum(share[order])[:-1] >= draw.top_p]] = -np.inf
        return kept

    def _adapter(self, name: str) -> Adapter:
        if name not in self.registered:
            raise AdapterMissing(f"The model `{name}` does not exist")
        if name not in self.slots:
            self._read(name, self.registered[name])
        self.slots.move_to_end(name)
        return self.slots[name]

    def _read(self, name: str, path: str) -> None:
        if not os.path.isdir(path):
            raise EngineFailed(f"No adapter found for {path}")
        adapter = Adapter(path)
        if adapter.rank > self.sizes.max_lora_rank:
            raise EngineFailed(f"LoRA rank {adapter.rank} is greater than max_lora_rank {self.sizes.max_lora_rank}")
        heads = [tensor for tensor in adapter.tensors if ".lm_head." in tensor]
        if heads and self.sizes.unembed == "refused":
            raise EngineFailed(f"{heads} are not supported LoRA target modules")
        if self.sizes.unembed == "ignored":
            adapter.tensors = {tensor: x for tensor, x in adapter.tensors.items() if tensor not in heads}
        self.loads += 1
        self.slots[name] = adapter
        while len(self.slots) > self.sizes.max_loras:
            self.slots.popitem(last=False)

    def _check(self) -> None:
        if self.dead:
            raise EngineDown(f"{self.name} is dead")

    async def update_base(self, path: str) -> None:
        await self.reload(path)
        self.base_id = self.weight_version = base_id(Path(path))

    async def reload(self, path: str) -> None:
        self.reloads += 1
        assert not self.running, "a sample would be of two versions"
        if not self.sizes.keeps:
            self.model = NumpyQwen3(Path(path))

    async def base_version(self) -> str:
        return "" if self.weight_version == "default" else self.weight_version

    async def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        self.awake.clear()
        self.paused = True

    async def resume(self) -> None:
        self.paused = False
        self.awake.set()

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        if not self.sizes.sleeps:
            raise EngineFailed(f"{self.name} was started without --enable-sleep-mode")
        assert not self.running, "samples would be lost"
        self.sleeping, self.naps = level, self.naps + 1

    async def wake(self) -> None:
        self.sleeping = None

    async def reset_prefix_cache(self) -> None:
        self._check()

    async def close(self) -> None: ...


def facts_of(engine: PretendEngine) -> dict[str, Any]:
    """Return the facts about an engine that tests may ask for."""
    return {
        "most_at_once": engine.most_at_once,
        "most_adapters": engine.most_adapters,
        "loads": engine.loads,
        "drawn": engine.drawn,
        "tokens": engine.tokens,
        "running": engine.running,
        "naps": engine.naps,
        "reloads": engine.reloads,
        "weights": engine.weight_version,
        "sleeping": engine.sleeping,
        "paused": engine.paused,
    }
