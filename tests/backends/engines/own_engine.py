"""A backend's own sampler as an `Engine`, so that the cases of engines are its cases too."""

import asyncio
import dataclasses
from itertools import count
from typing import Literal

import numpy as np

from skyrl.backends.engines.protocol import Draw, Drawn, Engine, EngineFacts, EngineFailed, Refused
from skyrl.backends.executor import Executor
from skyrl.backends.operations import Sample
from skyrl.types import ErrorResponse, Result, SampleOutput, SamplingParams


class OwnEngine(Engine):
    """Draws by stepping the backend; versions are read from the folders of adapters."""

    max_requests, max_loras, max_logprobs = 32, 4, 20

    def __init__(self, backend: Executor):
        self.name = "own"
        self.backend = backend
        self.base_id = backend.info().base_id
        self.paths: dict[str, str] = {}
        self._numbers = count()
        self._results: dict[str, Result] = {}

    async def facts(self) -> EngineFacts:
        info = self.backend.info()
        return EngineFacts(info.base_model, info.base_model, info.max_context_length, "own", dict(self.paths))

    async def health(self) -> None: ...

    async def load_adapter(self, name: str, path: str) -> None:
        self.paths[name] = path

    async def unload_adapter(self, name: str) -> None:
        self.paths.pop(name, None)
        self.backend.drop_version(name)

    async def generate(self, draw: Draw, pieces: list[Drawn] | None = None) -> Drawn:
        if len(draw.prompt) + draw.max_tokens > self.backend.info().max_context_length:
            raise Refused("too long")  # which the doors of a backend see to
        params = SamplingParams(
            max_tokens=draw.max_tokens,
            seed=draw.seed,
            temperature=draw.temperature,
            top_k=draw.top_k,
            top_p=draw.top_p,
            stop=[],
        )
        request = Sample(
            request_id=f"own {next(self._numbers)}",
            tenant=draw.salt,
            version=draw.adapter,
            path=None if draw.adapter is None else self.paths.get(draw.adapter),
            prompt=draw.prompt,
            params=params,
            options=dataclasses.replace(draw.options, stop_token_ids=draw.stop_ids),
            topk_sample_logprobs=draw.top,
        )
        self.backend.submit(request)
        try:
            while request.request_id not in self._results:
                for completion in self.backend.step():
                    self._results[completion.request_id] = completion.result
                await asyncio.sleep(0)
        finally:
            self.backend.cancel(request.request_id)
        return self._drawn(self._results.pop(request.request_id))

    def _drawn(self, result: object) -> Drawn:
        if isinstance(result, ErrorResponse):
            raise EngineFailed(result.error)
        assert isinstance(result, SampleOutput)
        (sequence,) = result.sequences
        tokens = np.asarray(sequence.tokens)
        stopped = sequence.stop_reason == "stop"
        return Drawn(tokens, sequence.logprobs, stopped, sequence.topk_logprobs, origins=sequence.origins)

    async def update_base(self, path: str) -> None:
        raise EngineFailed("a backend trains its base itself")

    async def base_version(self) -> str:
        return self.base_id

    async def pause(self, mode: Literal["abort", "wait", "keep"]) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self, level: Literal[1, 2] = 1) -> None: ...
    async def wake(self) -> None: ...
    async def reset_prefix_cache(self) -> None: ...
    async def close(self) -> None: ...
