"""Models with random weights in Hugging Face format: the built-in model, and others of any size and family.

The files depend only on the arguments and on the small text in `data/`, so that equal arguments give equal bytes.
Neither torch nor transformers is needed.
"""

import json
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from skyrl.tx.design.family import FAMILIES, Size, made_config
from skyrl.tx.design.parameters import Param, parameters
from skyrl.tx.families import design_of
from skyrl.tx.synthetic.make_tokenizer import END, PAD, make_tokenizer, tokenizer_config
from skyrl.utils.files.paths import cache_folder
from skyrl.utils.spelling import did_you_mean

BUILTIN_NAME = "tiny-qwen3"
"""Folder name of the built-in model. Adapters depend on their base, so new weights or tokens need a new name."""

LONGEST = 32_768
"""Context length of the built-in model in tokens."""

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


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
    max_position: int = LONGEST,
    seed: int = 0,
    dtype: str = "float32",
    weights: bool = True,
) -> Path:
    """Write a model folder: configuration, random weights, tokenizer. The defaults give the built-in model.

    Args:
        out: Folder to write. Created if missing; existing files are replaced.
        arch: `model_type` of a family, such as qwen3.
        hidden: Width of the residual stream.
        layers: Number of decoder layers.
        heads: Number of query heads, a multiple of `kv_heads`.
        kv_heads: Number of key and value heads.
        head_dim: Width of a head, an even number.
        intermediate: Width of the MLP.
        vocab: Rows of the embedding. The tokenizer may have fewer tokens, because its training text is small.
        tied: True if the vocabulary projection shares the weights of the embedding.
        max_position: Maximum length of sequences in tokens.
        seed: Seed of the weights; any integer.
        dtype: "float32" or "bfloat16".
        weights: False to write no weights, for a backend with load_format=dummy.

    Returns the folder. Raises KeyError for an unknown architecture and ValueError for impossible sizes.
    """
    size = Size(hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied, max_position)
    _check(size, dtype)
    config = made_config(_architecture(arch), size)
    table = parameters(design_of(SimpleNamespace(**config)))
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
        names = ((param, name) for param in table if param.stored for _, name in param.stack.names(param.name))
        arrays = {name: _random(name, param, seed).astype(DTYPES[dtype]) for param, name in names}
        save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})
        (out / "model.safetensors").chmod((out / "config.json").stat().st_mode)  # the library writes it with mode 0600
    return out


def builtin_model() -> Path:
    """Return the folder of the built-in model, in the user's cache folder. Creates it if missing.

    The environment variable `SKYRL_CACHE` sets the cache folder. Several processes may create the model concurrently.
    """
    root = cache_folder().absolute()
    folder = root / "models" / BUILTIN_NAME
    if ":" in str(folder) or str(folder).count("/") == 2:
        raise ValueError(
            f"SKYRL_CACHE={root}: Tinker clients read {folder} as something else than a folder; "
            "name a folder without a colon, below the root"
        )
    if folder.exists():
        _renew_template(folder)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f".{BUILTIN_NAME}-{uuid4().hex}")
        try:
            make_model(unfinished).rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process has created it
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _renew_template(folder: Path) -> None:
    """Update tokenizer_config.json of an earlier version. Weights and tokens do not change, so adapters stay valid."""
    path, config = folder / "tokenizer_config.json", tokenizer_config(LONGEST)
    with suppress(OSError):  # a read-only folder is left unchanged
        if json.loads(path.read_text(encoding="utf-8")) != config:
            unfinished = path.with_name(f".{path.name}-{uuid4().hex}")
            _write_json(unfinished, config)
            unfinished.replace(path)


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


def _architecture(model_type: str) -> str:
    known = {family.model_type: name for name, family in ((name, FAMILIES[name]) for name in FAMILIES)}
    if model_type not in known:
        near = did_you_mean(model_type, known)
        raise KeyError(f"no architecture named {model_type!r}; known: {', '.join(sorted(known))}{near}")
    return known[model_type]


def _random(name: str, param: Param, seed: int) -> np.ndarray:
    """Create a tensor: neutral values for norms and biases, normal values of standard deviation 1 / sqrt(in) otherwise.

    Each tensor has its own random stream. With this standard deviation, adapters of small models learn several times
    faster than with the usual 0.02.
    """
    shape = param.stored_shape
    if param.start != "normal":
        return np.full(shape, float(param.start == "ones"), np.float32)
    stream = np.random.default_rng([seed % 2**64, zlib.crc32(name.encode())])
    return np.float32(param.inputs**-0.5) * stream.standard_normal(shape, np.float32)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
