"""Number of a base model's parameters that one token uses, counted from the headers of its files."""

import math
from collections.abc import Iterator
from pathlib import Path

from skyrl.errors import RequestError
from skyrl.utils.files.hf_files import read_config
from skyrl.utils.files.tensor_file import read_header
from skyrl.utils.files.weight_files import weight_files

PROJECTION, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
"""Names in config.json for the number of experts of a layer, and for the number of experts per token."""


def active_parameters(folder: Path) -> int | None:
    """Count the parameters in a model folder that one token uses.

    Only the experts that a token is routed to count. An embedding that is only looked up does not count (an embedding
    tied to the vocabulary projection counts once). Returns None if the weights cannot be read; the later attempt to
    load them raises a better error.

    A forward pass takes two operations per token and parameter, a forward and backward pass six (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1).
    """
    config = read_config(folder)
    config |= config.get("text_config") or {}
    experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
    chosen = next((config[name] for name in CHOSEN if config.get(name)), experts)
    try:
        files = weight_files(folder)
    except RequestError:
        return None
    stored = {file: dict(_sizes(folder / file)) for file in set(files.values())}
    sizes = {name: stored[file][name] for name, file in files.items()}
    if any(name.endswith(PROJECTION) for name in sizes):
        sizes = {name: size for name, size in sizes.items() if not name.endswith(EMBEDDING)}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - of_experts + of_experts * chosen // experts or None


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of elements of each tensor of a file."""
    with path.open("rb") as file:
        header, _ = read_header(file)
    for name, tensor in header.items():
        yield name, math.prod(tensor["shape"])
