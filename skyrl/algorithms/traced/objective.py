"""Traced losses as objectives of backends. The text of the graph identifies the objective.

The graph maps the log-probabilities of one datum to one number. Its gradient with respect to them is computed here, in
the training step, and used as the constant factor of each log-probability. The result equals that of the SDK's
`forward_backward_custom`, which needs two passes, and a computation of the client between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from skyrl.algorithms.arrays import Tokens
from skyrl.algorithms.losses import LARGEST, LossInputs, gradient_of, stop_gradient
from skyrl.algorithms.objective import Objective, Output
from skyrl.algorithms.traced.graph import LOGPROBS, METRIC_NAME, Constant, Graph, Node, Ref, read_graph
from skyrl.algorithms.traced.operations import Operation
from skyrl.algorithms.traced.ragged import COLUMNS, Layout, Ragged, described
from skyrl.algorithms.traced.reductions import ALLOWED
from skyrl.errors import RequestError
from skyrl.types import ForwardBackwardOutput

MAX_COST = 512
"""Maximum total cost of a graph's operations. The unit is one array as large as a tile."""
MAX_METRICS = 32
CALLS = ("call_function", "call_method")

Metrics = dict[str, Float[Any, "batch segments"]]
"""One number per datum for each metric, by name."""


@dataclass(frozen=True)
class TracedObjective:
    """A traced loss. Objectives with equal texts are equal. Created by `traced_objective`."""

    specification: str
    """See `specification_of`."""
    graph: Graph = field(compare=False, repr=False)
    min_tokens: int = field(default=1, compare=False)
    """Minimum number of tokens per datum for which the loss is defined, such as 2 if it reads the second token."""
    min_columns: int = field(default=1, compare=False)
    """Minimum number of targets per token for which the loss is defined."""
    needs: tuple[str, ...] = field(default=(), init=False)
    inputs: tuple[str, ...] = field(default=(), init=False)
    outputs: tuple[Output, ...] = field(default=(LOGPROBS,), init=False)
    multiple_of: tuple[str, ...] = field(default=(), init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return traced_objective, (self.specification,)

    def __call__(self, x: LossInputs) -> Tokens:
        """Return the loss of each token `[batch, tokens]`.

        The first token of a datum has the whole loss of the datum, the others 0.
        """
        return self.measured(x)[0]

    def measured(self, x: LossInputs) -> tuple[Tokens, Metrics]:
        """Return the loss of each token, and the metrics of each datum.

        The loss of a datum is NaN if the loss, or any element of its gradient, is not finite or exceeds LARGEST in
        magnitude. `refuse_not_finite` then rejects the pass.
        """
        assert x.named is not None and x.segments is not None, "a traced loss reads `named` inputs by datum"
        logprobs = x.named[LOGPROBS]
        layout = Layout(x.segments, x.num_segments, x.logprobs, x.named.get(COLUMNS))
        xp = layout.xp

        def compute(learner: Any) -> tuple[Any, tuple[Any, dict[str, Any]]]:
            assert x.named is not None
            loss, metrics = evaluate(self.graph, layout, {**x.named, LOGPROBS: learner})
            real = xp.where(xp.isfinite(loss), loss, xp.zeros_like(loss))
            return xp.sum(real[:, :-1]), (loss, metrics)

        gradient, (loss, metrics) = gradient_of(compute, logprobs)
        good = xp.abs(gradient) <= LARGEST
        gradient = xp.where(good, gradient, xp.zeros_like(gradient))
        bad_tokens = xp.astype(~good, gradient.dtype)
        bad = layout.total(bad_tokens if bad_tokens.ndim == 2 else xp.sum(bad_tokens, axis=2))
        loss = xp.where((bad > 0) | ~(xp.abs(loss) <= LARGEST), xp.full_like(loss, xp.nan), loss)
        at_first = xp.where(layout.position == 0, layout.spread(stop_gradient(loss)), xp.zeros_like(x.logprobs))
        linear = gradient * (logprobs - stop_gradient(logprobs))
        linear = linear if linear.ndim == 2 else xp.sum(linear, axis=2)
        here = x.segments >= 0
        zero = xp.zeros_like(x.logprobs)
        tokens = xp.where(here, at_first, zero) + xp.where(here, linear, zero)
        return tokens, {name: stop_gradient(value)[:, :-1] for name, value in metrics.items()}


@lru_cache(maxsize=64)
def traced_objective(specification: str) -> TracedObjective:
    """Return the objective of a graph in normal form.

    Raises `RequestError` for operations that are not allowed, and for shapes that cannot be computed for all datums
    together. The message names the node and the rule. `MAX_COST` is not checked, because a stored graph may be older
    than the limit.
    """
    graph = read_graph(specification)
    layout = _example_layout(graph)
    named = {name: np.full((1, 6, 2) if rank == 2 else (1, 6), -0.5, np.float32) for name, rank in graph.inputs}
    with np.errstate(all="ignore"):
        evaluate(graph, layout, named)
    return TracedObjective(specification, graph, layout.needs.tokens, layout.needs.columns)


def measured(objective: Objective, x: LossInputs) -> tuple[Tokens, Metrics]:
    """Return the loss of each token and the metrics of each datum. Only traced objectives have metrics."""
    return objective.measured(x) if isinstance(objective, TracedObjective) else (objective(x), {})


def refuse_not_finite(output: ForwardBackwardOutput) -> None:
    """Raise `RequestError` if the result of a pass contains a NaN that `TracedObjective.measured` has set."""
    for i, arrays in enumerate(output.loss_fn_outputs):
        if not np.isfinite(arrays["elementwise_loss"]).all():
            raise RequestError(
                f"datum {i}: the custom loss, or its gradient with respect to logprobs, is not finite or above "
                f"{LARGEST:g}; bound what it divides by and takes the logarithm or root of"
            )


def evaluate(graph: Graph, layout: Layout, named: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Evaluate loss and metrics of each datum. They are `[batch, slots]`; see `ragged` for slots.

    Args:
        graph: The loss.
        layout: Positions of the datums.
        named: Packed inputs, `[batch, tokens]`, or `[batch, tokens, targets]` for rank 2.

    Raises `RequestError` for operations that are not allowed.
    """
    ranks, values = dict(graph.inputs), []
    for place, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            values.append(layout.input(named[node.target], ranks[node.target]))
            continue
        args, kwargs = _resolved(node.args, values), _resolved(dict(node.kwargs), values)
        if node.op == "output":
            return _outputs(graph, args, layout)
        try:
            values.append(_operation(node)(layout, args, kwargs))
        except RequestError as error:
            raise RequestError(f"graph.nodes[{place}] ({node.target}): {error}") from None
    raise AssertionError("the last node is the output")


def _outputs(graph: Graph, args: Any, layout: Layout) -> tuple[Any, dict[str, Any]]:
    match args:
        case ((Ragged() as loss, dict() as metrics),) | ([Ragged() as loss, dict() as metrics],):
            pass
        case _:
            raise RequestError("output: a loss returns (loss, metrics), a scalar tensor and a dict of scalar tensors")
    if not _depends_on_logprobs(graph):
        raise RequestError("output: the loss does not depend on logprobs, so there is nothing to train")
    if len(metrics) > MAX_METRICS:
        raise RequestError(f"output: {len(metrics)} metrics; a loss has at most {MAX_METRICS}")
    for name, value in (("loss", loss), *metrics.items()):
        if name != "loss" and not METRIC_NAME.fullmatch(name):
            raise RequestError(f"output: metric {name!r} must be named custom/<name>:sum or custom/<name>:mean")
        if not isinstance(value, Ragged) or value.dims:
            shape = described(value.dims) if isinstance(value, Ragged) else f"{value!r:.100}"
            raise RequestError(f"output: {name} must be a scalar tensor, not {shape}; reduce it, as by .sum()")
    return layout.floats(loss).array, {name: layout.floats(value).array for name, value in metrics.items()}


def _depends_on_logprobs(graph: Graph) -> bool:
    def refs(arg: Any) -> set[int]:
        match arg:
            case Ref(node):
                return {node}
            case list() | tuple():
                return set().union(*map(refs, arg))
            case dict():
                return set().union(*map(refs, arg.values()))
            case slice(start=start, stop=stop, step=step):
                return refs((start, stop, step))
        return set()

    (output,) = graph.nodes[-1].args
    wanted = refs(output[0])
    for place in reversed(range(len(graph.nodes))):
        if place in wanted:
            wanted |= refs(graph.nodes[place].args) | refs(dict(graph.nodes[place].kwargs))
    return any(graph.nodes[place].target == LOGPROBS and graph.nodes[place].op == "placeholder" for place in wanted)


def check_new(specification: str) -> None:
    """Check a new graph. Raises `RequestError` if it exceeds `MAX_COST` or `traced_objective` rejects it."""
    operations = [ALLOWED.get(_key(node)) for node in read_graph(specification).nodes if node.op in CALLS]
    total = sum(operation.cost for operation in operations if operation is not None)
    if total > MAX_COST:
        raise RequestError(
            f"graph: its operations cost {total}, more than {MAX_COST} (one for each array of a batch's size that is "
            "made; cumsum costs most); use fewer, or forward_backward_custom with the function itself"
        )
    traced_objective(specification)


def _operation(node: Node) -> Operation:
    operation = ALLOWED.get(_key(node))
    if operation is None:
        raise RequestError(
            "this operation is not on the list of what traced losses may call; use others, or pass the function itself "
            "to forward_backward_custom, which runs it on the client"
        )
    return operation


def _key(node: Node) -> str:
    return f".{node.target}" if node.op == "call_method" else node.target


def _resolved(arg: Any, values: list[Any]) -> Any:
    """Return an argument in which each reference is replaced by its value."""
    match arg:
        case Ref(node):
            return values[node]
        case list():
            return [_resolved(inner, values) for inner in arg]
        case tuple():
            return tuple(_resolved(inner, values) for inner in arg)
        case dict():
            return {key: _resolved(inner, values) for key, inner in arg.items()}
        case slice(start=start, stop=stop, step=step):
            return slice(*(_resolved(inner, values) for inner in (start, stop, step)))
        case Constant() | None | bool() | int() | float() | str():
            return arg
    return arg


def _example_layout(graph: Graph) -> Layout:
    """Return the layout of a row with two small datums. It is used to check the shapes of a graph."""
    segments = np.asarray([[0, 0, 0, 1, 1, -1]], np.int32)
    return Layout(segments, 2, np.zeros((1, 6), np.float32), np.full((1, 6), 2, np.float32))
