"""One attention function for all models of transformers, over packed sequences or over pages of a KV cache.

Models of transformers call a registered function with queries, keys and values after rotary embedding. So this function
decides which keys each query sees, for all architectures. An architecture that needs features not implemented here
(sinks, position biases) keeps its own attention, and can be trained but not sampled.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyrl.backends.torch.base_model.sequence_ranks import ALONE, SequenceRanks
from skyrl.backends.torch.base_model.varlen import Attend, VarlenAttention, one_by_one

HELD_BYTES = 2**30
"""Maximum bytes of a burst's contiguous copy of keys and values. Above that, they are read from the cache each step."""
NAMES = itertools.count()
SERVED = {"scaling", "dropout", "sliding_window", "softcap", "is_causal"}
"""Arguments of attention functions that this module implements."""
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "layer_idx"}
"""Arguments that models pass and that do not affect the result."""


@dataclass(frozen=True)
class Packed:
    """Consecutive sequences in one row, with padding after them. Sequences do not see each other or the padding."""

    lengths: Sequence[int]
    ranks: SequenceRanks = ALONE
    """Ranks that each hold a share of the row."""


class PagedCache:
    """KV cache of all layers, in pages that sequences own.

    Args:
        pages: Number of pages.
        page_size: Tokens per page.
        shapes: (key heads, key width, value width) of each layer.
    """

    def __init__(self, pages: int, page_size: int, shapes: Sequence[tuple[int, int, int]], dtype: Any, device: Any):
        self.page_size = page_size
        cells = pages * page_size
        self.keys = [torch.zeros(cells, heads, width, dtype=dtype, device=device) for heads, width, _ in shapes]
        self.values = [torch.zeros(cells, heads, width, dtype=dtype, device=device) for heads, _, width in shapes]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(cells[0].nbytes for cells in (*self.keys, *self.values))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages. Indices are int64 `[n]` each."""
        offsets = torch.arange(self.page_size, device=sources.device)
        source, target = ((pages[:, None] * self.page_size + offsets).reshape(-1) for pages in (sources, targets))
        for cells in (*self.keys, *self.values):
            cells[target] = cells[source]


class Paged:
    """View of rows of new tokens, whose earlier tokens are in a cache. New keys and values are written to the cache.

    Args:
        cache: The cache.
        table: int64 `[rows, blocks]`: pages of each row's sequence, in order.
        positions: int64 `[rows, tokens]` of the new tokens.
        reach: Number of positions to attend to, from 0. It must exceed all `positions`; None: the smallest such number.
        first: True if the new tokens are the first of their sequences, from position 0.
    """

    def __init__(
        self, cache: PagedCache, table: Tensor, positions: Tensor, reach: int | None = None, first: bool = False
    ):
        self.first = first
        size = cache.page_size
        self.cache = cache
        reach = int(positions.max()) + 1 if reach is None else reach
        blocks = min(-(-reach // size), table.shape[1])
        cells = (table[:, :blocks, None] * size + torch.arange(size, device=table.device)).reshape(len(table), -1)
        self._pages = cells
        """int64 `[rows, context]`: cache cell of each position. The context is `reach`, rounded up to whole pages."""
        context = torch.arange(cells.shape[1], device=table.device)
        # The rest of a page may hold NaN from its previous owner, and masks do not remove NaN.
        self.cells = torch.where(context <= positions.amax(1, keepdim=True), cells, cells[:, :1])
        """int64 `[rows, context]`: cache cell of each position of a row's sequence. Positions after the row's last new
        token have the cell of position 0."""
        self.written = torch.gather(cells, 1, positions).reshape(-1)
        self.positions = positions
        self._seen: dict[int | None, Tensor] = {}
        """Masks by window."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[rows, heads, tokens, width]`. Returns the keys and values of all positions,
        `[rows, heads, context, width]`."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for cells, new in ((keys, key), (values, value)):
            cells[self.written] = new.transpose(1, 2).reshape(-1, *cells.shape[1:])
        if self.first:
            return key, value
        return self._read(keys).transpose(1, 2), self._read(values).transpose(1, 2)

    def _read(self, cells: Tensor) -> Tensor:
        """Keys or values `[rows, context, heads, width]` of all positions."""
        return cells.index_select(0, self.cells.reshape(-1)).view(*self.cells.shape, *cells.shape[1:])

    def seen(self, window: int | None) -> Tensor:
        """Attention mask, bool `[rows, 1, tokens, context]`."""
        if window not in self._seen:  # shared by all layers with this window
            context = torch.arange(self.cells.shape[1], device=self.cells.device)
            seen = context[None, None] <= self.positions[:, :, None]
            if window is not None:
                seen &= context[None, None] > self.positions[:, :, None] - window
            self._seen[window] = seen[:, None]
        return self._seen[window]


