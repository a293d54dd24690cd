"""Merging of an adapter into a base model: W + B A alpha / rank, in float32, rounded once to the dtype of W.

Tensors are read, changed and written one at a time, into the same number of files as the base model.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (adds bfloat16 to NumPy)
import numpy as np
from safetensors import SafetensorError, safe_open

from skyrl.errors import RequestError
from skyrl.utils.adapters.layouts import Rows
from skyrl.utils.adapters.naming import Pair, not_finite
from skyrl.utils.adapters.plain import plain_adapter
from skyrl.utils.adapters.stored import StoredAdapter
from skyrl.utils.files.atomic_folders import Content, write_folder
from skyrl.utils.files.hf_files import CONFIG, WEIGHTS, files_beside, read_config, text_name, untied_copy
from skyrl.utils.files.tensor_file import TYPES, Tensor, TensorReader, equal_tensors, tensor_file
from skyrl.utils.files.weight_files import INDEX, weight_files

FUSED = ".experts.gate_up_proj"
EMBEDDING, PROJECTION = "embed_tokens.weight", "lm_head.weight"
NUMBERS = {code: np.dtype(name) for name, code in TYPES.items() if "float" in name}
"""Dtypes of weights to which a product can be added."""


def merge(adapter: StoredAdapter | None, base: Path, output: Path, untie: bool = False) -> int:
    """Merge an adapter into a base model and write the result. Returns the number of changed tensors.

    A projection that is tied to the embedding gets its own weights if the adapter changes it, or with `untie`. Without
    an adapter, nothing else changes.

    Raises RequestError for a module without a tensor in the base model, for mismatched shapes and unsupported dtypes,
    and for an adapter with numbers that are not finite.
    """
    if adapter is not None and (wrong := not_finite(adapter.tensors)):
        raise RequestError(
            f"{adapter.where}: tensor {wrong[0]} has numbers that are not finite, which would spoil the merged model; "
            "train the adapter again, or use an earlier checkpoint"
        )
    with ExitStack() as stack:
        weights = _Weights(base, stack)
        config, products, scaling = read_config(base), {}, 0.0
        if adapter is not None:
            plain = plain_adapter(adapter.tensors, adapter.config, weights.rows, adapter.where)
            products, scaling = _by_tensor(adapter.where, weights, plain.pairs), plain.alpha / plain.rank
        files, untied = _changed(weights, products, scaling, config, untie)
        content: dict[str, Content] = dict(files_beside(base))
        content[CONFIG] = json.dumps(_untied(config) if untied else config, indent=2).encode()
        for file, tensors in files.items():
            content[file] = tensor_file(tensors, {"format": "pt"})
        if set(files) != {WEIGHTS}:
            content[INDEX] = json.dumps(_index(files), indent=2).encode()
        write_folder(output, content)
        return len(products)


def rows_of_weights(base: Path, stack: ExitStack) -> Rows:
    """Return a function that maps a module to its number of output features, valid while the stack is open."""
    return _Weights(base, stack).rows


def _by_tensor(where: Path, weights: "_Weights", pairs: dict[str, Pair]) -> dict[str, Pair]:
    """Return the pairs, keyed by the name of the tensor to which the product of the pair is added."""
    named: dict[str, Pair] = {}
    for module, pair in pairs.items():
        name = weights.by_text_name.get(text_name(f"{module}.weight"))
        if name is None and module.rpartition(".")[2] == PROJECTION.removesuffix(".weight"):
            name = PROJECTION  # tied: created from the embedding below
        if name is None:
            way_out = "name the base model that the adapter was trained on, or convert the adapter to its layout"
            if ".experts." in module and any(each.endswith(FUSED) for each in weights.places):
                way_out = "its experts are fused; save it by save_pretrained(save_original_format=True) of transformers"
            raise RequestError(f"{where}: {module} has no tensor {module}.weight in {weights.path}; {way_out}")
        shape, code = weights.kind(weights.embedding if name not in weights.places else name)
        if code not in NUMBERS:
            raise RequestError(f"{weights.path}: {name} is stored as {code}; name a base model that is not quantised")
        if shape != (len(pair.b), pair.a.shape[1]):
            raise RequestError(
                f"{where}: the product of {module} is {[len(pair.b), pair.a.shape[1]]}, but {name} in {weights.path} "
                f"is {list(shape)}; name the base model that the adapter was trained on"
            )
        named[name] = pair
    return named


def _changed(
    weights: "_Weights", products: dict[str, Pair], scaling: float, config: dict[str, Any], untie: bool
) -> tuple[dict[str, dict[str, Tensor]], bool]:
    """Return the merged model's tensors by file.

    The second result is True if a projection that was tied to the embedding is now a separate tensor.
    """
    files: dict[str, dict[str, Tensor]] = {}
    for name, file in weights.places.items():
        files.setdefault(file, {})[name] = weights.tensor(name)
    is_tied = PROJECTION not in weights.places or bool(config.get("tie_word_embeddings"))
    untied = is_tied and (untie or PROJECTION in products)
    if untied:
        weights.check_copy()
        file = weights.places.get(PROJECTION, weights.places[weights.embedding])
        files[file][PROJECTION] = weights.tensor(weights.embedding)
    for tensors in files.values():
        for name in tensors.keys() & products.keys():
            shape, dtype, _ = tensors[name]
            make = partial(_added, tensors[name], products[name], np.float32(scaling))
            tensors[name] = Tensor(shape, np.dtype(np.float32), make).astype(dtype)
    return files, untied


def _added(tensor: Tensor, pair: Pair, scaling: np.float32) -> np.ndarray:
    product = pair.b.astype(np.float32) @ pair.a.astype(np.float32)
    product *= scaling
    product += tensor.make().astype(np.float32, copy=False)
    return product


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    nested = {"text_config": text | {"tie_word_embeddings": False}} if isinstance(text, dict) else {}
    return config | {"tie_word_embeddings": False} | nested


def _index(files: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    places = {name: file for file, tensors in files.items() for name in tensors}
    tensors = [tensor for part in files.values() for tensor in part.values()]
    size = sum(int(np.prod(tensor.shape)) * tensor.dtype.itemsize for tensor in tensors)
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}


class _Weights:
    """Tensors of a model folder, read on demand."""

    def __init__(self, path: Path, stack: ExitStack):
        self.path, self._stack = path, stack
        self._open_files: dict[str, Any] = {}
        self.places = weight_files(path)
        self.by_text_name = _unique(self.places)
        """Names of tensors in the files, by the names that they have in a text-only model."""

    @property
    def embedding(self) -> str:
        return next((name for name in self.places if name.endswith(EMBEDDING)), EMBEDDING)

    def check_copy(self) -> None:
        """Raise RequestError if the projection of a tied model is stored, and differs from the embedding."""
        names = self.embedding, PROJECTION
        if not set(names) <= self.places.keys():
            return
        with ExitStack() as stack:
            files = [stack.enter_context(TensorReader(self.path / self.places[name])) for name in names]
            equal = equal_tensors((files[0], names[0]), (files[1], names[1]))
        if not equal:
            raise RequestError(untied_copy(str(self.path), *names))

    def kind(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return (shape, dtype code of safetensors)."""
        if name not in self.places:
            raise RequestError(f"{self.path} holds no tensor {name}; name the base model of the adapter")
        stored = self._file(self.places[name]).get_slice(name)
        return tuple(stored.get_shape()), stored.get_dtype()

    def rows(self, module: str) -> int | None:
        """Return the output features of a module; None if there is no such module."""
        name = self.by_text_name.get(text_name(f"{module}.weight"))
        return None if name is None else self.kind(name)[0][0]

    def tensor(self, name: str) -> Tensor:
        shape, code = self.kind(name)
        types = {code: np.dtype(dtype) for dtype, code in TYPES.items()}
        if code not in types:
            raise RequestError(f"{self.path}: {name} is stored as {code}; name a base model that is not quantised")
        return Tensor(shape, types[code], lambda: self._file(self.places[name]).get_tensor(name))

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                opened = self._stack.enter_context(safe_open(self.path / name, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise RequestError(f"{self.path / name} cannot be read ({error}); fetch it again") from error
            self._open_files[name] = opened
        return self._open_files[name]


def _unique(names: Iterable[str]) -> dict[str, str]:
    return {text_name(name): name for name in names}
