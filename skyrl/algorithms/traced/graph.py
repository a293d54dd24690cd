"""Parser of the graph of a traced loss. It produces a text in a normal form that identifies the loss.

Node names are replaced by numbers, and the graph is written as JSON with sorted keys. Equal losses thus have equal
texts in all sessions. The limits here bound the work of all later code that reads a graph.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from skyrl.errors import RequestError

MAX_INPUTS = 16
"""Maximum number of inputs of a loss, including `logprobs`."""
MAX_NODES = 256
"""Maximum number of nodes of a graph."""
MAX_ARGUMENTS = 64
"""Maximum number of values, including nested values, in the arguments of one node."""
MAX_ALL_ARGUMENTS = 4096
"""Maximum number of values in the arguments of all nodes."""
MAX_DEPTH = 6
"""Maximum nesting depth of an argument. A tuple of slices has depth two."""
MAX_NAME = 200
"""Maximum length of a name, in characters."""
LARGEST_NUMBER = 1e30
"""Maximum magnitude of a constant."""
LOGPROBS = "logprobs"
INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
KINDS = ("placeholder", "call_function", "call_method", "output")
CONSTANTS = ("dtype", "device", "layout", "memory_format")
FLOATS = ("inf", "-inf", "nan")


@dataclass(frozen=True)
class Ref:
    """Reference to the value of an earlier node."""

    node: int


@dataclass(frozen=True)
class Constant:
    """A constant of torch, such as a dtype."""

    kind: str
    name: str


@dataclass(frozen=True)
class Node:
    """One step of a loss."""

    op: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Graph:
    """A traced loss, parsed."""

    inputs: tuple[tuple[str, int], ...]
    """Name and rank of each input: 0 for a scalar, 1 for `[tokens]`, 2 for `[tokens, targets]`.

    The first is `logprobs`.
    """
    nodes: tuple[Node, ...]
    """Nodes in the order of evaluation. The last one is the output (loss and metrics)."""


def specification_of(inputs: Sequence[tuple[str, int]], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the normal form of a graph from a client, as text.

    Each of `nodes` has `op`, `name`, `target`, `args` and `kwargs`. Raises `RequestError` for an invalid graph; the
    message names the node and the rule. `traced_objective` checks later whether the operations are allowed.
    """
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise RequestError(f"inputs: {len(inputs)} of them; a loss takes 1 to {MAX_INPUTS}, logprobs included")
    for place, (name, rank) in enumerate(inputs):
        if not INPUT_NAME.fullmatch(name):
            raise RequestError(f"inputs[{place}].name={name[:MAX_NAME]!r}: use lowercase letters, digits and _")
        if rank not in (0, 1, 2):
            raise RequestError(f"inputs[{place}].rank={rank}: must be 0, 1 or 2")
    names = [name for name, _ in inputs]
    if len(set(names)) != len(names):
        raise RequestError(f"inputs: duplicate name in {names}; give each parameter its own name")
    if inputs[0][0] != LOGPROBS or inputs[0][1] == 0:
        raise RequestError(f"inputs[0]={names[0]!r} of rank {inputs[0][1]}: the first must be logprobs of rank 1 or 2")
    if not 1 <= len(nodes) <= MAX_NODES:
        raise RequestError(f"graph.nodes: {len(nodes)} of them; a graph has 1 to {MAX_NODES}")
    numbers: dict[str, int] = {}
    normal, left = [], MAX_ALL_ARGUMENTS
    for place, node in enumerate(nodes):
        where = f"graph.nodes[{place}]"
        name, op, target = (str(node[key]) for key in ("name", "op", "target"))
        if max(len(name), len(target)) > MAX_NAME:
            raise RequestError(f"{where}: name or target is longer than {MAX_NAME} characters")
        where = f"{where} ({target})"
        if name in numbers:
            raise RequestError(f"{where}: there is a node {name!r} before; names are unique")
        if op not in KINDS:
            raise RequestError(f"{where}: op={op!r} is not served; use functions and methods of torch tensors only")
        if (op == "output") != (place == len(nodes) - 1):
            raise RequestError(f"{where}: a graph has one output, which is its last node")
        reader = _Reader(where, numbers, min(left, MAX_ARGUMENTS))
        args = [reader.normal(arg) for arg in node["args"]]
        kwargs = {reader.text(str(key)): reader.normal(arg) for key, arg in node["kwargs"].items()}
        left -= reader.taken
        normal.append({"op": op, "target": target, "args": args, "kwargs": kwargs})
        numbers[name] = place
    placeholders = [node["target"] for node in normal if node["op"] == "placeholder"]
    if placeholders != names:
        raise RequestError(f"graph: its placeholders are {placeholders}, its inputs {names}; they must be the same")
    return json.dumps({"inputs": [list(item) for item in inputs], "nodes": normal}, sort_keys=True)


