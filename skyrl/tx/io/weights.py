"""Loading of base weights from Hugging Face folders. Also exports the PEFT functions of `skyrl.tx.io.peft`.

The code is generic: the table of parameters (`skyrl.tx.design.parameters`) describes each architecture. Tensors are
read one at a time, and each is cast and copied to its place. On a CPU, loading takes the memory of the model and of its
largest tensor. On an accelerator, it takes host memory for one parameter, stacked over all layers; on a mesh of
devices, for the part of one device.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from skyrl.errors import StorageError
from skyrl.tx.design.family import FAMILIES
from skyrl.tx.design.parameters import Param, parameters
from skyrl.tx.families import check_known, text_config
from skyrl.tx.io.peft import adapter_from_peft, adapter_to_peft
from skyrl.tx.models.decoder import Decoder
from skyrl.utils.files.hf_files import read_config, text_names, transformers_config, untied_copy
from skyrl.utils.files.tensor_file import TensorReader, equal_tensors
from skyrl.utils.files.weight_files import UNREADABLE, weight_files

__all__ = ["adapter_from_peft", "adapter_to_peft", "load_model"]

READABLE = {"F64", "F32", "F16", "BF16"}
"""Safetensors dtypes of plain numbers (others are quantised, with separate scales)."""
COMPUTED = "rotary_emb.inv_freq"
"""Ending of names of tensors that older files have and that config.json determines. transformers ignores them too."""
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.weight")
"""Names of tensors of experts. transformers 5 may store all experts of a layer as two tensors instead: `gate_up_proj`
`[experts, 2 inner, hidden]`, with the gate first, and `down_proj` `[experts, hidden, inner]`."""
Index = tuple[slice, ...]
"""Part of an array, with a start and an end for each axis."""
Take = Callable[[str, tuple[int, ...], bool, Index], np.ndarray]
"""Returns a part of a tensor by its Hugging Face name and whole shape, transposed if the third argument is True."""
ALIGNMENT = 64
"""Alignment in bytes that lets JAX use a NumPy array on a CPU without a copy."""


def abstract_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    max_lora_adapters: int = 32,
    max_lora_rank: int = 32,
    shard_attention_heads: bool = True,
    loss_chunk_size: int = 0,
    gradient_checkpointing: bool | Literal["selective"] = False,
    mhc_expansion_rate: int = 1,
    unroll_layers: bool | None = None,
    max_context_length: int = 0,
) -> Decoder:
    """Return the model of a folder's config.json, with shapes and dtypes instead of weights.

    `dtype` is the dtype of base weights, such as "bfloat16". None: float32 on a CPU, otherwise the checkpoint's dtype.
    `ModelConfig` describes all other options.

    Raises RequestError for a missing or invalid config.json, ValueError for models that are not implemented.
    """
    from skyrl.tx.models.configs import ModelConfig

    path = Path(path)
    check_known(read_config(path), str(path / "config.json"))
    whole = transformers_config(path)
    text = whole.get_text_config()
    if text is not whole:
        text = text_config(whole.to_dict()) | {"_name_or_path": str(path)}
        text["nested_names"] = FAMILIES[text["architectures"][0]].loads_whole
    config = ModelConfig(
        text,
        max_lora_adapters=max_lora_adapters,
        max_lora_rank=max_lora_rank,
        shard_attention_heads=shard_attention_heads,
        loss_chunk_size=loss_chunk_size,
        gradient_checkpointing=gradient_checkpointing,
        mhc_expansion_rate=mhc_expansion_rate,
        unroll_layers=unroll_layers,
        max_context_length=max_context_length,
    )
    base_dtype = _base_dtype(dtype, config.dtype)  # pyright: ignore[reportArgumentType] (ModelConfig makes it a string)
    return nnx.eval_shape(lambda: Decoder(config, dtype=base_dtype, rngs=nnx.Rngs(0)))


def load_model(path: str | Path, **options: Any) -> Decoder:
    """Load the model from a folder with config.json and safetensors (one file, or several with an index).

    Takes the options of `abstract_model`, and raises its errors. Raises StorageError if the files do not match, and
    RequestError as `weight_files` does.
    """
    return with_weights(abstract_model(path, **options), path)


def stored_tensor(path: str | Path, name: str) -> np.ndarray | None:
    """Return one tensor of a model's folder as float32, such as a value head. None if it does not exist."""
    with ExitStack() as stack:
        tensors = _Tensors(Path(path), stack)
        return tensors.read(name).astype(np.float32) if name in tensors.names else None


