"""A whole model in Hugging Face format, with what was trained merged into it: weights, configuration, tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from skyrl.tx.io.tensor_file import Tensor, on_host, tensor_file
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import lora_targets, pair_at
from skyrl.tx.models.types import MODELS
from skyrl.utils.atomic_folders import Content

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING, PROJECTION = "model.embed_tokens.weight", "lm_head.weight"
BESIDE = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")
"""Files that are taken over as they are."""


def model_files(
    folder: Path, model_config: "ModelConfig", base: Any, adapter: Adapter, value_head: str
) -> dict[str, Content]:
    """Files of the model that `adapter` makes of the base model, by name, as `transformers` loads them.

    Weights have the types that they have in `base`; LoRA is merged, W + scaling (A B), in float32. An adapted
    vocabulary projection is not tied to the embedding any more. Tensors are made one by one, as they are written.

    Args:
        folder: The base model's files.
        model_config: Of the base model.
        base: Parameters of the split NNX model.
        adapter: What was trained.
        value_head: Name of a critic's tensor, `<value_head>.weight` `[1, hidden]`.
    """
    own, kind = adapter.own_base, MODELS[model_config.architecture]
    tensors = named_tensors(kind.weight_names, base if own is None else own)
    types = {name: tensor.dtype for name, tensor in named_tensors(kind.weight_names, base).items()}
    config = json.loads((folder / CONFIG).read_text())
    if own is None:
        _merge(tensors, adapter, model_config)
    if PROJECTION in tensors and model_config.tie_word_embeddings:
        types[PROJECTION], config["tie_word_embeddings"] = types[EMBEDDING], False
    weights = {name: tensor.astype(types[name]) for name, tensor in tensors.items()}
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(types[EMBEDDING])
    if adapter.value_head is not None:
        weights[f"{value_head}.weight"] = Tensor.of(np.asarray(adapter.value_head)[None])
    beside = {path.name: path.read_bytes() for pattern in BESIDE for path in sorted(folder.glob(pattern))}
    return {**beside, CONFIG: json.dumps(config, indent=2).encode(), WEIGHTS: tensor_file(weights, {"format": "pt"})}


def named_tensors(names: Mapping[tuple[Any, ...], str], state: Any) -> dict[str, Tensor]:
    """Parameters by their Hugging Face names, in Hugging Face's layout, each of stacked layers by itself.

    Args:
        names: Hugging Face's name of each path without the layer's number, for which it has `{layer}`, as
            `ModelForCausalLM.weight_names` has them.
        state: Parameters of a split NNX model, or other arrays in their structure.
    """
    tensors: dict[str, Tensor] = {}
    for path, variable in nnx.to_flat_state(state):
        layer = next((part for part in path if isinstance(part, int)), None)
        template = names[tuple(part for part in path if not isinstance(part, int))]
        array, transposed = variable[...], path[-1] == "kernel"
        if "{layer}" not in template or layer is not None:
            tensors[template.format(layer=layer)] = _tensor(array, None, transposed)
        else:
            layers = range(array.shape[0])
            tensors |= {template.format(layer=number): _tensor(array, number, transposed) for number in layers}
    return tensors


def _tensor(array: Any, number: int | None, transposed: bool) -> Tensor:
    """An array, or the one of a layer, perhaps with its last two axes swapped."""
    shape = array.shape if number is None else array.shape[1:]
    if not transposed:
        return Tensor(shape, np.dtype(array.dtype), lambda: on_host(array, number))
    swapped = (*shape[:-2], shape[-1], shape[-2])
    return Tensor(swapped, np.dtype(array.dtype), lambda: np.swapaxes(on_host(array, number), -1, -2))


def _merge(tensors: dict[str, Tensor], adapter: Adapter, model_config: "ModelConfig") -> None:
    """Add the adapter's products to the weights that they belong to."""
    scaling = float(adapter.scaling)
    for target in lora_targets(model_config):
        pair = pair_at(adapter, target.path)
        a, b = (np.asarray(pair[name]) for name in ("lora_A", "lora_B"))
        if not b.any():
            continue
        for layer in [None] if target.layers is None else range(target.layers):
            name = f"{target.module.format(layer=layer)}.weight"
            at_layer = ... if layer is None else layer
            before = tensors[EMBEDDING if name == PROJECTION and name not in tensors else name]
            tensors[name] = _merged(before, a[at_layer], b[at_layer], scaling)


def _merged(before: Tensor, a: np.ndarray, b: np.ndarray, scaling: float) -> Tensor:
    def make() -> np.ndarray:
        product = a @ b
        product *= np.float32(scaling)
        product = product.T
        product += before.make().astype(np.float32, copy=False)
        return product

    return Tensor(before.shape, np.dtype(np.float32), make)
