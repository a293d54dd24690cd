"""Values of a traced loss: the loss is written for one datum and computed for all datums packed in a row.

The shape of a value is its shape for one datum, as a tuple of `Dim`: the datum's tokens, its targets per token, or 1.
One array contains the value of all datums. It is `[batch, tokens]` or `[batch, tokens, targets]` if the first dimension
is the datum's tokens. If not, it is `[batch, slots]` with one number per datum; slot i is datum i of the row. No value
is thus larger than the tile, for any graph. Larger shapes (tokens x tokens, one value per target and datum) are
rejected.

Padding is a separate datum in the last slot, so results for padding, NaN included, stay in that slot. Token positions
that a slice removed repeat their datum's first value, and unused targets repeat the first target. These positions thus
contain only values that the datum contains anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from array_api_compat import array_namespace

from skyrl.errors import RequestError

COLUMNS = "K"
"""Name of the array that has the number of targets per token at each token. No input can have this name."""
MAX_RANK = 3


class Dim(NamedTuple):
    """A dimension of a value, for one datum."""

    kind: Literal["tokens", "columns", "one"]
    dropped: int = 0
    """Number of tokens of the datum that the dimension lacks."""


TOKENS, TARGETS, ONE = Dim("tokens"), Dim("columns"), Dim("one")


@dataclass(frozen=True)
class Ragged:
    """A float32 or boolean value of each datum."""

    array: Any
    dims: tuple[Dim, ...]

    @property
    def per_token(self) -> bool:
        return bool(self.dims) and self.dims[0].kind == "tokens"

    @property
    def wide(self) -> bool:
        return any(dim.kind == "columns" for dim in self.dims)


Operand = Ragged | float | int | bool


class Needs:
    """Minimum numbers of tokens per datum and of targets per token for which a loss is defined."""

    def __init__(self) -> None:
        self.tokens = 1
        self.columns = 1


class Layout:
    """Positions of datums in rows.

    Args:
        segments: int32 `[batch, tokens]`: number of each token's datum in its row, -1 in padding.
        num_segments: Upper bound on the number of datums per row.
        like: float32 array `[batch, tokens]`.
        columns: float32 `[batch, tokens]`: number of targets per token in each token's datum. None: one everywhere.
    """

    def __init__(self, segments: Any, num_segments: int, like: Any, columns: Any = None):
        self.xp = xp = array_namespace(like)
        self.needs = Needs()
        self._nothing = xp.zeros_like(like[:1, :1])
        number = xp.astype(segments, like.dtype)
        owner = xp.where(number < 0, xp.full_like(number, num_segments), number)
        self._member = owner[:, :, None] == (self._counting(num_segments + 1) - 1)[:, None, :]
        self._zero = xp.zeros_like(like)[:, :, None]
        index = xp.cumulative_sum(xp.ones_like(like), axis=1) - 1
        self.count = xp.sum(xp.where(self._member, self._zero + 1, self._zero), axis=1)
        start = xp.min(xp.where(self._member, index[:, :, None], self._zero + like.shape[1]), axis=1)
        self._start, self._last = self.spread(start), like.shape[1] - 1
        self.position = index - self._start
        self._length = self.spread(self.count)
        self._columns = columns

    def _counting(self, to: int) -> Any:
        """Return float32 `[1, to]`: 1, 2, ..."""
        return self.xp.cumulative_sum(self.xp.broadcast_to(self._nothing + 1, (1, to)), axis=1)

    # -- between datums and their tokens ------------------------------------------------------------------------------

    def spread(self, values: Any) -> Any:
        """Repeat each datum's number (`[batch, slots]`) at the tokens of the datum (`[batch, tokens]`)."""
        return self.xp.sum(self.xp.where(self._member, values[:, None, :], self._zero), axis=2)

    def total(self, values: Any) -> Any:
        """Return the sum over each datum's tokens, `[batch, slots]`."""
        return self.xp.sum(self.xp.where(self._member, values[:, :, None], self._zero), axis=1)

    def largest(self, values: Any) -> Any:
        """Return the maximum over each datum's tokens, `[batch, slots]`; minus infinity for a slot without tokens."""
        return self.xp.max(self.xp.where(self._member, values[:, :, None], self._zero - self.xp.inf), axis=1)

    def live(self, dim: Dim) -> Any:
        """Return bool `[batch, tokens]`: True at positions that `dim` contains, False at those that it dropped."""
        return self.position < self._length - dim.dropped

    @cached_property
    def column_count(self) -> Any:
        """The number of targets per token, K, for each datum: float32 `[batch, slots]`."""
        assert self._columns is not None, "only where a value has several targets per token"
        return self.total(self.xp.where(self.position == 0, self._columns, self.xp.zeros_like(self._columns)))

    def used(self, width: int) -> Any:
        """Return bool `[batch, tokens, width]`: True at targets that the token has, False at unused targets."""
        assert self._columns is not None, "only where a value has several targets per token"
        return self._counting(width)[:, None, :] <= self._columns[:, :, None]

    # -- values -------------------------------------------------------------------------------------------------------

    def input(self, array: Any, rank: int) -> Ragged:
        """Return the value of a packed input: `[batch, tokens]`, or `[batch, tokens, targets]` for rank 2."""
        if rank == 0:
            return Ragged(self.first(array), ())
        if rank == 1:
            return Ragged(array, (TOKENS,))
        array = array[:, :, None] if array.ndim == 2 else array
        return Ragged(self.xp.where(self.used(array.shape[2]), array, array[:, :, :1]), (TOKENS, TARGETS))

    def first(self, array: Any) -> Any:
        """Return the value at each datum's first token, `[batch, slots]`."""
        return self.total(self.xp.where(self.position == 0, array, self.xp.zeros_like(array)))

    def size(self, dim: Dim) -> "Ragged | int":
        """Return the length of a dimension: 1, or a number for each datum."""
        if dim.kind == "one":
            return 1
        return Ragged(self.count - dim.dropped if dim.kind == "tokens" else self.column_count, ())

    def full(self, number: float, ndim: int) -> Any:
        """Return a constant float32 array that broadcasts to arrays with `ndim` axes."""
        return (self._nothing if ndim == 2 else self._nothing[:, :, None]) + number

    def number(self, operand: Operand) -> Ragged:
        """Return the operand; a plain number becomes a value that each datum has."""
        if isinstance(operand, Ragged):
            return operand
        return Ragged(self.xp.zeros_like(self.count) + float(operand), ())

    def at_cells(self, array: Any, cells: Any) -> Any:
        """Return an array whose token t of a row is token `cells[row, t]` of `array` (along axis 1)."""
        xp = self.xp
        inside = xp.where(
            cells < 0, xp.zeros_like(cells), xp.where(cells > self._last, xp.full_like(cells, self._last), cells)
        )
        numbers = xp.astype(inside, xp.int32)
        return xp.stack([xp.take(array[row], numbers[row], axis=0) for row in range(array.shape[0])], axis=0)

    def moved(self, value: Ragged, by: int, dropped: int) -> Ragged:
        """Return the value without its first `by` tokens. Its length is the datum's minus `dropped`."""
        dim = Dim("tokens", dropped)
        inside = self.position < self._length - dropped
        cells = self._start + by + self.xp.where(inside, self.position, self.xp.zeros_like(self.position))
        self.needs.tokens = max(self.needs.tokens, dropped + 1)
        return Ragged(self.at_cells(value.array, cells), (dim, *value.dims[1:]))

    def reversed(self, value: Ragged) -> Ragged:
        """Return the value with its tokens in reverse order."""
        last = self._length - value.dims[0].dropped - 1
        cells = self._start + self.xp.where(self.position > last, last, last - self.position)
        return Ragged(self.at_cells(value.array, cells), value.dims)

    def token(self, value: Ragged, place: int) -> Any:
        """Return the value at token `place` of each datum, `[batch, slots]`. Negative places count from the end."""
        length = self._length - value.dims[0].dropped
        at = place if place >= 0 else length + place
        self.needs.tokens = max(self.needs.tokens, value.dims[0].dropped + (place + 1 if place >= 0 else -place))
        return self.total(self.xp.where(self.position == at, value.array, self.xp.zeros_like(value.array)))

    # -- operands -----------------------------------------------------------------------------------------------------

    def aligned(self, *operands: Operand) -> tuple[list[Any], tuple[Dim, ...]]:
        """Return arrays that can be combined elementwise, and the shape of the result. Shapes broadcast as in torch.

        Raises `RequestError` for shapes that do not broadcast, and for results that would be larger than a tile.
        """
        values = [operand for operand in operands if isinstance(operand, Ragged)]
        rank = max((len(value.dims) for value in values), default=0)
        padded = [(ONE,) * (rank - len(value.dims)) + value.dims for value in values]
        dims = tuple(_merged(column, padded) for column in zip(*padded, strict=True))
        if any(dim.kind == "tokens" for dim in dims[1:]) or sum(dim.kind == "columns" for dim in dims) > 1:
            raise RequestError(f"{described(dims)} would be larger than the data; keep the tokens first, and once")
        per_token, wide = bool(dims) and dims[0].kind == "tokens", any(dim.kind == "columns" for dim in dims)
        arrays = []
        for operand in operands:
            if isinstance(operand, Ragged):
                array = self.spread_of(operand) if per_token and not operand.per_token else operand.array
                arrays.append(array[:, :, None] if wide and not operand.wide else array)
            else:
                arrays.append(self.full(float(operand), 3 if wide else 2))
        return arrays, dims

    def spread_of(self, value: Ragged) -> Any:
        """Repeat each datum's value at the tokens of the datum. Keeps the dtype."""
        if self.xp.isdtype(value.array.dtype, "bool"):
            return self.spread(self.floats(value).array) != 0
        return self.spread(value.array)

    def floats(self, operand: Ragged) -> Ragged:
        """Convert the value to float32; True becomes 1."""
        if not self.xp.isdtype(operand.array.dtype, "bool"):
            return operand
        zero = self.full(0.0, operand.array.ndim)
        return Ragged(self.xp.where(operand.array, zero + 1, zero), operand.dims)

    def is_bool(self, operand: Any) -> bool:
        return isinstance(operand, Ragged) and self.xp.isdtype(operand.array.dtype, "bool")


def axis_of(value: Ragged, dim: Any) -> int:
    """Return the index of a dimension, from 0. A negative `dim` counts from the end.

    Raises `RequestError` if `dim` is out of range.
    """
    rank = max(1, len(value.dims))
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise RequestError(f"dim={dim!r}: the value has {len(value.dims)} dimensions, {described(value.dims)}")
    return dim % rank


def described(dims: Sequence[Dim]) -> str:
    """Format a shape for a message."""
    names = {"tokens": "T", "columns": "K", "one": "1"}
    texts = [f"{names[dim.kind]}-{dim.dropped}" if dim.dropped else names[dim.kind] for dim in dims]
    return f"[{', '.join(texts)}]"


def _merged(column: tuple[Dim, ...], shapes: Sequence[tuple[Dim, ...]]) -> Dim:
    kinds = set(column) - {ONE}
    if len(kinds) > 1:
        raise RequestError(f"shapes {' and '.join(described(dims) for dims in shapes)} cannot be broadcast")
    return kinds.pop() if kinds else ONE
