"""Sampling on a worker: prefill of prompts into a KV cache, bursts of decoding, scores of prompts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.model_runner import (
    BURST,
    DRAWS_AT_ONCE,
    LARGEST_INT32,
    SCORED_AT_ONCE,
    TOP_WIDTHS,
    Drawn,
    Rows,
)
from skyrl.backends.common.sampling.random_numbers import uniforms
from skyrl.backends.torch.base_model.attention import HELD_BYTES, DecodeBurst, Paged, PagedCache, PagedParts
from skyrl.backends.torch.base_model.lora import StackedAdapters, bank_of
from skyrl.backends.torch.base_model.model import LoadedModel, Weights
from skyrl.backends.torch.base_model.transfers import on_device, on_host
from skyrl.backends.torch.sampling.drawing import (
    COLDEST,
    Occurrences,
    draw,
    draw_many,
    likeliest,
    logprobs_of,
    penalised,
)

SPARE = 0.25
"""Fraction of a burst's rows that may have ended before the burst is compacted."""


class DrawSettings(NamedTuple):
    """Sampling parameters of some rows, on the device."""

    here: Tensor
    """int64: indices of the rows."""
    filters: dict[str, Any]
    """Temperature and filters, by their names in `draw`."""
    scale: Tensor | None
    """float32 `[rows, 1]`: temperature of the returned log-probabilities; None: 1 in all rows."""
    costs: list[Tensor]
    """Repetition, presence and frequency penalties; empty if no row has penalties."""