class PagedParts:
    """View of new tokens of several sequences, concatenated in one row. Each token sees only its own sequence."""

    def __init__(self, parts: Sequence[Paged]):
        self.parts = parts
        self.positions = torch.cat([part.positions for part in parts], 1)
        """int64 `[1, tokens]`."""
        self.lengths = [part.positions.shape[1] for part in parts]


class DecodeBurst(Paged):
    """View of rows that advance by one token at a time. It holds a contiguous copy of their keys and values.

    Args:
        cache: The cache.
        table: int64 `[rows, blocks]`: pages of each row's sequence, in order.
        positions: int64 `[rows, 1]` of the first new token of each row.
        reach: Number of positions to attend to, from 0. It must exceed the positions of all steps.
    """

    def __init__(self, cache: PagedCache, table: Tensor, positions: Tensor, reach: int):
        super().__init__(cache, table, positions, reach)
        self._held = [
            tuple(self._read(cells).transpose(1, 2).contiguous() for cells in both)
            for both in zip(cache.keys, cache.values, strict=True)
        ]
        """Keys and values `[rows, heads, context, width]` of each layer."""
        self._rows = torch.arange(len(table), device=table.device)
        self._later: list[Tensor] = []
        """Positions that are not in the cache yet."""
        self.to(positions)

    def to(self, positions: Tensor) -> None:
        """Advance to these positions, int64 `[rows, 1]`."""
        self.positions = positions
        self._later.append(positions)
        self._seen.clear()
        self._cells: dict[int, Tensor] = {}
        """Index of the new token in a held copy with this number of heads, int64 `[rows * heads]`."""
        self._biases: dict[tuple[int | None, int], Tensor] = {}

    def bias(self, window: int | None, heads: int) -> Tensor:
        """Attention mask as float32 0 or -inf, `[rows * heads, 1, context]`."""
        if (window, heads) not in self._biases:
            seen = self.seen(window)
            bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._biases[window, heads] = bias.expand(-1, heads, -1, -1).reshape(-1, 1, seen.shape[3])
        return self._biases[window, heads]

    def keep(self) -> None:
        """Write keys and values that are only in the copy to the cache."""
        if not self._later:
            return
        positions = torch.cat(self._later, 1)
        written, rows = torch.gather(self._pages, 1, positions), self._rows[:, None]
        for layer, held in enumerate(self._held):
            for cells, own in zip((self.cache.keys[layer], self.cache.values[layer]), held, strict=True):
                cells[written] = own[rows, :, positions]
        self._later.clear()

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._held[layer]
        heads = keys.shape[1]
        if heads not in self._cells:
            first = self._rows[:, None] * heads + torch.arange(heads, device=self._rows.device)
            self._cells[heads] = (first * keys.shape[2] + self.positions).view(-1)
        for held, new in ((keys, key), (values, value)):
            width = held.shape[3]
            held.view(-1, width).index_copy_(0, self._cells[heads], new.reshape(-1, width))
        return keys, values


