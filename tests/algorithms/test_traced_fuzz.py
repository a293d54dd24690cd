"""Graphs that no SDK would send: only what is on the list is computed, in bounded time and memory."""

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from skyrl.algorithms.traced import objective
from skyrl.algorithms.traced.graph import MAX_NODES, specification_of
from skyrl.algorithms.traced.objective import MAX_COST, check_new, traced_objective
from skyrl.algorithms.traced.reductions import ALLOWED
from skyrl.errors import RequestError

INPUTS = [("logprobs", 1), ("old", 1), ("teacher", 2), ("margin", 0)]
FUNCTIONS = sorted(name for name in ALLOWED if not name.startswith("."))
METHODS = sorted(name[1:] for name in ALLOWED if name.startswith("."))
HOSTILE = [
    *(f"torch.{name}" for name in dir(torch)),
    *(f"torch.nn.functional.{name}" for name in dir(torch.nn.functional)),
    *("eval", "exec", "open", "__import__", "os.system", "builtins.getattr", "torch.load", "operator.attrgetter"),
    *("operator.methodcaller", "operator.matmul", "operator.call", "math.factorial", "math.perm", "getattr\0", ""),
]
HOSTILE_METHODS = [*dir(torch.Tensor), "__class__", "__reduce__", "__init_subclass__", "backward", "item", "numpy"]


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def graph(*steps: dict[str, Any], inputs=INPUTS, loss: str | None = None) -> tuple[list, list]:
    """A graph whose last step, summed, is its loss."""
    last = loss or (steps[-1]["name"] if steps else "logprobs")
    return inputs, [
        *(node("placeholder", name, name) for name, _ in inputs),
        *steps,
        node("call_method", "total", "sum", {"ref": last}),
        node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}),
    ]


def refused(steps: tuple[list, list], *texts: str) -> str:
    with pytest.raises(RequestError) as error:
        check_new(specification_of(*steps))
    assert all(text in str(error.value) for text in texts), error.value
    assert len(str(error.value)) < 2000
    return str(error.value)


def test_no_function_or_method_outside_the_list_passes():
    logprobs = {"ref": "logprobs"}
    for target in set(HOSTILE) - set(FUNCTIONS):
        refused(
            graph(node("call_function", "step", target, logprobs)), "not on the list of what traced losses may call"
        )
    for target in set(HOSTILE_METHODS) - set(METHODS):
        refused(graph(node("call_method", "step", target, logprobs)), "not on the list of what traced losses may call")
    for op in ("get_attr", "call_module", "exec"):
        refused(graph(node(op, "step", "weight")), f"op={op!r} is not served")


def test_no_attribute_of_a_value_can_be_had_but_its_shape_and_type():
    for name in ("__class__", "array", "data", "grad", "T", "dims", "", 3, None, ["shape"]):
        refused(graph(node("call_function", "step", "getattr", {"ref": "logprobs"}, name)), "(getattr)")


def some_argument(draw: np.random.Generator, names: list[str], depth: int = 0) -> Any:
    kinds = [
        lambda: {"ref": names[draw.integers(len(names))]},
        lambda: int(draw.integers(-3, 4)),
        lambda: float(draw.normal() * 10.0 ** draw.integers(-3, 4)),
        lambda: [None, True, "mean", "none", "shape", "\0"][draw.integers(6)],
        lambda: {"slice": [some_scalar(draw), some_scalar(draw), None]},
        lambda: {"ellipsis": True},
        lambda: {"float": ["inf", "-inf", "nan"][draw.integers(3)]},
        lambda: {"dtype": ["float32", "bool", "float64", "int64"][draw.integers(4)]},
        lambda: {"tuple": [some_argument(draw, names, depth + 1) for _ in range(draw.integers(4))]},
        lambda: [some_argument(draw, names, depth + 1) for _ in range(draw.integers(3))],
        lambda: {["dict", "device", "ref", "x"][draw.integers(4)]: {"a": 1}},
    ]
    weights = np.asarray([12, 4, 3, 1, 2, 1, 1, 1, 1.5 * (depth < 4), 0.5 * (depth < 4), 0.1])
    return kinds[draw.choice(len(kinds), p=weights / weights.sum())]()


def some_scalar(draw: np.random.Generator) -> int | None:
    return [None, 0, 1, 2, -1, -2, 10**9][draw.integers(7)]


def test_random_graphs_are_computed_or_refused_quickly_and_in_little_memory():
    draw, outcomes = np.random.default_rng(0), {"refused": 0, "accepted": 0}
    traced_objective(specification_of(*graph()))  # imports are not what is measured
    tracemalloc.start()
    for _ in range(400):
        names, steps = [name for name, _ in INPUTS], []
        for i in range(draw.integers(1, 5)):
            method = draw.random() < 0.4
            target = (METHODS if method else FUNCTIONS)[draw.integers(len(METHODS if method else FUNCTIONS))]
            args = [{"ref": names[draw.integers(len(names))]}]
            args += [some_argument(draw, names) for _ in range(draw.choice([0, 1, 2], p=[0.45, 0.45, 0.1]))]
            keys = draw.choice(["dim", "keepdim", "min", "dtype", "reduction"], draw.integers(2), replace=False)
            steps.append(
                node(
                    "call_method" if method else "call_function",
                    f"step{i}",
                    target,
                    *args,
                    **{str(key): some_argument(draw, names) for key in keys},
                )
            )
            names.append(f"step{i}")
        steps.append(node("call_function", "joined", "operator.add", {"ref": names[-1]}, {"ref": "logprobs"}))
        begin = time.process_time()
        try:
            traced_objective(specification_of(*graph(*steps)))
            outcomes["accepted"] += 1
        except RequestError as error:
            outcomes["refused"] += 1
            assert "graph" in str(error) or "output" in str(error), error
        assert time.process_time() - begin < 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20
    assert min(outcomes.values()) > 10, outcomes


