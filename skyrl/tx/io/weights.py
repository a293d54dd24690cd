"""Base weights from Hugging Face folders (and, from `skyrl.tx.io.peft`, adapters from and to PEFT's).

Each architecture has a table of tensor names (`ModelForCausalLM.weight_names`); nothing here knows any of them.
Tensors are read, cast and placed one at a time, so that host memory holds one stacked parameter besides the model.
"""

import json
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from skyrl.errors import StorageError
from skyrl.tx.io.peft import adapter_from_peft, adapter_to_peft
from skyrl.tx.models.types import MODELS, ModelForCausalLM

__all__ = ["adapter_from_peft", "adapter_to_peft", "load_model"]

READABLE = {"F64", "F32", "F16", "BF16"}
"""Safetensors dtypes that stand for plain numbers (others are quantised and come with scales of their own)."""


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
) -> ModelForCausalLM:
    """The model that a folder's config.json describes, with shapes and types in the place of weights.

    `dtype` is that of the base weights, such as "bfloat16"; None is float32 on CPU and the checkpoint's elsewhere. The
    other options are those of `ModelConfig`.

    Raises StorageError for missing or damaged files, ValueError for models that are not implemented.
    """
    from transformers import AutoConfig

    from skyrl.tx.models.configs import ModelConfig

    path = Path(path)
    kind = MODELS[_architecture(path)]
    config = ModelConfig(
        AutoConfig.from_pretrained(path, local_files_only=True),
        max_lora_adapters=max_lora_adapters,
        max_lora_rank=max_lora_rank,
        shard_attention_heads=shard_attention_heads,
        loss_chunk_size=loss_chunk_size,
        gradient_checkpointing=gradient_checkpointing,
        mhc_expansion_rate=mhc_expansion_rate,
        unroll_layers=unroll_layers,
    )
    base_dtype = _base_dtype(dtype, config.dtype)  # pyright: ignore[reportArgumentType] (ModelConfig makes it a string)
    return nnx.eval_shape(lambda: kind(config, dtype=base_dtype, rngs=nnx.Rngs(0)))


def load_model(path: str | Path, **options: Any) -> ModelForCausalLM:
    """The model in a folder with config.json and safetensors (one file, or several with an index).

    `options` are those of `abstract_model`, and so are errors; files that do not match raise StorageError.
    """
    return with_weights(abstract_model(path, **options), path)


def stored_tensor(path: str | Path, name: str) -> np.ndarray | None:
    """A tensor beside the model's own in its folder, float32; None if there is none of that name."""
    with ExitStack() as stack:
        tensors = _Tensors(Path(path), stack)
        return tensors.whole(name).astype(np.float32) if name in tensors.names else None