def with_weights(model: Decoder, path: str | Path, beside: Collection[str] = (), shardings: Any = None) -> Decoder:
    """Return `model` (from `abstract_model`) with the weights of a folder.

    The folder may also contain the tensors named in `beside`. `shardings` are as in `state_of`.

    Raises StorageError for files that are damaged or do not match the model.
    """
    path, table = Path(path), _table(model)
    graph, state = nnx.split(model)
    with ExitStack() as stack:
        tensors = _Tensors(path, stack)
        # Checkpoints of tied models may contain the projection, a copy of the embedding.
        copies = {param.name for param in table.values() if not param.stored}
        embedding = ("embed_tokens",)
        for name in copies & tensors.names:
            tensors.check_copy(table[embedding].name, name, dict(nnx.to_flat_state(state))[embedding].dtype)
        loaded = state_of(state, table, tensors.take, shardings=shardings)
        read = (name for name in tensors.names if not name.endswith(COMPUTED))
        unused = {name for name in read if not name.startswith(model.design.unread)}
        unused -= tensors.taken | copies | set(beside)
    if unused:
        raise StorageError(
            f"{path}: {len(unused)} tensors have no place in {model.config.architecture}, such as {min(unused)}; "
            "check that config.json belongs to these weights"
        )
    return nnx.merge(graph, loaded)


def state_of(
    like: Any,
    table: Mapping[tuple[str, ...], Param],
    take: Take,
    dtype: Any = None,
    shardings: Any = None,
) -> Any:
    """Build parameters with the structure of `like`. The inverse of `skyrl.tx.io.export.named_tensors`.

    Args:
        like: Parameters of a split NNX model, or their shapes.
        table: Table of the model's parameters, by path.
        take: Source of the tensors.
        dtype: Dtype of the arrays; None: the dtypes of `like`.
        shardings: Sharding of each parameter, in the structure of `like`. Each part is made by itself, and copied to
            its devices. None: all are on the default device.
    """
    loaded = []
    places = None if shardings is None else dict(nnx.to_flat_state(shardings))
    for path, variable in nnx.to_flat_state(like):
        layer, param = next((part for part in path if isinstance(part, int)), None), table[_without_layer(path)]
        part = partial(_part, param, layer, take, np.dtype(dtype or variable.dtype))
        if places is None:
            array = jax.device_put(part(tuple(slice(0, size) for size in variable.shape)))
        else:
            array = _placed(variable.shape, places[path].get_raw_value(), part)
        loaded.append((path, variable.replace(array)))
    return nnx.from_flat_state(loaded)


def _part(param: Param, layer: int | None, take: Take, dtype: np.dtype, index: Index) -> np.ndarray:
    """Make a part of a parameter. Nothing else uses the memory of the result, so a device array may share it."""
    stacked = len(index) - len(param.shape)
    array = _empty(tuple(cut.stop - cut.start for cut in index), dtype)
    for place, name in param.stack.names(param.name, layer):
        if all(cut.start <= number < cut.stop for number, cut in zip(place, index[:stacked], strict=True)):
            at = tuple(number - cut.start for number, cut in zip(place, index[:stacked], strict=True))
            array[at] = take(name, param.shape, param.transposed, index[stacked:])
    return array


