"""Names of an adapter's tensors: in PEFT files, in a model in memory, or without PEFT's prefix.

PEFT saves `base_model.model.{module}.lora_A.weight`. A model in memory also has the adapter's name after `lora_A`.
Other trainers omit the prefix or the suffix.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from skyrl.errors import RequestError

PREFIX = "base_model.model."
NAME = re.compile(r"(?P<module>.+)\.(?P<matrix>lora_[AB])(\.(?P<adapter>[^.]+))??(?P<ending>\.weight)?")
CONNECTOR = re.compile(r"(.+\.)?(?P<module>model\.([^.]+\.){1,8}(attn|mlp)_connector)\.(?P<part>phi|alpha|bias)")
"""Tensor name of a connector, which mixes several residual streams. Used only by the JAX backend, not by PEFT. The
bounded number of parts keeps the time linear in the length of a name, which a client may choose."""
RATE = "mhc_expansion_rate"
"""Option of adapter_config.json and of the JAX backend: number of residual streams."""
COPY = ".base_layer.weight"
"""Suffix of base model weights, which PEFT stores beside an adapted vocabulary projection."""


class Pair(NamedTuple):
    """Matrices A and B of a module."""

    a: np.ndarray
    """`[rank, in]`."""
    b: np.ndarray
    """`[out, rank]`."""


Pairs = dict[str, Pair]
"""Pairs by name of the module in the base model."""


def padded(pair: Pair, rank: int) -> Pair:
    """Return a pair padded with zeros to a rank."""
    missing = rank - len(pair.a)
    return Pair(np.pad(pair.a, ((0, missing), (0, 0))), np.pad(pair.b, ((0, 0), (0, missing)))) if missing else pair


class NameCounts(NamedTuple):
    """Unusual parts of names, as counts of tensors."""

    bare: int
    """Number of names without PEFT's prefix."""
    ends: Counter[str]
    """Number of tensor names that contain an adapter name, by that name; "" counts names without .weight at the end."""


def is_other(name: str, tensor: np.ndarray) -> bool:
    """Return True for a tensor that PEFT stores for other purposes than LoRA on linear maps, such as a bias."""
    if name.endswith(COPY) or CONNECTOR.fullmatch(name):
        return False
    return NAME.fullmatch(name) is None or (name.endswith(".lora_B.bias") and tensor.ndim == 1)


def pairs_of(tensors: Mapping[str, np.ndarray], where: object) -> tuple[Pairs, NameCounts]:
    """Return the pairs formed by tensors. Copies of base model weights are left out.

    Raises RequestError for a tensor that belongs to no pair, and for an incomplete pair.
    """
    halves: dict[str, dict[str, np.ndarray]] = {}
    bare, ends = 0, Counter[str]()
    for name, tensor in tensors.items():
        if name.endswith(COPY):
            continue
        if CONNECTOR.fullmatch(name):
            raise RequestError(
                f"{where}: tensor {name} is of a connector of several residual streams ({RATE}), which only the "
                "JAX backend computes, in sampler checkpoints of its own; sample it there, or train without "
                "connectors (exclude_modules='.*_connector')"
            )
        found = NAME.fullmatch(name)
        if found is None or is_other(name, tensor):
            raise RequestError(
                f"{where}: tensor {name} is neither lora_A nor lora_B of a module; only LoRA on linear maps is read, "
                "so merge this adapter with PEFT itself"
            )
        module = found["module"].removeprefix(PREFIX)
        bare += not name.startswith(PREFIX)
        if found["adapter"] is not None:
            ends[found["adapter"]] += 1
        elif found["ending"] is None:
            ends[""] += 1
        half = halves.setdefault(module, {})
        if found["matrix"] in half:
            raise RequestError(f"{where}: duplicate tensor {name}, under two names; save one adapter alone")
        if tensor.ndim != 2:
            raise RequestError(f"{where}: tensor {name} has shape {list(tensor.shape)}; a matrix has two axes")
        half[found["matrix"]] = tensor
    if not halves:
        raise RequestError(f"{where} holds no lora_A and lora_B of any module; name the folder or tar of an adapter")
    for module, half in halves.items():
        if len(half) == 1:
            (matrix,) = half
            other = "lora_B" if matrix == "lora_A" else "lora_A"
            raise RequestError(f"{where}: {module} has {matrix} and no {other}; save the adapter again")
        shapes = half["lora_A"].shape, half["lora_B"].shape
        if shapes[0][0] != shapes[1][1]:
            raise RequestError(
                f"{where}: lora_A of {module} is {list(shapes[0])} and lora_B {list(shapes[1])}; the first axis of "
                "lora_A and the last one of lora_B are the rank and have to be equal"
            )
    return {module: Pair(half["lora_A"], half["lora_B"]) for module, half in halves.items()}, NameCounts(bare, ends)


def not_finite(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the tensors with NaN or infinite numbers."""
    return [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]


def rate_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of residual streams, given the shapes of an adapter's tensors. 1 without connectors."""
    found = ((CONNECTOR.fullmatch(name), shape) for name, shape in shapes.items())
    outputs = next((math.prod(shape) for match, shape in found if match and match["part"] == "bias"), 0)
    return max(1, math.isqrt(1 + outputs) - 1)  # the number of outputs is 2 n + n^2


def check_rate(stored: int, served: int, where: object) -> None:
    """Raise RequestError if a backend with `served` residual streams cannot compute connectors of `stored` streams."""
    if stored not in (1, served):
        raise RequestError(
            f"{where}: it has connectors of {stored} residual streams ({RATE}={stored}), and {served} are served here; "
            f"""start a server with --backend jax --backend-config '{{"{RATE}": {stored}}}'"""
        )


def tensors_of(pairs: Pairs, bare: bool = False) -> dict[str, np.ndarray]:
    """Return tensors by PEFT's names. `bare`: without PEFT's prefix."""
    prefix = "" if bare else PREFIX
    return {
        f"{prefix}{module}.{matrix}.weight": np.ascontiguousarray(tensor)
        for module, pair in pairs.items()
        for matrix, tensor in (("lora_A", pair.a), ("lora_B", pair.b))
    }


def last_names(modules: Iterable[str]) -> list[str]:
    """Return the names of modules without their paths, without duplicates."""
    return list(dict.fromkeys(module.rpartition(".")[2] for module in modules))


def is_plain_name(key: str) -> bool:
    """Return True if a key of a pattern is a module name or the end of one, not a regular expression."""
    return re.fullmatch(r"[\w.-]+", key) is not None


class ModuleValues:
    """Values of modules from PEFT's rank_pattern or alpha_pattern. Keys of a pattern are names or regular expressions.

    Names are looked up in a dictionary, since PEFT may write one for each module. A dot in a name matches only a dot.
    """

    def __init__(self, pattern: Mapping[str, float] | None):
        entries = [(key, place, value) for place, (key, value) in enumerate((pattern or {}).items())]
        self._names = {key: (place, value) for key, place, value in entries if is_plain_name(key)}
        self._expressions = [
            (re.compile(rf"(?:.*\.)?(?:{key})"), (place, value))
            for key, place, value in entries
            if not is_plain_name(key)
        ]

    def of(self, module: str, default: float) -> float:
        """Return the value of the first key that matches the end of the module's name; `default` if there is none."""
        parts = module.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        found = [self._names[end] for end in ends if end in self._names]
        found += [entry for expression, entry in self._expressions if expression.fullmatch(module)]
        return min(found)[1] if found else default