def with_weights(model: ModelForCausalLM, path: str | Path, beside: Collection[str] = ()) -> ModelForCausalLM:
    """An `abstract_model` with the weights that the folder holds, which may hold tensors `beside` them.

    Raises StorageError for damaged or other files.
    """
    path, kind, config = Path(path), type(model), model.config
    graph, state = nnx.split(model)
    with ExitStack() as stack:
        tensors = _Tensors(path, stack)
        loaded = [
            (path, variable.replace(_load(tensors, kind, path, variable)))
            for path, variable in nnx.to_flat_state(state)
        ]
        unused = tensors.names - tensors.taken - _tied_copies(config.tie_word_embeddings) - set(beside)
    if unused:
        raise StorageError(
            f"{path}: {len(unused)} tensors have no place in {kind.__name__}, such as {min(unused)}; "
            "check that config.json belongs to these weights"
        )
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def with_random_weights(model: ModelForCausalLM) -> ModelForCausalLM:
    """An `abstract_model` with random weights that are made on the device: to measure what no checkpoint is there for.

    Norms are ones and biases zeros; other weights are normal with variance 1 / (size of their input).
    """
    graph, state = nnx.split(model)
    made = []
    for number, (path, variable) in enumerate(nnx.to_flat_state(state)):
        key = jax.random.fold_in(jax.random.key(0), number)
        made.append((path, variable.replace(_random(key, path[-1], variable.shape, variable.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(made))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random(key: jax.Array, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if name in ("scale", "bias"):
        return jnp.full(shape, float(name == "scale"), dtype)
    inputs = shape[-2] if name == "kernel" else shape[-1]
    return (jax.random.normal(key, shape, dtype) * jnp.asarray(inputs**-0.5, dtype)).astype(dtype)


def _architecture(path: Path) -> str:
    """The model class named in config.json, which must be a known one."""
    try:
        config = json.loads((path / "config.json").read_text())
        names = config.get("architectures") or [""]
    except FileNotFoundError:
        raise StorageError(f"{path} has no config.json; name a folder in Hugging Face format") from None
    except (json.JSONDecodeError, AttributeError) as error:
        raise StorageError(f"{path / 'config.json'} is not a JSON object ({error})") from error
    if names[0] not in MODELS:
        raise ValueError(
            f"{path / 'config.json'}: architectures={names} is not implemented (known: {', '.join(MODELS)}); "
            "use a base model of a known architecture"
        )
    if quantised := config.get("quantization_config"):
        raise ValueError(
            f"{path / 'config.json'}: quantization_config.quant_method={quantised.get('quant_method')!r}: quantised "
            "base models are not served yet; use the model's bfloat16 weights"
        )
    return names[0]


def _base_dtype(asked: str | None, stored: str | None) -> jnp.dtype:
    name = asked or ("float32" if jax.default_backend() == "cpu" else stored or "float32")
    known = ("float32", "bfloat16", "float16")
    if name not in known:
        raise ValueError(f"dtype={name!r} is not a dtype of base weights (known: {', '.join(known)}); choose one")
    return jnp.dtype(name)


def _tied_copies(tied: bool) -> set[str]:
    """Tensors that checkpoints of tied models may hold although they repeat the embedding."""
    return {"lm_head.weight"} if tied else set()


def _load(tensors: "_Tensors", kind: type[ModelForCausalLM], path: tuple[Any, ...], variable: Any) -> jax.Array:
    """One parameter: of one layer, or stacked over layers where its shape says so."""
    layer = next((part for part in path if isinstance(part, int)), None)
    template = kind.weight_names[tuple(part for part in path if not isinstance(part, int))]
    transposed = path[-1] == "kernel"
    array = np.empty(variable.shape, variable.dtype)
    if "{layer}" not in template or layer is not None:
        array[...] = tensors.take(template.format(layer=layer), array.shape, transposed)
    else:
        for layer in range(len(array)):
            array[layer] = tensors.take(template.format(layer=layer), array.shape[1:], transposed)
    return jnp.asarray(array)


class _Tensors:
    """The tensors of a folder, opened lazily by name."""

    def __init__(self, path: Path, stack: ExitStack):
        self.path, self.stack = path, stack
        self.taken: set[str] = set()
        self.files: dict[str, Any] = {}
        index = path / "model.safetensors.index.json"
        if index.exists():
            self.places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (path / "model.safetensors").exists():
            self.places = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            raise StorageError(f"{path} has neither model.safetensors nor model.safetensors.index.json; convert it")
        self.names = set(self.places)

    def take(self, name: str, shape: tuple[int, ...], transposed: bool) -> np.ndarray:
        """The tensor, transposed if asked, of the given shape after that."""
        if name not in self.places:
            raise StorageError(f"{self.path} has no tensor {name}; check that config.json belongs to these weights")
        file = self._open(self.places[name])
        stored = file.get_slice(name)
        if stored.get_dtype() not in READABLE:
            raise ValueError(f"{self.path}: {name} is stored as {stored.get_dtype()}; use a base model in bfloat16")
        expected = list(shape[::-1] if transposed else shape)
        if stored.get_shape() != expected:
            raise StorageError(f"{self.path}: {name} has shape {stored.get_shape()}; config.json asks for {expected}")
        self.taken.add(name)
        tensor = file.get_tensor(name)
        return tensor.T if transposed else tensor

    def whole(self, name: str) -> np.ndarray:
        """The tensor as it is stored."""
        return self._open(self.places[name]).get_tensor(name)

    def _open(self, file: str) -> Any:
        if file not in self.files:
            try:
                self.files[file] = self.stack.enter_context(safe_open(self.path / file, framework="numpy"))
            except (SafetensorError, FileNotFoundError) as error:
                raise StorageError(f"{self.path / file} cannot be read ({error}); fetch it again") from error
        return self.files[file]
