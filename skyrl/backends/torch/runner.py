"""`ModelRunner` of the torch backend: calls to a worker, which holds the cache."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skyrl.backends.common.sampling.model_runner import Drawn, Group, ModelRunner, PromptChunk, Rows, chunks_within
from skyrl.backends.common.versions import BASE_SLOT, VersionPool
from skyrl.backends.torch.models.state import TorchVersion
from skyrl.backends.torch.workers.group import WorkerGroup
from skyrl.backends.torch.workers.worker import Named

CHUNKS_WHILE_IDLE = 8  # 2,048 tokens forward: less than a training micro-batch of 1,024


class TorchRunner(ModelRunner[TorchVersion]):
    """Sampling on one worker of a group, or on all together if they share weights.

    Args:
        group: The workers.
        versions: The pool whose slots are sampled from.
        token_bytes: Bytes of KV cache per token in all layers.
        max_rows: Maximum sequences decoded at once.
        bank_bytes: Maximum bytes of stacked adapters on a worker.
        deterministic: If True, shapes do not depend on other requests, and each version is decoded alone.
        max_tokens: Maximum tokens of prompts per call; 0: the default chunk sizes.
        call: Sends a command to the worker and returns its result.
    """

    def __init__(
        self,
        group: WorkerGroup,
        versions: VersionPool[TorchVersion],
        *,
        token_bytes: int,
        max_rows: int,
        bank_bytes: int,
        deterministic: bool,
        max_tokens: int = 0,
        call: Callable[..., Any],
    ):
        self._call = call
        self._versions = versions
        self._deterministic = deterministic
        self._pages = 0
        self._bank_bytes = bank_bytes
        self._together = max(1, bank_bytes // max(1, group.facts.decided.adapter))
        """Maximum number of adapters in a stack."""
        self.vocab_size = group.facts.vocab_size
        self.token_bytes = token_bytes
        self.row_counts = (max_rows,) if deterministic else None
        self.chunks = chunks_within(max_tokens)
        self.reads_together, self.chunks_while_idle = not deterministic, CHUNKS_WHILE_IDLE

    def open(self, pages: int, blocks: int, states: int) -> None:
        self._pages = pages
        self.clear()

    @property
    def lost(self) -> bool:
        """Always False: a failed call leaves the pages of other requests unchanged."""
        return False

    def clear(self) -> None:
        self._call("open_cache", self._pages, self._bank_bytes)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._call("copy_pages", list(pairs))

    def read(self, version: TorchVersion | None, pieces: Sequence[PromptChunk]) -> list[list[int]]:
        parts = [(list(piece.table), piece.tokens, piece.start) for piece in pieces]
        blocks = itertools.count()
        return [[next(blocks) for _ in range(count)] for count in self._call("read", _named(version), parts)]

    def project(self, version: TorchVersion | None, states: int) -> None:
        self._call("project", _named(version), states)

    def pick(self, logits: None, ids: np.ndarray) -> np.ndarray:
        return self._call("pick", ids)

    def best(self, logits: None, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self._call("best", k)

    def alternatives(
        self, logits: None, seed: np.ndarray, position: int, first: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._call("alternatives", seed, position, first, temperature)

    def groups(self, slots: Sequence[int]) -> list[Group]:
        held = {slot: self._versions.adapter(slot) for slot in slots}
        whole = [slot for slot, version in held.items() if version is not None and version.kind.is_whole]
        adapted = [slot for slot in slots if slot not in whole and slot != BASE_SLOT]
        most = 1 if self._deterministic else self._together
        together = [adapted[start : start + most] for start in range(0, len(adapted), most)]
        groups = [Group({slot: place for place, slot in enumerate(some)}, self._handles(some)) for some in together]
        if BASE_SLOT in held:
            if groups and not self._deterministic:
                groups[0].places[BASE_SLOT] = -1
            else:
                groups.append(Group({BASE_SLOT: -1}, []))
        return groups + [Group({slot: -1}, self._handles([slot])) for slot in whole]

    def _handles(self, slots: Sequence[int]) -> list[Named]:
        return [_named(self._versions.adapter(slot)) for slot in slots]

    def decode(self, group: Group, rows: Rows, steps: int) -> Drawn:
        return self._call("decode", group.handle, rows, steps, self._deterministic)

    def drawn(self, decoded: Drawn, top: bool) -> Drawn:
        return decoded


def _named(version: TorchVersion | None) -> Named:
    return None if version is None else (version.kind, version.weights.handle)