def chain(count: int, target: str, *args: Any) -> tuple[list, list]:
    names = ["logprobs", *(f"step{i}" for i in range(count))]
    return graph(*(node("call_function", names[i + 1], target, {"ref": names[i]}, *args) for i in range(count)))


def test_graphs_that_are_too_large_are_refused_before_they_are_computed():
    refused(chain(MAX_NODES, "torch.exp"), f"a graph has 1 to {MAX_NODES}")
    refused(chain(12, "torch.cumsum", 0), f"more than {MAX_COST}")
    refused(graph(node("call_function", "step", "torch.exp", [1] * 100)), "over 64 arguments")
    many = [node("call_function", f"step{i}", "torch.exp", [0] * 60) for i in range(80)]
    refused(graph(*many), "or 4096 in all nodes")
    deep: Any = {"ref": "logprobs"}
    for _ in range(50):
        deep = [deep]
    refused(graph(node("call_function", "step", "torch.exp", deep)), "more than 6 levels")
    refused(graph(node("call_function", "step", "x" * 10_000)), "longer than 200 characters")
    refused(graph(node("call_function", "step", "operator.mul", "x", 10**9)), "must be a tensor or a number")
    refused(graph(node("call_function", "step", "operator.pow", 10, 10**4000)), "above 1e+30 in magnitude")
    refused(graph(inputs=[("logprobs", 1), *((f"x{i}", 1) for i in range(16))]), "a loss takes 1 to 16")


def test_a_stored_loss_outlives_a_smaller_bound_but_not_its_operations(monkeypatch):
    """A pass that was accepted is done again after a restart, whatever the server then takes of new losses."""
    monkeypatch.setattr(objective, "MAX_COST", 2)
    specification = specification_of(*chain(5, "torch.exp"))
    refused(chain(5, "torch.exp"), "more than 2")
    assert traced_objective(specification).specification == specification
    traced_objective.cache_clear()
    monkeypatch.delitem(objective.ALLOWED, "torch.exp")
    with pytest.raises(RequestError, match=r"graph\.nodes\[4\] \(torch\.exp\): this operation is not on the list"):
        traced_objective(specification)


def test_powers_of_numbers_are_computed_as_floats():
    """As integers 9 ** 9 ** 9 would take hours."""
    steps = [node("call_function", "step0", "operator.pow", 9, 9)]
    steps += [node("call_function", f"step{i}", "operator.pow", 9, {"ref": f"step{i - 1}"}) for i in range(1, 5)]
    joined = node("call_function", "joined", "operator.add", {"ref": "step4"}, {"ref": "logprobs"})
    traced_objective(specification_of(*graph(*steps, joined)))


def test_values_larger_than_the_data_are_refused_by_shape():
    column = node("call_method", "column", "unsqueeze", {"ref": "logprobs"}, -1)
    refused(graph(node("call_method", "row", "unsqueeze", {"ref": "logprobs"}, 0)), "[1, T]", "keep the tokens first")
    square = node("call_function", "square", "operator.mul", {"ref": "logprobs"}, {"ref": "column"})
    refused(graph(column, square), "(operator.mul)", "would be larger than the data")
    refused(graph(node("call_method", "sums", "sum", {"ref": "teacher"}, 0)), "one value per target")
    refused(graph(node("call_function", "both", "operator.add", {"ref": "logprobs"}, {"ref": "teacher"})), "[T, K]")


def test_what_is_no_graph_is_refused_by_its_node():
    good = node("call_function", "step", "torch.exp", {"ref": "logprobs"})
    refused(graph({**good, "args": [{"ref": "later"}]}), "graph.nodes[4] (torch.exp)", "no node before this one")
    refused(graph(good, good), "there is a node 'step' before")
    refused(graph(node("output", "early", "output")), "one output, which is its last node")
    refused(graph(good, inputs=[("old", 1), ("logprobs", 1)]), "the first must be logprobs")
    refused(graph(inputs=[("logprobs", 1), ("Old", 1)]), "inputs[1].name='Old'")
    refused(graph(inputs=[("logprobs", 3)]), "inputs[0].rank=3")
    refused((INPUTS, [one for one in graph()[1] if one["name"] != "margin"]), "they must be the same")
    refused(graph(node("call_method", "step", "sum", {"ref": "old"})), "does not depend on logprobs")
    refused(graph(node("call_function", "step", "torch.exp")), "(torch.exp)", "missing a required argument")
    inputs, nodes = graph()
    nodes[-1] = node("output", "output", "output", {"tuple": [{"ref": "logprobs"}, {"dict": {}}]})
    refused((inputs, nodes), "loss must be a scalar tensor, not [T]")
    nodes[-1] = node(
        "output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {"loss:sum": {"ref": "total"}}}]}
    )
    refused((inputs, nodes), "metric 'loss:sum' must be named custom/<name>:sum")
