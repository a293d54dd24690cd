"""Queue of prompts in prefill: round-robin order, and prompts that wait for a shared prefix.

A prompt waits while an earlier prompt is about to read a prefix that both share. The earlier prompt with the longest
common prefix is determined once, on arrival. It is one of the neighbors in the sorted list of the owner's prompts.
"""

from bisect import bisect
from collections import deque
from collections.abc import Hashable, Iterator

from skyrl.backends.common.page_table import common_prefix
from skyrl.backends.common.sampling.prefill import Prompt


class PrefillQueue:
    """Prompts in prefill, in the order in which their next chunks are read."""

    def __init__(self) -> None:
        self._turns: deque[Prompt] = deque()
        self._sorted: dict[Hashable, list[tuple[bytes, Prompt]]] = {}
        """Prompts of each owner, sorted by their tokens."""
        self._ahead: dict[Prompt, tuple[Prompt, int] | None] = {}
        """For each prompt, the earlier prompt with the longest common prefix, and the number of common tokens."""

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._turns)

    def append(self, prompt: Prompt) -> None:
        """Add a prompt at the end."""
        key = prompt.tokens.tobytes()  # any order works that puts common prefixes together
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
        """Move a prompt to the end of the queue, after a chunk of it was read."""
        self._turns.remove(prompt)
        self._turns.append(prompt)

    def next(self, tokens: int) -> list[Prompt]:
        """Return the first prompt that does not wait for another, and the prompts to read together with it.

        Args:
            tokens: Maximum tokens in total for several prompts, which have the same version; 0: a single prompt.
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
