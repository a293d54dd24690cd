"""Prompts that are being read: whose turn it is, and who waits for what another is about to read.

A prompt waits for one that came before it if they begin alike. Which one shares most with it, and how much, is found
once, when it arrives: among the prompts of its owner in the order of their tokens, those next to it share most.
"""

from bisect import bisect
from collections import deque
from collections.abc import Hashable, Iterator

from skyrl.backends.common.page_table import common_prefix
from skyrl.backends.common.sampling.prefill import Prompt


class PrefillQueue:
    """Prompts that are not read yet, in the order of their turns."""

    def __init__(self) -> None:
        self._turns: deque[Prompt] = deque()
        self._sorted: dict[Hashable, list[tuple[bytes, Prompt]]] = {}
        """By owner, in the order of their tokens."""
        self._ahead: dict[Prompt, tuple[Prompt, int] | None] = {}
        """Longest common prefix of each prompt with an earlier one: that prompt, and the number of tokens."""

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._turns)

    def append(self, prompt: Prompt) -> None:
        """Add a prompt; its turn is the last."""
        key = prompt.tokens.tobytes()  # any order does in which those that begin alike are neighbours
        alike = self._sorted.setdefault(prompt.owner, [])
        place = bisect(alike, key, key=lambda other: other[0])
        neighbours = [other for _, other in alike[max(0, place - 1) : place + 1]]
        shared = [(other, common_prefix(prompt.tokens, other.tokens)) for other in neighbours]
        self._ahead[prompt] = max(shared, key=lambda found: found[1], default=None)
        alike.insert(place, (key, prompt))
        self._turns.append(prompt)

    def remove(self, prompt: Prompt) -> None:
        self._turns.remove(prompt)
        del self._ahead[prompt]
        alike = [entry for entry in self._sorted.pop(prompt.owner) if entry[1] is not prompt]
        if alike:
            self._sorted[prompt.owner] = alike

    def end_turn(self, prompt: Prompt) -> None:
        """Its next turn is the last."""
        self._turns.remove(prompt)
        self._turns.append(prompt)

    def next(self, tokens: int) -> list[Prompt]:
        """The first prompt in turn that does not wait for another, and those that are read together with it.

        Args:
            tokens: Of all of them at most, which are of one version then; 0: one prompt alone.
        """
        found: list[Prompt] = []
        for prompt in self._turns:
            if self._waits(prompt):
                continue
            tokens -= prompt.next_size
            if found and (tokens < 0 or prompt.job.slot != found[0].job.slot):
                break
            found.append(prompt)
        return found

    def _waits(self, prompt: Prompt) -> bool:
        ahead = self._ahead[prompt]
        return ahead is not None and ahead[0] in self._ahead and prompt.waits_for(*ahead)
