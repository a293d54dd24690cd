"""Export of a complete model in Hugging Face format, with the adapter merged: weights, configuration, tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from skyrl.errors import RequestError
from skyrl.tx.design.parameters import Param, Place, parameters
from skyrl.tx.families import design_of, text_config
from skyrl.tx.io.host_arrays import on_host, tensor_of
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import connector_targets, lora_targets, pair_at
from skyrl.utils.files.atomic_folders import Content
from skyrl.utils.files.hf_files import CONFIG, WEIGHTS, files_beside
from skyrl.utils.files.tensor_file import Tensor, tensor_file

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

EMBEDDING, PROJECTION = "model.embed_tokens.weight", "lm_head.weight"


def model_files(
    folder: Path, model_config: "ModelConfig", base: Any, adapter: Adapter, value_head: str
) -> dict[str, Content]:
    """Return the files of a complete model by name, in the format of `transformers`. `adapter` is merged into the base
    model.

    Weights keep the dtypes of `base`; LoRA is merged in float32 as W + scaling (A B). If the vocabulary
    projection is adapted, it is no longer tied to the embedding. Tensors are created one at a time, as they are
    written. Raises RequestError if the adapter has connectors with a nonzero `phi` or `bias`.

    Args:
        folder: Folder of the base model.
        model_config: Configuration of the base model.
        base: Parameters of the split NNX model.
        adapter: Trained adapter.
        value_head: Name of a critic's value head, which is stored as `<value_head>.weight` `[1, hidden]`.
    """
    own, table = adapter.own_base, parameters(design_of(model_config))
    tensors = named_tensors(table, base if own is None else own)
    types = {name: tensor.dtype for name, tensor in named_tensors(table, base).items()}
    config = text_config(json.loads((folder / CONFIG).read_text()))
    if own is None:
        _merge(tensors, adapter, model_config)
    if PROJECTION in tensors and model_config.tie_word_embeddings:
        types[PROJECTION], config["tie_word_embeddings"] = types[EMBEDDING], False
    weights = {name: tensor.astype(types[name]) for name, tensor in tensors.items()}
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(types[EMBEDDING])
    if adapter.value_head is not None:
        weights[f"{value_head}.weight"] = tensor_of(np.asarray(adapter.value_head)[None])
    return {
        **files_beside(folder),
        CONFIG: json.dumps(config, indent=2).encode(),
        WEIGHTS: tensor_file(weights, {"format": "pt"}),
    }


def named_tensors(table: Iterable[Param], state: Any) -> dict[str, Tensor]:
    """Return parameters in Hugging Face's layout by their names, one tensor per layer and expert.

    Args:
        table: Table of the model's parameters.
        state: Parameters of the split NNX model, or other arrays with the same structure.
    """
    params: dict[tuple[Any, ...], Param] = {param.path: param for param in table}
    tensors: dict[str, Tensor] = {}
    for path, variable in nnx.to_flat_state(state):
        layer = next((part for part in path if isinstance(part, int)), None)
        param = params[tuple(part for part in path if not isinstance(part, int))]
        array = variable[...]
        tensors |= {name: _tensor(array, place, param) for place, name in param.stack.names(param.name, layer)}
    return tensors


def _tensor(array: Any, place: Place, param: Param) -> Tensor:
    """Return the part of an array at index `place` as a tensor in Hugging Face's layout."""
    shape, dtype = param.stored_shape, np.dtype(array.dtype)
    if param.transposed:
        return Tensor(shape, dtype, lambda: np.swapaxes(on_host(array, place), -1, -2))
    return Tensor(shape, dtype, lambda: on_host(array, place))


def _merge(tensors: dict[str, Tensor], adapter: Adapter, model_config: "ModelConfig") -> None:
    """Add the products of the adapter's LoRA pairs to the weights."""
    scaling = float(adapter.scaling)
    for target in connector_targets(model_config):
        connectors = pair_at(adapter, target.path)
        if np.any(connectors["phi"]) or np.any(connectors["bias"]):
            raise RequestError(
                f"mhc_expansion_rate={model_config.mhc_expansion_rate}: this adapter has trained connectors of several "
                "residual streams, and no model in Hugging Face format has such; export the adapter by itself, in PEFT "
                "format, or train without connectors (exclude_modules='.*_connector')"
            )
    for target in lora_targets(model_config):
        pair = pair_at(adapter, target.path)
        a, b = (np.asarray(pair[name]) for name in ("lora_A", "lora_B"))
        if not b.any():
            continue
        for place, module in target.modules:
            name = f"{module}.weight"
            before = tensors[EMBEDDING if name == PROJECTION and name not in tensors else name]
            tensors[name] = _merged(before, a[place], b[place], scaling)


def _merged(before: Tensor, a: np.ndarray, b: np.ndarray, scaling: float) -> Tensor:
    def make() -> np.ndarray:
        product = a @ b
        product *= np.float32(scaling)
        product = product.T
        product += before.make().astype(np.float32, copy=False)
        return product

    return Tensor(before.shape, np.dtype(np.float32), make)
