"""Operations of traced losses that depend on dimensions: reductions, shapes, slices. See `operations`."""

from collections.abc import Callable
from typing import Any

from skyrl.algorithms.losses import stop_gradient
from skyrl.algorithms.traced.operations import (
    ALLOWED,
    allowed,
    check_dtype,
    clamp,
    elementwise,
    number,
    tensor,
)
from skyrl.algorithms.traced.ragged import MAX_RANK, ONE, Dim, Layout, Ragged, axis_of, described
from skyrl.errors import RequestError

MAX_COLUMNS = 64
"""Maximum number of targets per token of a traced loss. A tile has no more."""


def _axes(value: Ragged, dim: Any) -> list[int]:
    """Return the indices of the dimensions to reduce, from 0. For None, return all of them."""
    if dim is None or dim in ((), []):
        return list(range(len(value.dims)))
    listed = list(dim) if isinstance(dim, tuple | list) else [dim]
    axes = [axis_of(value, one) for one in listed]
    if len(set(axes)) != len(axes):
        raise RequestError(f"dim={dim}: duplicate dimension; name each once")
    return [axis for axis in axes if axis < len(value.dims)]


def _kept(value: Ragged, axes: list[int], keepdim: Any) -> tuple[Dim, ...]:
    dims = tuple(ONE if place in axes else dim for place, dim in enumerate(value.dims))
    return dims if keepdim else tuple(dim for place, dim in enumerate(dims) if place not in axes)


def _reduce(
    layout: Layout, value: Ragged, dim: Any, keepdim: Any, neutral: float, wide: Callable[..., Any], narrow: Any
) -> Ragged:
    """Reduce over targets with `wide`, then over tokens with `narrow`. Unused elements are replaced by `neutral`."""
    xp, axes = layout.xp, _axes(value, dim)
    array, reduced = value.array, {value.dims[axis].kind: value.dims[axis] for axis in axes}
    if "tokens" in reduced and value.wide and "columns" not in reduced:
        raise RequestError(
            f"dim={dim}: the sum over tokens of {described(value.dims)} alone would be one value per target; reduce "
            "over the targets (dim=-1) first, or over both"
        )
    if "columns" in reduced:
        array = wide(xp.where(layout.used(array.shape[2]), array, layout.full(neutral, 3)))
    if "tokens" in reduced:
        array = narrow(xp.where(layout.live(reduced["tokens"]), array, layout.full(neutral, 2)))
    return Ragged(array, _kept(value, axes, keepdim))


def _sum(layout: Layout, value: Ragged, dim: Any, keepdim: Any = False) -> Ragged:
    return _reduce(
        layout, layout.floats(value), dim, keepdim, 0.0, lambda array: layout.xp.sum(array, axis=2), layout.total
    )


def _amax(layout: Layout, value: Ragged, dim: Any, keepdim: Any = False) -> Ragged:
    lowest = -float("inf")
    return _reduce(
        layout, layout.floats(value), dim, keepdim, lowest, lambda array: layout.xp.max(array, axis=2), layout.largest
    )


def _size(layout: Layout, value: Ragged, dim: Any) -> Any:
    """Return the number of elements that a reduction over `dim` combines into one."""
    size: Any = 1.0
    for axis in _axes(value, dim):
        size = elementwise(layout, lambda a, b: a * b, size, layout.size(value.dims[axis]))
    return size


def _over(layout: Layout, x: Any, y: Any) -> Any:
    return elementwise(layout, lambda a, b: a / b, x, y)


def _minus(layout: Layout, x: Any, y: Any) -> Any:
    return elementwise(layout, lambda a, b: a - b, x, y)