@lru_cache(maxsize=64)
def read_graph(specification: str) -> Graph:
    """Parse a text that `specification_of` returned."""
    spec = json.loads(specification)
    nodes = tuple(
        Node(
            node["op"],
            node["target"],
            tuple(_value(arg) for arg in node["args"]),
            {key: _value(arg) for key, arg in node["kwargs"].items()},
        )
        for node in spec["nodes"]
    )
    return Graph(tuple((name, rank) for name, rank in spec["inputs"]), nodes)


class _Reader:
    """Reads the arguments of one node, up to a maximum number of values."""

    def __init__(self, where: str, numbers: Mapping[str, int], most: int):
        self._where = where
        self._numbers = numbers
        self._most = most
        self.taken = 0

    def normal(self, arg: Any, depth: int = 0) -> Any:
        """Return an argument with node names replaced by numbers."""
        self.taken += 1
        if self.taken > self._most:
            raise RequestError(
                f"{self._where}: over {MAX_ARGUMENTS} arguments, inner ones too, or {MAX_ALL_ARGUMENTS} in all nodes"
            )
        if depth > MAX_DEPTH:
            raise RequestError(f"{self._where}: an argument has more than {MAX_DEPTH} levels")
        match arg:
            case None | bool():
                return arg
            case int() | float():
                if not abs(arg) <= LARGEST_NUMBER:
                    raise RequestError(f"{self._where}: a constant is above {LARGEST_NUMBER:g} in magnitude")
                return arg
            case str():
                return self.text(arg)
            case list():
                return [self.normal(inner, depth + 1) for inner in arg]
            case dict() if len(arg) == 1:
                kind, inner = next(iter(arg.items()))
                return {kind: self._tagged(kind, inner, depth)}
        raise RequestError(f"{self._where}: an argument is neither a scalar, nor a list, nor an object with one key")

    def _tagged(self, kind: str, inner: Any, depth: int) -> Any:
        if kind == "ref":
            if not isinstance(inner, str) or inner not in self._numbers:
                raise RequestError(f"{self._where}: ref={str(inner)[:MAX_NAME]!r} is no node before this one")
            return self._numbers[inner]
        if kind == "ellipsis":
            return True
        if kind == "float" and inner in FLOATS:
            return inner
        if kind in CONSTANTS and isinstance(inner, str):
            return self.text(inner)
        if (kind == "tuple" and isinstance(inner, list)) or (
            kind == "slice" and isinstance(inner, list) and len(inner) == 3
        ):
            return [self.normal(item, depth + 1) for item in inner]
        if kind == "dict" and isinstance(inner, dict):
            return {self.text(key): self.normal(item, depth + 1) for key, item in inner.items()}
        raise RequestError(f"{self._where}: an argument of the form {str(kind)[:MAX_NAME]!r} is not known")

    def text(self, text: str) -> str:
        """Return the text. Raises `RequestError` if it is longer than MAX_NAME."""
        if len(text) > MAX_NAME:
            raise RequestError(f"{self._where}: a text of {len(text)} characters; use at most {MAX_NAME}")
        return text


def _value(arg: Any) -> Any:
    """Convert an argument from normal form to Python values, with `Ref` and `Constant`."""
    if isinstance(arg, list):
        return [_value(inner) for inner in arg]
    if not isinstance(arg, dict):
        return arg
    (kind, inner), *_ = arg.items()
    match kind:
        case "ref":
            return Ref(inner)
        case "ellipsis":
            return Ellipsis
        case "float":
            return math.nan if inner == "nan" else math.copysign(math.inf, -1 if inner == "-inf" else 1)
        case "tuple":
            return tuple(_value(item) for item in inner)
        case "slice":
            return slice(*(_value(item) for item in inner))
        case "dict":
            return {key: _value(item) for key, item in inner.items()}
        case _:
            return Constant(kind, inner)