def _placed(shape: tuple[int, ...], sharding: Any, part: Callable[[Index], np.ndarray]) -> jax.Array:
    """Make an array part by part. Parts that several devices have are made once."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, having in devices.items():
        made = part(tuple(slice(*ends) for ends in bounds))
        arrays += jax.block_until_ready([jax.device_put(made, device) for device in having])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def with_random_weights(model: Decoder, shardings: Any = None) -> Decoder:
    """Return `model` (from `abstract_model`) with random weights, for benchmarks without a checkpoint.

    The weights are created on the device. Norms have scale 1 and biases are 0; other weights are normal with variance
    1 / (size of the input).
    """
    graph, state = nnx.split(model)
    made, table = [], _table(model)
    places = {} if shardings is None else dict(nnx.to_flat_state(shardings))
    for number, (path, variable) in enumerate(nnx.to_flat_state(state)):
        key, param = jax.random.fold_in(jax.random.key(0), number), table[_without_layer(path)]
        own = places[path].get_raw_value() if places else None
        made.append((path, variable.replace(_random(own)(key, param, variable.shape, variable.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(made))


@lru_cache(maxsize=64)
def _random(sharding: Any) -> Callable[..., jax.Array]:
    """Program that makes a random parameter, with the given sharding; None: on the default device."""

    def random(key: jax.Array, param: Param, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        if param.start != "normal":
            return jnp.full(shape, float(param.start == "ones"), dtype)
        return (jax.random.normal(key, shape, dtype) * jnp.asarray(param.inputs**-0.5, dtype)).astype(dtype)

    if sharding is None:
        return jax.jit(random, static_argnums=(1, 2, 3))
    return jax.jit(random, static_argnums=(1, 2, 3), out_shardings=sharding)


def _table(model: Decoder) -> dict[tuple[str, ...], Param]:
    return {param.path: param for param in parameters(model.design)}


def _without_layer(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(part for part in path if not isinstance(part, int))


def _base_dtype(asked: str | None, stored: str | None) -> jnp.dtype:
    name = asked or ("float32" if jax.default_backend() == "cpu" else stored or "float32")
    known = ("float32", "bfloat16", "float16")
    if name not in known:
        raise ValueError(f"dtype={name!r} is not a dtype of base weights (known: {', '.join(known)}); choose one")
    return jnp.dtype(name)


class _Tensors:
    """Tensors of a folder, opened lazily by name."""

    def __init__(self, path: Path, stack: ExitStack):
        self.path, self.stack = path, stack
        self.taken: set[str] = set()
        self.files: dict[str, TensorReader] = {}
        self.places = weight_files(path)
        self.stored = text_names(self.places)
        self.names = set(self.stored)

    def take(self, name: str, shape: tuple[int, ...], transposed: bool, index: Index) -> np.ndarray:
        """Read a part of a tensor, see `Take`. Raises StorageError unless the whole tensor has shape `shape`."""
        source, expert = name, None if name in self.stored else EXPERT.fullmatch(name)
        if expert is not None:
            source = expert["experts"] + (".down_proj" if expert["kind"] == "down" else ".gate_up_proj")
        if source not in self.stored:
            raise StorageError(f"{self.path} has no tensor {name}; check that config.json belongs to these weights")
        with self._reading(self.places[self.stored[source]]):
            stored = self._file_of(source).entries[self.stored[source]]
        if stored["dtype"] not in READABLE:
            raise ValueError(f"{self.path}: {source} is stored as {stored['dtype']}; use a base model in bfloat16")
        expected, first = list(shape[::-1] if transposed else shape), 0
        index = index[::-1] if transposed else index
        if expert is not None:
            parts, number = 1 if expert["kind"] == "down" else 2, int(expert["number"])
            first = (parts * number + (expert["kind"] == "up")) * expected[0]
            expected = [max([number + 1, *stored["shape"][:1]]), parts * expected[0], expected[1]]
        if stored["shape"] != expected:
            raise StorageError(f"{self.path}: {source} has shape {stored['shape']}; config.json asks for {expected}")
        self.taken.add(source)
        if len(index) != 2:
            return self.read(source)[index]
        rows, columns = index
        rows = slice(first + rows.start, first + rows.stop)
        is_whole = columns.stop - columns.start == expected[-1]
        tensor = self.read(source, rows, None if is_whole else columns)
        return tensor.T if transposed else tensor

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        """Read a tensor as it is stored, or a part of it as in `TensorReader.read`."""
        with self._reading(self.places[self.stored[name]]):
            return self._file_of(name).read(self.stored[name], rows, columns)

    def check_copy(self, name: str, copy: str, dtype: Any) -> None:
        """Raise StorageError unless both tensors have the same values in `dtype`. Skips files without `name`."""
        if name not in self.stored:
            return
        with self._reading(self.places[self.stored[copy]]):
            first, second = ((self._file_of(each), self.stored[each]) for each in (name, copy))
            equal = equal_tensors(first, second, np.dtype(dtype))
        if not equal:
            raise StorageError(untied_copy(str(self.path), self.stored[name], self.stored[copy]))

    def _file_of(self, name: str) -> TensorReader:
        return self._open(self.places[self.stored[name]])

    def _open(self, file: str) -> TensorReader:
        if file not in self.files:
            with self._reading(file):
                self.files[file] = self.stack.enter_context(TensorReader(self.path / file))
        return self.files[file]

    @contextmanager
    def _reading(self, file: str) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise StorageError(f"{self.path / file} cannot be read ({error}); fetch it again") from error