@allowed("torch.sum", ".sum", cost=2)
def sum_(layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Any:
    return _sum(layout, check_dtype(layout, tensor(x), dtype), dim, keepdim)


@allowed("torch.mean", ".mean", cost=3)
def mean(layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Any:
    x = check_dtype(layout, tensor(x), dtype)
    return _over(layout, _sum(layout, x, dim, keepdim), _size(layout, x, dim))


def _extreme(name: str, elements: Callable[[Any, Any, Any], Any], whole: Callable[..., Any]) -> None:
    @allowed(f"torch.{name}", f".{name}", cost=2)
    def extreme(layout: Layout, x: Any, other: Any = None, /, **unserved: Any) -> Any:
        """Return the extreme of all values of a tensor, or, given two tensors, the extreme at each element."""
        if unserved or (other is not None and not isinstance(other, Ragged)):
            raise RequestError(f"torch.{name} over a dimension returns places too; use torch.a{name} with dim")
        if other is None:
            return whole(layout, tensor(x), None)
        return elementwise(layout, lambda a, b: elements(layout.xp, a, b), x, other)


@allowed("torch.amax", ".amax", cost=2)
def amax(layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False) -> Any:
    return _amax(layout, tensor(x), dim, keepdim)


@allowed("torch.amin", ".amin", cost=3)
def amin(layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False) -> Any:
    x = layout.floats(tensor(x))
    largest = _amax(layout, Ragged(-x.array, x.dims), dim, keepdim)
    return Ragged(-largest.array, largest.dims)


_extreme("max", lambda xp, a, b: xp.maximum(a, b), _amax)
_extreme("min", lambda xp, a, b: xp.minimum(a, b), amin)


@allowed("torch.any", ".any", cost=2)
def any_(layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False) -> Any:
    total = _sum(layout, _is_set(layout, x), dim, keepdim)
    return Ragged(total.array > 0, total.dims)


@allowed("torch.all", ".all", cost=2)
def all_(layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False) -> Any:
    x = _is_set(layout, x)
    total = _sum(layout, Ragged(1 - x.array, x.dims), dim, keepdim)
    return Ragged(total.array == 0, total.dims)


@allowed("torch.count_nonzero", ".count_nonzero", cost=2)
def count_nonzero(layout: Layout, x: Any, /, dim: Any = None) -> Any:
    return _sum(layout, _is_set(layout, x), dim)


def _is_set(layout: Layout, x: Any) -> Ragged:
    x = tensor(x)
    return layout.floats(x if layout.is_bool(x) else Ragged(x.array != 0, x.dims))


@allowed("torch.var", ".var", cost=8)
def var(
    layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False, *, unbiased: Any = True, correction: Any = None
) -> Any:
    x, less = layout.floats(tensor(x)), (1 if unbiased else 0) if correction is None else correction
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, less = None, int(dim)
    centred = _minus(layout, x, mean(layout, x, dim, True))
    squares = _sum(layout, elementwise(layout, lambda a: a * a, centred), dim, keepdim)
    divisor = clamp(layout, _minus(layout, _size(layout, x, dim), less), min=0)
    return _over(layout, squares, divisor)


@allowed("torch.std", ".std", cost=9)
def std(
    layout: Layout, x: Any, /, dim: Any = None, keepdim: Any = False, *, unbiased: Any = True, correction: Any = None
) -> Any:
    variance = var(layout, x, dim, keepdim, unbiased=unbiased, correction=correction)
    return elementwise(layout, layout.xp.sqrt, variance)


@allowed("torch.logsumexp", ".logsumexp", cost=6)
def logsumexp(layout: Layout, x: Any, /, dim: Any, keepdim: Any = False) -> Any:
    x = layout.floats(tensor(x))
    top = _amax(layout, x, dim, True)
    finite = layout.xp.isfinite(top.array)
    top = Ragged(stop_gradient(layout.xp.where(finite, top.array, layout.xp.zeros_like(top.array))), top.dims)
    scaled = elementwise(layout, lambda a, b: layout.xp.exp(a - b), x, top)
    total = elementwise(layout, lambda a, b: layout.xp.log(a) + b, _sum(layout, scaled, dim, True), top)
    return Ragged(total.array, _kept(x, _axes(x, dim), keepdim))


@allowed("torch.log_softmax", ".log_softmax", "torch.nn.functional.log_softmax", cost=7)
def log_softmax(layout: Layout, x: Any, /, dim: Any, *, dtype: Any = None) -> Any:
    x = check_dtype(layout, layout.floats(tensor(x)), dtype)
    return _minus(layout, x, logsumexp(layout, x, dim, True))


@allowed("torch.softmax", ".softmax", "torch.nn.functional.softmax", cost=8)
def softmax(layout: Layout, x: Any, /, dim: Any, *, dtype: Any = None) -> Any:
    return elementwise(layout, layout.xp.exp, log_softmax(layout, x, dim, dtype=dtype))


@allowed("torch.dot", ".dot", cost=3)
def dot(layout: Layout, x: Any, other: Any, /) -> Any:
    if len(tensor(x).dims) != 1 or tensor(other).dims != tensor(x).dims:
        raise RequestError("torch.dot takes two vectors of the same tokens")
    return _sum(layout, elementwise(layout, lambda a, b: a * b, x, other), None)


def _elementwise_loss(name: str, compute: Callable[[Any, Any, float], Any], setting: str = "") -> None:
    """Register a loss that depends on the difference of two tensors. `setting` names its only number (default: 1)."""

    @allowed(f"torch.nn.functional.{name}", cost=6)
    def loss(
        layout: Layout, x: Any, target: Any, /, *, reduction: Any = "mean", weight: Any = None, **settings: Any
    ) -> Any:
        if weight is not None or set(settings) - {setting}:
            raise RequestError(
                f"it takes reduction{setting and f' and {setting}'} only; multiply with reduction='none'"
            )
        size = number(setting, settings.get(setting, 1.0))
        losses = elementwise(layout, lambda a, b: compute(layout.xp, a - b, size), x, target)
        match reduction:
            case "none":
                return losses
            case "sum":
                return _sum(layout, losses, None)
            case "mean":
                return mean(layout, losses)
        raise RequestError(f"reduction={reduction!r:.100}: must be mean, sum or none")


def _huber(xp: Any, difference: Any, delta: float) -> Any:
    size = xp.abs(difference)
    return xp.where(size < delta, 0.5 * difference * difference, delta * (size - 0.5 * delta))


def _smooth_l1(xp: Any, difference: Any, beta: float) -> Any:
    return _huber(xp, difference, beta) / beta if beta else xp.abs(difference)


_elementwise_loss("mse_loss", lambda xp, difference, _: difference * difference)
_elementwise_loss("l1_loss", lambda xp, difference, _: xp.abs(difference))
_elementwise_loss("huber_loss", _huber, "delta")
_elementwise_loss("smooth_l1_loss", _smooth_l1, "beta")


# -- along the tokens -------------------------------------------------------------------------------------------------


@allowed("torch.cumsum", ".cumsum", cost=48)
def cumsum(layout: Layout, x: Any, /, dim: Any, *, dtype: Any = None) -> Any:
    """Compute running sums over a datum's tokens in log2(tokens) steps. Tokens of other datums are never added."""
    x = check_dtype(layout, layout.floats(tensor(x)), dtype)
    if not x.per_token or axis_of(x, dim) != 0:
        raise RequestError(
            f"dim={dim}: cumsum needs the token dimension, which {described(x.dims)} does not have there"
        )
    xp, array, by = layout.xp, x.array, 1
    position = layout.position[:, :, None] if x.wide else layout.position
    while by < array.shape[1]:
        before = xp.roll(array, by, axis=1)
        array = array + xp.where(position >= by, before, xp.zeros_like(before))
        by *= 2
    return layout.moved(Ragged(array, x.dims), 0, x.dims[0].dropped)


@allowed("torch.flip", ".flip", cost=3)
def flip(layout: Layout, x: Any, *dims: Any, **named: Any) -> Any:
    x = tensor(x)
    listed = named.get("dims", dims[0] if len(dims) == 1 else dims)
    if set(named) - {"dims"} or [
        axis_of(x, dim) for dim in (listed if isinstance(listed, tuple | list) else [listed])
    ] != [0]:
        raise RequestError(f"dims={listed!r:.100}: flip goes over the tokens, dimension 0")
    if not x.per_token:
        raise RequestError(f"flip needs the token dimension, which {described(x.dims)} does not have")
    return layout.reversed(x)


# -- shapes -----------------------------------------------------------------------------------------------------------


@allowed(".size")
def size(layout: Layout, x: Any, /, dim: Any = None) -> Any:
    x = tensor(x)
    return tuple(layout.size(one) for one in x.dims) if dim is None else layout.size(x.dims[axis_of(x, dim)])


@allowed(".numel", "torch.numel")
def numel(layout: Layout, x: Any, /) -> Any:
    return _size(layout, tensor(x), None)


@allowed(".dim")
def ndim(layout: Layout, x: Any, /) -> Any:
    return len(tensor(x).dims)


def _shaped(x: Ragged, dims: tuple[Dim, ...]) -> Ragged:
    if len(dims) > MAX_RANK or any(dim.kind == "tokens" for dim in dims[1:]):
        raise RequestError(f"shape {described(dims)}: keep the tokens first, and at most {MAX_RANK} dimensions")
    return Ragged(x.array, dims)


@allowed("torch.unsqueeze", ".unsqueeze")
def unsqueeze(layout: Layout, x: Any, /, dim: Any) -> Any:
    x = tensor(x)
    place = axis_of(Ragged(x.array, (*x.dims, ONE)), dim)
    return _shaped(x, (*x.dims[:place], ONE, *x.dims[place:]))


@allowed("torch.squeeze", ".squeeze")
def squeeze(layout: Layout, x: Any, /, dim: Any = None) -> Any:
    """Remove dimensions of 1. Dimensions of tokens or targets stay, even if a datum has only one."""
    x = tensor(x)
    axes = _axes(x, dim)
    return _shaped(x, tuple(one for place, one in enumerate(x.dims) if place not in axes or one.kind != "one"))


@allowed("operator.getitem")
def getitem(layout: Layout, x: Any, key: Any, /) -> Any:
    """Return an element of a shape, or a slice of a tensor.

    A key is an index or a slice along the tokens, an index along the targets, None, or a tuple of them.
    """
    if isinstance(x, tuple | list):
        if isinstance(key, bool) or not isinstance(key, int) or not -len(x) <= key < len(x):
            raise RequestError(f"index {key!r:.100} of a shape with {len(x)} dimensions")
        return x[key]
    x = tensor(x)
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(one, Ragged) for one in keys):
        raise RequestError("an index by a tensor has a shape that depends on its values; use torch.where or a product")
    places = sum(one is not None and one is not Ellipsis for one in keys)
    if places > len(x.dims) or keys.count(Ellipsis) > 1:
        raise RequestError(f"{places} indices for {described(x.dims)}")
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    keys[at : at + 1] = [slice(None)] * (len(x.dims) - places)
    value, dims = x, []
    left = list(x.dims)
    for one in keys:
        if one is None:
            dims.append(ONE)
            continue
        value, dim = _taken(layout, value, left.pop(0), one)
        dims += [] if dim is None else [dim]
    return _shaped(value, tuple(dims))


def _taken(layout: Layout, value: Ragged, dim: Dim, key: Any) -> tuple[Ragged, Dim | None]:
    """Index or slice one dimension of a value. Returns the value and the remaining dimension, if any."""
    if isinstance(key, slice):
        bounds = key.start or 0, key.stop, 1 if key.step is None else key.step
        if bounds == (0, None, 1):
            return value, dim
        begin, end, step = bounds
        cut = 0 if end is None else end
        if (
            dim.kind == "tokens"
            and step == 1
            and _is_int(begin)
            and begin >= 0
            and _is_int(cut)
            and cut <= 0
            and end != 0
        ):
            moved = layout.moved(value, begin, dim.dropped + begin - cut)
            return moved, moved.dims[0]
        raise RequestError(f"{key!r:.100}: slices are of tokens, from a place to the end or to a place from the end")
    if not _is_int(key) or abs(key) > 2**20:
        raise RequestError(f"index {key!r:.100} is not served; use a number, a slice, None or ...")
    if dim.kind == "one":
        if key not in (0, -1):
            raise RequestError(f"index {key} of a dimension of 1")
        return value, None
    if dim.kind == "tokens":
        if value.wide:
            raise RequestError("a token of [T, K] would be one value per target; take the target first")
        return Ragged(layout.token(value, key), ()), None
    if not 0 <= key < MAX_COLUMNS:
        raise RequestError(f"index {key} of targets: must be between 0 and {MAX_COLUMNS - 1}")
    layout.needs.columns = max(layout.needs.columns, key + 1)
    width = value.array.shape[2]
    return Ragged(
        value.array[:, :, min(key, width - 1)], tuple(one for one in value.dims if one.kind != "columns")
    ), None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


__all__ = ["ALLOWED"]
