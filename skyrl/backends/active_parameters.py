"""Parameters of a base model that one token passes through, counted from what its files say of themselves."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

from skyrl.utils.files.tensor_file import read_header

PROJECTION, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
"""Names in config.json of how many experts a layer has, and how many of them a token goes to."""


def active_parameters(folder: Path) -> int | None:
    """Count of a model folder's parameters, of the experts those that a token is sent to, without an embedding that is
    only looked up (one that is tied to the vocabulary projection counts once). None where there are no weights, or
    none that can be read, of which loading them says more.

    Two operations of each are a token's forward pass, six its forward and backward pass (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1).
    """
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("text_config") or {}
    experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
    chosen = next((config[name] for name in CHOSEN if config.get(name)), experts)
    try:
        sizes = dict(size for path in sorted(folder.glob("*.safetensors")) for size in _sizes(path))
    except (OSError, ValueError, KeyError, struct.error):
        return None
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