class Attention:
    """The attention of one loaded model. Set `view` to define what queries see, before the model is called.

    Args:
        deterministic: Use no kernel for packed sequences, as the gradients of FlashAttention are not reproducible.
    """

    def __init__(self, deterministic: bool = False) -> None:
        self.view: Packed | Paged | PagedParts | None = None
        self.kernel = None if deterministic else VarlenAttention()
        self.name = f"skyrl_{next(NAMES)}"
        """Name in the registry of transformers."""
        self.recorded: list[tuple[int | None, tuple[int, int, int]]] | None = None
        """Layer, and (key heads, key width, value width), of each call so far, while recording; None: not recording."""
        self.windows: dict[int | None, int | None] = {}
        """Window of each recorded layer, in tokens; None: all earlier tokens."""
        from transformers import AttentionInterface

        AttentionInterface.register(self.name, self)  # creates no masks

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend with inputs `[rows, heads, tokens, width]`. Returns `[rows, tokens, heads, width]`."""
        asked = {name for name, value in others.items() if value is not None} - SERVED - HARMLESS
        if asked:
            raise ValueError(f"the model's attention asks for {sorted(asked)}, which is not computed here")
        assert self.view is not None
        # Qwen2-MoE tells the window to its mask only, which is not created.
        window: int | None = (
            others["sliding_window"] if "sliding_window" in others else getattr(module, "sliding_window", None)
        )
        if self.recorded is not None:
            shape, called = (key.shape[1], key.shape[3], value.shape[3]), getattr(module, "layer_idx", None)
            self.recorded.append((called, shape))
            self.windows[called] = window
        call = _attend(scaling, softcap)
        if isinstance(self.view, Packed):
            kernel = self.kernel if softcap is None else None  # varlen_attn has no soft cap
            return _packed(call, query, key, value, self.view, window, scaling, kernel), None
        layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
        if isinstance(self.view, Paged):
            return _paged(call, query, key, value, self.view, layer, window), None
        parts = zip(self.view.parts, *(x.split(self.view.lengths, 2) for x in (query, key, value)), strict=True)
        return torch.cat([_paged(call, q, k, v, part, layer, window) for part, q, k, v in parts], 1), None


def _attend(scaling: float | None, softcap: float | None) -> Attend:
    def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        on_cpu = query.device.type == "cpu" and query.dtype == torch.float32 and key.is_contiguous()
        if on_cpu and not grouped and mask is not None and mask.dim() == 4 and mask.shape[2] == 1:
            # several times as fast as the kernel below, which is for many queries
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            weights = (query * scale @ key.transpose(2, 3)).masked_fill(~mask, -torch.inf).softmax(-1)
            return weights @ value
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, is_causal=mask is None, enable_gqa=grouped
        )

    if softcap is None:
        return plain

    def capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend as `plain` does, with logits capped to +-`softcap` by tanh."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
        logits = torch.tanh(logits / softcap) * softcap
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        return torch.softmax(logits.float().masked_fill(~mask, -torch.inf), -1).to(value.dtype) @ value

    return capped


def _packed(
    call: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: Packed,
    window: int | None,
    scaling: float | None,
    kernel: VarlenAttention | None,
) -> Tensor:
    """Attend within each sequence: in one call of `kernel` if it supports the inputs, otherwise one by one."""
    query, key, value = view.ranks.to_heads(query, key, value)
    padding = query.shape[2] - sum(view.lengths)
    lengths = [*view.lengths, padding] if padding else list(view.lengths)
    if kernel is not None and len(lengths) > 1 and kernel.serves(call, query, key, value, scaling, window):
        output = kernel(query, key, value, lengths, scaling, window)
    else:
        output = one_by_one(call, query, key, value, lengths, window)
    return view.ranks.to_tokens(output.transpose(1, 2)).contiguous()


def _paged(
    call: Attend, query: Tensor, key: Tensor, value: Tensor, view: Paged, layer: int, window: int | None
) -> Tensor:
    keys, values = view.write(layer, key, value)
    rows, heads, tokens, width = query.shape
    if view.first:
        mask = None if window is None or window >= tokens else view.seen(window)[..., :tokens]
        return call(query, keys, values, mask).transpose(1, 2).contiguous()
    groups = heads // keys.shape[1]
    # Queries that share keys become rows of one product, so keys need not be repeated.
    query = query.reshape(rows, keys.shape[1], groups * tokens, width)
    mask = view.seen(window)
    if tokens > 1:
        mask = mask.repeat(1, 1, groups, 1)
    output = call(query, keys, values, mask)
    return output.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous()
