"""Allowed operations of traced losses: the registry, and the elementwise functions.

An operation is found by its name in requests: `torch.exp`, `operator.add`, or `.exp` for a tensor method. A function
gets the layout of the data, and positional and keyword arguments with torch's names. It computes the same values and
gradients as torch, in float32; integers in the data become float32 too. To allow another operation, add a function
with `@allowed`. The result of the function must not be larger than a tile. `cost` is the number of arrays as large as a
tile that the function creates.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl.algorithms.losses import stop_gradient
from skyrl.algorithms.traced.graph import Constant
from skyrl.algorithms.traced.ragged import Layout, Operand, Ragged
from skyrl.errors import RequestError


@dataclass(frozen=True)
class Operation:
    """An allowed operation."""

    function: Callable[..., Any]
    signature: inspect.Signature
    cost: int

    def __call__(self, layout: Layout, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute the value. Raises `RequestError` for invalid arguments."""
        named = {"dim" if key == "axis" else key: value for key, value in kwargs.items() if key not in IGNORED}
        try:
            self.signature.bind(layout, *args, **named)
        except TypeError as error:
            raise RequestError(f"{error}; it takes {', '.join(list(self.signature.parameters)[1:])}") from None
        return self.function(layout, *args, **named)


ALLOWED: dict[str, Operation] = {}
IGNORED = {"_stacklevel", "inplace", "size_average", "reduce"}
"""Arguments of torch that do not affect values."""
DTYPES = ("float32", "float", "bool", "int64", "long", "int32", "int")


