"""Engines that sampled recent prompts, so that the next turn of a conversation goes to the engine that has its prefix.

The prompt of a turn begins with the whole prompt of an earlier turn. So only whole prompts are recorded, and a prompt
belongs to the longest recorded prompt that it begins with. Conversations that have only a system prompt in common may
go to different engines.
"""

import bisect
from collections import Counter, OrderedDict
from hashlib import blake2b

import numpy as np

MOST = 4096
"""Number of recorded prompts. The least recently used are forgotten."""


class RecentPrompts:
    """Recorded prompts and their engines."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._engines: OrderedDict[int, str] = OrderedDict()
        """Engine by hash of context and prompt."""
        self._lengths: dict[int, int] = {}
        """Length of each recorded prompt, by hash."""
        self._counts: Counter[int] = Counter()
        self._sorted: list[int] = []
        """Lengths of recorded prompts, ascending."""
        self._factors = np.zeros(0, np.uint64)
        """Random factor of each position of a prompt, for its hash."""

    def hashes(self, context: bytes, prompt: np.ndarray) -> np.ndarray:
        """Hash of each prefix of a prompt, uint64 `[prompt]`. Prompts of different contexts have nothing in common."""
        if len(prompt) > len(self._factors):
            numbers = np.random.default_rng(0)
            self._factors = numbers.integers(2**64, size=2 * len(prompt), dtype=np.uint64, endpoint=False)
        salt = np.uint64(int.from_bytes(blake2b(context, digest_size=8).digest()))
        return np.cumsum((prompt.astype(np.uint64) + np.uint64(1)) * self._factors[: len(prompt)]) ^ salt

    def begin_of(self, hashes: np.ndarray) -> int | None:
        """Hash of the longest recorded prompt that the prompt with these hashes begins with; None if there is none."""
        lengths = self._sorted[: bisect.bisect_right(self._sorted, len(hashes))]
        candidates = hashes[np.asarray(lengths, np.int64) - 1].tolist()
        return next((one for one in reversed(candidates) if one in self._engines), None)

    def engine(self, begin: int) -> str | None:
        """Engine of a recorded prompt, by its hash; None if it was forgotten."""
        return self._engines.get(begin)

    def record(self, hashes: np.ndarray, begin: int | None, engine: str) -> None:
        """Record the engine of a prompt, and of the recorded prompt that it begins with (hash `begin`), if any."""
        if begin in self._engines:
            self._engines[begin] = engine
            self._engines.move_to_end(begin)
        whole = int(hashes[-1])
        if whole not in self._engines:
            self._lengths[whole] = length = len(hashes)
            self._counts[length] += 1
            if self._counts[length] == 1:
                bisect.insort(self._sorted, length)
        self._engines[whole] = engine
        self._engines.move_to_end(whole)
        if len(self._engines) > self._most:
            self._forget(self._engines.popitem(last=False)[0])

    def _forget(self, whole: int) -> None:
        length = self._lengths.pop(whole)
        self._counts[length] -= 1
        if not self._counts[length]:
            del self._counts[length], self._sorted[bisect.bisect_left(self._sorted, length)]