class SamplingWorker:
    """Calls of a `ModelRunner`. `project` uses the hidden states of the last `read`; `pick`, `best` and `alternatives`
    use the logits of the last `project`.

    Ranks that share the base weights make each call together, with the same arguments.

    Args:
        model: The base model.
    """

    def __init__(self, model: LoadedModel):
        self._model = model
        self._cache: PagedCache | None = None
        self._pages = self._bank_bytes = 0
        self._blocks: list[Tensor] = []
        """Hidden states of the last `read`."""
        self._logits = torch.empty(0)
        self._banks: dict[tuple[int, ...], StackedAdapters] = {}
        """Cached banks (stacks of adapters), least recently used first."""

    def open(self, pages: int, bank_bytes: int) -> None:
        """Clear the cache and set its number of pages, and the maximum bytes of banks. It is allocated on first use."""
        self._pages, self._bank_bytes, self._cache = pages, bank_bytes, None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target)."""
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self._model.device).T
        self._paged.copy(sources, targets)

    @property
    def _paged(self) -> PagedCache:
        if self._cache is None:
            model = self._model
            self._cache = PagedCache(self._pages, PAGE_SIZE, model.cache_shapes, model.dtype, model.device)
        return self._cache

    @torch.no_grad()
    def read(self, weights: Weights | None, pieces: Sequence[tuple[Sequence[int], np.ndarray, int]]) -> list[int]:
        """Prefill pieces of prompts: (pages, tokens int32 `[n]`, first position). Returns each piece's block count."""
        model = self._model
        parts = []
        for table, tokens, start in pieces:
            positions = torch.arange(start, start + len(tokens), device=model.device)[None]
            pages = self._on_device(np.asarray([table]))
            parts.append(Paged(self._paged, pages, positions, start + len(tokens), first=not start))
        view, tokens = PagedParts(parts), np.concatenate([tokens for _, tokens, _ in pieces])
        with model.using(weights):
            hidden = model.base.run(lambda: model.hidden(self._on_device(tokens[None]), view.positions, view)[0])
        states = hidden.split([len(tokens) for _, tokens, _ in pieces])
        blocks = [piece.split(SCORED_AT_ONCE) for piece in states]
        self._blocks = [block for some in blocks for block in some]
        return [len(some) for some in blocks]

    @torch.no_grad()
    def project(self, weights: Weights | None, block: int) -> None:
        """Compute the logits of a block of the last `read`."""
        states = self._blocks[block]
        with self._model.using(weights):
            self._logits = self._model.base.run(lambda: self._model.logits(states[None])[0].float())

    @torch.no_grad()
    def pick(self, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities of tokens int32 `[SCORED_AT_ONCE, width]`."""
        found = logprobs_of(self._logits, self._on_device(ids[: len(self._logits)]))
        return _filled(found, np.float32)

    @torch.no_grad()
    def best(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The `k` most likely tokens of each row, and their log-probabilities."""
        ids, logprobs = likeliest(self._logits, k)
        return _filled(ids, np.int32), _filled(logprobs, np.float32)

    @torch.no_grad()
    def alternatives(
        self, seed: np.ndarray, position: int, first: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw tokens for each row. Returns also their log-probabilities."""
        rows = len(self._logits)
        places = position + np.arange(rows, dtype=np.int32)
        seeds = np.broadcast_to(seed, (rows, 2))
        numbers = [
            uniforms(seeds, np.full(rows, LARGEST_INT32 - number, np.int32), places)
            for number in range(first, first + DRAWS_AT_ONCE)
        ]
        tokens, logprobs = draw_many(self._logits, self._on_device(np.stack(numbers, 1)), temperature)
        return _filled(tokens, np.int32), _filled(logprobs, np.float32)

    @torch.no_grad()
    def decode(
        self, versions: Sequence[Weights | None], contents: tuple[int, ...], rows: Rows, steps: int, fixed: bool
    ) -> Drawn:
        """Generate up to `steps` tokens in each row.

        Args:
            versions: Adapters that `rows.slots` index (-1 is the base model), or a single full model.
            contents: Unique numbers of the versions, never reused.
            rows: State and sampling parameters of each row.
            steps: At most `BURST`.
            fixed: If True, shapes do not depend on the rows.
        """
        model, count = self._model, len(rows.tokens)
        table = self._on_device(rows.table)
        width = min(TOP_WIDTHS[-1], model.vocab_size) if rows.top.any() else 0
        drawn = Drawn(
            np.zeros((BURST, count), np.int32),
            np.zeros((BURST, count), np.float32),
            np.zeros((BURST, count, width), np.int32),
            np.zeros((BURST, count, width), np.float32),
        )
        alive, tokens, positions = np.flatnonzero(rows.limits > 0), rows.tokens.copy(), rows.positions.copy()
        reach = PAGE_SIZE * rows.table.shape[1] if fixed else int(positions.max()) + steps
        adapters = [version for version in versions if version is not None and not version.kind.is_whole]
        own = None if adapters or not versions else versions[0]
        occurred = None
        if rows.options is not None and (penalties := rows.options.penalties) is not None:
            before, prompt = self._on_device(penalties.before), self._on_device(penalties.prompt)
            occurred = Occurrences.of(before, prompt, model.vocab_size)
        at, view, settings = (np.arange(count) if fixed else alive), None, None
        random = _uniforms(rows, steps)
        adapted: Callable[[], AbstractContextManager[None]] = nullcontext
        with model.using(own):
            for step in range(steps):
                if not fixed and len(alive) < (1 - SPARE) * len(at):
                    if isinstance(view, DecodeBurst):
                        view.keep()
                    at, view = alive, None
                places = self._on_device(positions[at])[:, None]
                if view is None or settings is None:
                    adapted = self._adapted(adapters, contents, rows.slots[at], fixed)
                    settings = self._settings(rows, at)
                view = self._view(view, table, settings.here, places, reach)
                with adapted():
                    logits = self._next(self._on_device(tokens[at])[:, None], places, view)
                drawing = self._on_device(random[step, at])
                found, logprobs, best = self._draw(logits, rows, at, step, drawing, settings, width, occurred)
                drawn.tokens[step, at], drawn.logprobs[step, at] = found, logprobs
                if best is not None:
                    drawn.top_ids[step, at], drawn.top_logprobs[step, at] = best
                going = np.isin(at, alive)
                ended = (found[:, None] == rows.stops[at]).any(1) | (step + 1 >= rows.limits[at])
                alive = at[going & ~ended]
                tokens[alive] = drawn.tokens[step, alive]
                positions[alive] += 1
                if not len(alive):
                    break
        if isinstance(view, DecodeBurst):
            view.keep()
        return drawn

    def _adapted(
        self, adapters: Sequence[Weights], contents: tuple[int, ...], slots: np.ndarray, fixed: bool
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return a context that applies adapters to rows by their slots, int32 `[rows]`; -1 means none."""
        hooks, used = self._model.hooks, set(slots.tolist())
        if not adapters or (used == {-1} and not fixed):
            return nullcontext
        if len(used) == 1 and not fixed:  # one adapter needs no masks, nor columns of others
            one = adapters[used.pop()]
            return partial(hooks.adapter, one.tensors, one.kind.lora_config.scaling)
        bank = self._bank(adapters, contents)
        return partial(hooks.bank, bank, bank.masks(self._on_device(slots)))

    def _view(self, view: Paged | None, table: Tensor, here: Tensor, positions: Tensor, reach: int) -> Paged:
        """Return a view of rows `here` at these positions; `view` is the view of the previous step, or None."""
        if isinstance(view, DecodeBurst):
            view.to(positions)
            return view
        table = table[here]
        fits = len(table) * reach * self._paged.token_bytes <= HELD_BYTES
        return (DecodeBurst if fits else Paged)(self._paged, table, positions, reach)

    def _next(self, tokens: Tensor, positions: Tensor, view: Paged) -> Tensor:
        """Logits float32 `[rows, vocab]` after one more token in each row."""
        model = self._model
        return model.base.run(lambda: model.logits(model.hidden(tokens, positions, view))[:, 0].float())

    def _settings(self, rows: Rows, at: np.ndarray) -> DrawSettings:
        """Copy the sampling parameters of these rows to the device."""
        names, costs = {"temperature": rows.temperature, "top_k": rows.top_k, "top_p": rows.top_p}, list[np.ndarray]()
        warm = rows.temperature[at] > COLDEST
        filtered = warm & ((rows.top_k[at] > 0) | (rows.top_p[at] < 1))
        facts = {"is_warm": bool(warm.any()), "is_filtered": bool(filtered.any())}
        if rows.options is not None:
            names |= rows.options.filters
            if (penalties := rows.options.penalties) is not None:
                costs = [penalties.repetition, penalties.presence, penalties.frequency]
        return DrawSettings(
            self._on_device(at),
            {name: self._on_device(values[at]) for name, values in names.items()} | facts,
            None if (rows.scale[at] == 1).all() else self._on_device(rows.scale[at])[:, None],
            [self._on_device(cost[at]) for cost in costs],
        )

    def _draw(
        self,
        logits: Tensor,
        rows: Rows,
        at: np.ndarray,
        step: int,
        random: Tensor,
        settings: DrawSettings,
        width: int,
        occurred: Occurrences | None,
    ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
        """Draw a token for each of these rows. Returns also log-probabilities, and the `width` most likely tokens."""
        allowed = logits
        if occurred is not None:
            counted = Occurrences(*(counts[settings.here] for counts in occurred))
            allowed = penalised(logits, counted, *settings.costs)
        if rows.options is not None:
            held = np.flatnonzero(rows.steps[at] + step < rows.options.min_tokens[at])
            pairs = [(row, token) for row in held for token in rows.stops[at[row]] if token >= 0]
            if pairs:
                where = torch.tensor(pairs, device=logits.device).T
                allowed = allowed.clone()
                allowed[where[0], where[1]] = -torch.inf
        found = draw(allowed, random, **settings.filters)
        if self._model.base.is_sharded:
            dist.broadcast(found, 0)  # ranks must continue with the same tokens even if their logits differ by rounding
        if occurred is not None:
            occurred.add(settings.here, found)
        scored = logits if settings.scale is None else logits / settings.scale
        logprobs = logprobs_of(scored, found[:, None])[:, 0]
        best = likeliest(scored, width) if width else ()
        tokens, scores, *likely = on_host([found.int(), logprobs, *best])
        return tokens, scores, (likely[0].astype(np.int32), likely[1]) if likely else None

    def _bank(self, versions: Sequence[Weights], contents: tuple[int, ...]) -> StackedAdapters:
        """Stack of these adapters, with one more slot without effect, which index -1 selects."""
        if contents in self._banks:
            self._banks[contents] = self._banks.pop(contents)
        else:
            adapters = [(version.tensors, version.kind.lora_config.scaling) for version in versions]
            left = self._bank_bytes - sum(tensor.nbytes for tensors, _ in adapters for tensor in tensors.values())
            while self._banks and sum(bank.nbytes for bank in self._banks.values()) > left:
                self._banks.pop(next(iter(self._banks)))
            self._banks[contents] = bank_of(adapters, 1)
        return self._banks[contents]

    def forget_banks(self, contents: int | None = None) -> None:
        """Remove banks that contain a version; None: all banks."""
        self._banks = {key: bank for key, bank in self._banks.items() if contents is not None and contents not in key}

    def _on_device(self, array: np.ndarray) -> Tensor:
        return on_device(array.astype(np.float32 if array.dtype.kind == "f" else np.int64), self._model.device)


def _filled(values: Tensor, dtype: type) -> np.ndarray:
    """Copy rows to the host, padded to `[SCORED_AT_ONCE, ...]`."""
    whole = np.zeros((SCORED_AT_ONCE, *values.shape[1:]), dtype)
    (whole[: len(values)],) = on_host([values])
    return whole


def _uniforms(rows: Rows, steps: int) -> np.ndarray:
    """Random numbers of the next tokens, float32 `[steps, rows]`."""
    numbers = (rows.steps[None] + np.arange(steps, dtype=np.int32)[:, None]).reshape(-1)
    seeds, indices = np.tile(rows.seeds, (steps, 1)), np.tile(rows.sample_index, steps)
    return uniforms(seeds, indices, numbers).reshape(steps, -1)
