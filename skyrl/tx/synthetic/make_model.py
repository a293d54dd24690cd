"""Models with random weights, in Hugging Face format: the built-in one, and others of any size.

Everything in a folder is a function of the arguments and of the small text in `data/`, so that equal arguments give
equal bytes. Neither torch nor transformers is needed.

Adding an architecture means one function from a `Size` to its configuration and tensors, registered in `ARCHITECTURES`.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from skyrl.tx.synthetic.make_tokenizer import END, PAD, make_tokenizer, tokenizer_config
from skyrl.utils.paths import cache_folder
from skyrl.utils.registry import Registry

BUILTIN_NAME = "tiny-qwen3"
"""Folder of the built-in model. Adapters belong to their base, so a change of its recipe or text needs a new name."""

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Size:
    """Dimensions of an architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_position: int


Tensors = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes. Vectors are norm scales."""

ARCHITECTURES: Registry[Callable[[Size], tuple[dict[str, Any], Tensors]]] = Registry("architecture")
"""By name: from a size to the members of config.json and the tensors of the weights."""


@ARCHITECTURES.register("qwen3")
def qwen3(size: Size) -> tuple[dict[str, Any], Tensors]:
    """Qwen3, dense."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": size.hidden**-0.5,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": size.max_position,
        "max_window_layers": size.layers,
        "model_type": "qwen3",
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": size.tied,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": size.vocab,
    }

    def tensors() -> Tensors:
        query, key_value = size.heads * size.head_dim, size.kv_heads * size.head_dim
        yield "model.embed_tokens.weight", (size.vocab, size.hidden)
        for layer in range(size.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (size.hidden,)
            yield prefix + "self_attn.q_proj.weight", (query, size.hidden)
            yield prefix + "self_attn.k_proj.weight", (key_value, size.hidden)
            yield prefix + "self_attn.v_proj.weight", (key_value, size.hidden)
            yield prefix + "self_attn.o_proj.weight", (size.hidden, query)
            yield prefix + "self_attn.q_norm.weight", (size.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (size.head_dim,)
            yield prefix + "post_attention_layernorm.weight", (size.hidden,)
            yield prefix + "mlp.gate_proj.weight", (size.intermediate, size.hidden)
            yield prefix + "mlp.up_proj.weight", (size.intermediate, size.hidden)
            yield prefix + "mlp.down_proj.weight", (size.hidden, size.intermediate)
        yield "model.norm.weight", (size.hidden,)
        if not size.tied:
            yield "lm_head.weight", (size.vocab, size.hidden)

    return config, tensors()


def make_model(
    out: str | Path,
    arch: str = "qwen3",
    *,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 32,
    intermediate: int = 768,
    vocab: int = 4096,
    tied: bool = False,
    max_position: int = 32_768,
    seed: int = 0,
    dtype: str = "float32",
    weights: bool = True,
) -> Path:
    """Write a model folder: configuration, random weights, tokenizer. The defaults are the built-in model's.

    Args:
        out: The folder. Made if it is not there; files of the same names are replaced.
        arch: A name in `ARCHITECTURES`.
        hidden: Width of the residual stream.
        layers: Decoder layers.
        heads: Query heads, a multiple of `kv_heads`.
        kv_heads: Key and value heads.
        head_dim: Width of a head, even.
        intermediate: Width of the MLP.
        vocab: Rows of the embedding. The tokenizer has as many tokens or, where its text runs out, fewer.
        tied: Whether the vocabulary projection shares the embedding's weights.
        max_position: Longest sequence in tokens.
        seed: Of the weights: any integer.
        dtype: "float32" or "bfloat16".
        weights: False leaves them out, for a backend with load_format=dummy.

    Returns the folder. Raises KeyError for an unknown architecture and ValueError for impossible sizes.
    """
    size = Size(hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied, max_position)
    _check(size, dtype)
    config, tensors = ARCHITECTURES[arch](size)
    tokenizer = make_tokenizer(vocab)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    _write_json(out / "config.json", config | special | {"torch_dtype": dtype})
    _write_json(out / "generation_config.json", special)
    _write_json(out / "tokenizer_config.json", tokenizer_config(max_position))
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    if weights:
        arrays = {name: _random(name, shape, seed).astype(DTYPES[dtype]) for name, shape in tensors}
        save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})
        (out / "model.safetensors").chmod((out / "config.json").stat().st_mode)  # the library makes it private
    return out


def builtin_model() -> Path:
    """The folder of the built-in model, in the user's cache folder; made there if it is missing.

    `SKYRL_CACHE` names another cache folder. Processes that make it at the same time do not disturb each other.
    """
    root = cache_folder().absolute()
    folder = root / "models" / BUILTIN_NAME
    if ":" in str(folder) or str(folder).count("/") == 2:
        raise ValueError(
            f"SKYRL_CACHE={root}: Tinker clients read {folder} as something else than a folder; "
            "name a folder without a colon, below the root"
        )
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f".{BUILTIN_NAME}-{uuid4().hex}")
        try:
            make_model(unfinished).rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _check(size: Size, dtype: str) -> None:
    for name, value in vars(size).items():
        if value < 1 and name != "tied":
            raise ValueError(f"{name}={value} is not a size; use a positive number")
    if size.heads % size.kv_heads:
        raise ValueError(f"heads={size.heads} is not a multiple of kv_heads={size.kv_heads}; make it one")
    if size.head_dim % 2:
        raise ValueError(f"head_dim={size.head_dim} is odd, but rotary embedding turns pairs; use an even number")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not a dtype of weights (known: {', '.join(DTYPES)}); choose one")


def _random(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Ones for norms, else normal numbers that keep the scale of their input, from a stream of the tensor's own.

    A standard deviation of 1 / sqrt(in) lets adapters of small models learn several times faster than the usual 0.02.
    """
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    stream = np.random.default_rng([seed % 2**64, zlib.crc32(name.encode())])
    return np.float32(shape[1] ** -0.5) * stream.standard_normal(shape, np.float32)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
