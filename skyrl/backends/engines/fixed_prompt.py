"""Samples of one fixed prompt that an engine draws and the backend's own sampler scores: how far apart the two are."""

from itertools import count

import numpy as np

from skyrl.backends.engines.probes import Score
from skyrl.backends.engines.protocol import Draw, Drawn
from skyrl.types import BackendInfo

PROMPT, DRAWN = 16, 32
"""Tokens of the prompt, and those that are drawn after it."""


class FixedPrompt:
    """The prompt, and comparisons with it.

    Args:
        info: Facts about the backend.
        score: The backend's own sampler.
    """

    def __init__(self, info: BackendInfo, score: Score):
        self._info, self._score = info, score
        self._salts = count()
        length = min(PROMPT, info.max_context_length // 2)
        self._prompt = np.random.default_rng(0).integers(info.vocab_size, size=length).astype(np.int32)

    def draw(self, adapter: str | None = None, top_k: int = 0) -> Draw:
        """Request to an engine."""
        return Draw(
            prompt=self._prompt,
            adapter=adapter,
            max_tokens=min(DRAWN, self._info.max_context_length - len(self._prompt) - 1),
            seed=1,
            temperature=1.0,
            top_k=top_k,
            salt=f"fixed prompt {next(self._salts)}",  # nothing is left over from before
        )

    async def difference(self, drawn: Drawn, version: str | None) -> float:
        """Mean difference of an engine's log-probabilities from those of a version here, in nats."""
        return float(np.abs(drawn.logprobs - await self.scores(drawn, version)).mean())

    async def scores(self, drawn: Drawn, version: str | None) -> np.ndarray:
        """Log-probabilities here of what an engine has drawn."""
        scores = await self._score(version, np.concatenate([self._prompt, drawn.tokens]))
        return scores[len(self._prompt) - 1 :]