def allowed(*names: str, cost: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function under the names that requests use. See the module docstring for `cost`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        entry = Operation(function, inspect.signature(function), cost)
        ALLOWED.update(dict.fromkeys(names, entry))
        return function

    return register


def _names(*names: str) -> tuple[str, ...]:
    """Return two names for each operation, as requests use them: function and method (`torch.exp` and `.exp`)."""
    return tuple(text for name in names for text in (f"torch.{name}", f".{name}"))


def operand(value: Any) -> Operand:
    """Return the value as an operand. Raises `RequestError` unless it is a tensor or a number."""
    if isinstance(value, Ragged | int | float):
        return value
    raise RequestError(f"argument {value!r:.100}: must be a tensor or a number")


def elementwise(layout: Layout, function: Callable[..., Any], *values: Any) -> Any:
    """Apply `function` to the operands as float32 arrays. If all are plain numbers, each datum has the same value."""
    operands = [operand(value) for value in values]
    if not any(isinstance(value, Ragged) for value in operands):
        operands = [layout.number(value) for value in operands]
    floats = [layout.floats(value) if isinstance(value, Ragged) else value for value in operands]
    arrays, dims = layout.aligned(*floats)
    return Ragged(function(*arrays), dims)


def _unary(name: str, function: Callable[[Any, Any], Any], *more: str) -> None:
    allowed(*_names(name), *more)(lambda layout, x, /: elementwise(layout, lambda a: function(layout.xp, a), x))


def _binary(names: tuple[str, ...], function: Callable[[Any, Any, Any], Any]) -> None:
    allowed(*names)(lambda layout, x, other, /: elementwise(layout, lambda a, b: function(layout.xp, a, b), x, other))


def _sigmoid(xp: Any, a: Any) -> Any:
    return xp.exp(-xp.logaddexp(-a, xp.zeros_like(a)))


_unary("exp", lambda xp, a: xp.exp(a))
_unary("log", lambda xp, a: xp.log(a))
_unary("log2", lambda xp, a: xp.log(a) / math.log(2))
_unary("log10", lambda xp, a: xp.log(a) / math.log(10))
_unary("log1p", lambda xp, a: xp.log1p(a))
_unary("expm1", lambda xp, a: xp.expm1(a))
_unary("sqrt", lambda xp, a: xp.sqrt(a))
_unary("rsqrt", lambda xp, a: 1 / xp.sqrt(a))
_unary("square", lambda xp, a: a * a)
_unary("reciprocal", lambda xp, a: 1 / a)
_unary("sign", lambda xp, a: stop_gradient(xp.sign(a)))
_unary("floor", lambda xp, a: stop_gradient(xp.floor(a)))
_unary("ceil", lambda xp, a: stop_gradient(xp.ceil(a)))
_unary("round", lambda xp, a: stop_gradient(xp.round(a)))
_unary("tanh", lambda xp, a: xp.tanh(a))
_unary("abs", lambda xp, a: xp.abs(a), "operator.abs")
_unary("neg", lambda xp, a: -a, "operator.neg")
_unary("sigmoid", _sigmoid, "torch._C._special.special_expit", "torch.nn.functional.sigmoid")
_unary("relu", lambda xp, a: xp.where(a > 0, a, xp.zeros_like(a)), "torch.nn.functional.relu")
_unary(
    "logsigmoid",
    lambda xp, a: -xp.logaddexp(-a, xp.zeros_like(a)),
    "torch._C._nn.log_sigmoid",
    "torch.nn.functional.logsigmoid",
)
_binary(("torch.maximum", ".maximum"), lambda xp, a, b: xp.maximum(a, b))
_binary(("torch.minimum", ".minimum"), lambda xp, a, b: xp.minimum(a, b))
_binary((*_names("logaddexp"),), lambda xp, a, b: xp.logaddexp(a, b))
_binary((*_names("mul", "multiply"), "operator.mul", "operator.imul"), lambda xp, a, b: a * b)
_binary((*_names("pow"), "operator.pow"), lambda xp, a, b: xp.pow(a, b))
_binary((*_names("floor_divide"), "operator.floordiv"), lambda xp, a, b: stop_gradient(xp.floor(a / b)))
_binary((*_names("remainder"), "operator.mod"), lambda xp, a, b: a - b * stop_gradient(xp.floor(a / b)))
_binary((*_names("eq"), "operator.eq"), lambda xp, a, b: a == b)
_binary((*_names("ne", "not_equal"), "operator.ne"), lambda xp, a, b: a != b)
_binary((*_names("lt", "less"), "operator.lt"), lambda xp, a, b: a < b)
_binary((*_names("le", "less_equal"), "operator.le"), lambda xp, a, b: a <= b)
_binary((*_names("gt", "greater"), "operator.gt"), lambda xp, a, b: a > b)
_binary((*_names("ge", "greater_equal"), "operator.ge"), lambda xp, a, b: a >= b)
_unary("isnan", lambda xp, a: xp.isnan(a))
_unary("isfinite", lambda xp, a: xp.isfinite(a))
_unary("isinf", lambda xp, a: xp.isinf(a))


@allowed(*_names("add"), "operator.add", "operator.iadd")
def add(layout: Layout, x: Any, other: Any, /, *, alpha: Any = 1) -> Any:
    return elementwise(layout, lambda a, b, c: a + c * b, x, other, number("alpha", alpha))


@allowed(*_names("sub", "subtract"), "operator.sub", "operator.isub")
def sub(layout: Layout, x: Any, other: Any, /, *, alpha: Any = 1) -> Any:
    return elementwise(layout, lambda a, b, c: a - c * b, x, other, number("alpha", alpha))


@allowed(*_names("div", "divide", "true_divide"), "operator.truediv", "operator.itruediv")
def div(layout: Layout, x: Any, other: Any, /, *, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        raise RequestError(f"rounding_mode={rounding_mode!r} is not served; use torch.floor_divide")
    return elementwise(layout, lambda a, b: a / b, x, other)


@allowed("torch._C._nn.softplus", "torch.nn.functional.softplus")
def softplus(layout: Layout, x: Any, /, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    xp, b, limit = layout.xp, number("beta", beta), number("threshold", threshold)

    def compute(a: Any) -> Any:
        linear = a * b > limit
        bent = xp.where(linear, xp.zeros_like(a), a)
        return xp.where(linear, a, xp.logaddexp(bent * b, xp.zeros_like(a)) / b)

    return elementwise(layout, compute, x)


@allowed(*_names("clamp", "clip"))
def clamp(layout: Layout, x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Clamp values; a value on a bound keeps its gradient, as in torch."""
    xp = layout.xp
    if min is not None:
        x = elementwise(layout, lambda a, low: xp.where(a < low, low, a), x, min)
    if max is not None:
        x = elementwise(layout, lambda a, high: xp.where(a > high, high, a), x, max)
    return x


@allowed(*_names("clamp_min"))
def clamp_min(layout: Layout, x: Any, /, min: Any) -> Any:
    return clamp(layout, x, min=min)


@allowed(*_names("clamp_max"))
def clamp_max(layout: Layout, x: Any, /, max: Any) -> Any:
    return clamp(layout, x, max=max)


def truth(layout: Layout, value: Any) -> Ragged:
    """Return the value if it is boolean. Raises `RequestError` for other values, like torch's functions on masks."""
    if not layout.is_bool(value):
        raise RequestError("a mask must be a comparison, or a tensor after .bool()")
    return value


def _logical(layout: Layout, function: Callable[..., Any], *values: Any) -> Ragged:
    arrays, dims = layout.aligned(*(truth(layout, value) for value in values))
    return Ragged(function(*arrays), dims)


@allowed(*_names("logical_and", "bitwise_and"), "operator.and_")
def logical_and(layout: Layout, x: Any, other: Any, /) -> Any:
    return _logical(layout, layout.xp.logical_and, x, other)


@allowed(*_names("logical_or", "bitwise_or"), "operator.or_")
def logical_or(layout: Layout, x: Any, other: Any, /) -> Any:
    return _logical(layout, layout.xp.logical_or, x, other)


@allowed(*_names("logical_xor", "bitwise_xor"), "operator.xor")
def logical_xor(layout: Layout, x: Any, other: Any, /) -> Any:
    return _logical(layout, layout.xp.logical_xor, x, other)


@allowed(*_names("logical_not", "bitwise_not"), "operator.invert")
def logical_not(layout: Layout, x: Any, /) -> Any:
    return _logical(layout, layout.xp.logical_not, x)


@allowed(*_names("where"))
def where(layout: Layout, condition: Any, x: Any, other: Any, /) -> Any:
    mask = layout.floats(truth(layout, condition))
    return elementwise(layout, lambda m, a, b: layout.xp.where(m != 0, a, b), mask, x, other)


@allowed(".where")
def where_method(layout: Layout, x: Any, condition: Any, other: Any, /) -> Any:
    return where(layout, condition, x, other)


@allowed(*_names("masked_fill"))
def masked_fill(layout: Layout, x: Any, mask: Any, value: Any, /) -> Any:
    return where(layout, mask, value, x)


# -- types and copies -------------------------------------------------------------------------------------------------


@allowed(".detach", "torch.detach")
def detach(layout: Layout, x: Any, /) -> Any:
    return Ragged(stop_gradient(tensor(x).array), tensor(x).dims)


@allowed("torch.clone", ".clone", ".contiguous", ".cpu", "torch.atleast_1d")
def same(layout: Layout, x: Any, /, *, memory_format: Any = None) -> Any:
    return tensor(x)


@allowed(".float")
def to_float(layout: Layout, x: Any, /) -> Any:
    return layout.floats(tensor(x))


@allowed(".bool")
def to_bool(layout: Layout, x: Any, /) -> Any:
    x = tensor(x)
    return x if layout.is_bool(x) else Ragged(x.array != 0, x.dims)


@allowed(".long", ".int")
def to_integer(layout: Layout, x: Any, /) -> Any:
    x = layout.floats(tensor(x))
    return Ragged(stop_gradient(layout.xp.trunc(x.array)), x.dims)


@allowed(".to", ".type")
def to(layout: Layout, x: Any, *others: Any, dtype: Any = None, device: Any = None, **same_values: Any) -> Any:
    """Convert the value to another dtype. Devices are ignored."""
    result = tensor(x)
    for other in (*others, dtype, device):
        if isinstance(other, Constant) and other.kind == "dtype":
            result = _as_dtype(layout, result, other)
        elif layout.is_bool(other):
            result = to_bool(layout, result)
        elif isinstance(other, Ragged):
            result = layout.floats(result)
    return result


@allowed(".type_as")
def type_as(layout: Layout, x: Any, other: Any, /) -> Any:
    return to(layout, x, tensor(other))


@allowed("torch.zeros_like")
def zeros_like(layout: Layout, x: Any, /, *, dtype: Any = None, **same_values: Any) -> Any:
    return full_like(layout, x, 0.0, dtype=dtype)


@allowed("torch.ones_like")
def ones_like(layout: Layout, x: Any, /, *, dtype: Any = None, **same_values: Any) -> Any:
    return full_like(layout, x, 1.0, dtype=dtype)


@allowed("torch.full_like")
def full_like(layout: Layout, x: Any, fill_value: Any, *, dtype: Any = None, **same_values: Any) -> Any:
    x = layout.floats(tensor(x))
    filled = Ragged(layout.xp.zeros_like(x.array) + number("fill_value", fill_value), x.dims)
    return filled if dtype is None else _as_dtype(layout, filled, dtype)


# -- Python's own -----------------------------------------------------------------------------------------------------


@allowed("getattr")
def attribute(layout: Layout, x: Any, name: Any, /) -> Any:
    x = tensor(x)
    match name:
        case "shape":
            return tuple(layout.size(dim) for dim in x.dims)
        case "ndim":
            return len(x.dims)
        case "dtype":
            return Constant("dtype", "bool" if layout.is_bool(x) else "float32")
        case "device":
            return Constant("device", "cpu")
    raise RequestError(f"attribute {name!r:.100}: only shape, ndim, dtype and device are served")


def _of_a_size(function: str, compute: Callable[[Any, Any], Any]) -> None:
    """Register a function of Python's `math` module. Its result has no gradient, because it is a Python number."""

    @allowed(f"math.{function}")
    def ofnumber(layout: Layout, x: Any, /) -> Any:
        if isinstance(x, Ragged) and any(dim.kind != "one" for dim in x.dims):
            raise RequestError(f"math.{function} takes a number, not one per token; use torch.{function}")
        result = elementwise(layout, lambda a: stop_gradient(compute(layout.xp, a)), x)
        return Ragged(result.array, ())


_of_a_size("sqrt", lambda xp, a: xp.sqrt(a))
_of_a_size("log", lambda xp, a: xp.log(a))
_of_a_size("exp", lambda xp, a: xp.exp(a))


# -- arguments --------------------------------------------------------------------------------------------------------


def tensor(value: Any) -> Ragged:
    """Return a tensor argument. Raises `RequestError` for other values."""
    if isinstance(value, Ragged):
        return value
    raise RequestError(f"argument {value!r:.100}: must be a tensor")


def number(name: str, value: Any) -> float:
    """Return a number argument. Raises `RequestError` for other values."""
    if isinstance(value, bool | int | float):
        return float(value)
    raise RequestError(f"{name}={value!r:.100}: must be a number")


def _as_dtype(layout: Layout, x: Ragged, dtype: Any) -> Ragged:
    if not isinstance(dtype, Constant) or dtype.name not in DTYPES:
        name = dtype.name if isinstance(dtype, Constant) else dtype
        raise RequestError(f"dtype={name!r:.100} is not served; losses are computed in float32")
    if dtype.name == "bool":
        return to_bool(layout, x)
    return layout.floats(x) if dtype.name.startswith("float") else to_integer(layout, x)


def check_dtype(layout: Layout, x: Ragged, dtype: Any) -> Ragged:
    """Apply the `dtype` argument of an operation; None keeps the type."""
    return x if dtype is None else _as_dtype(layout, x, dtype)
