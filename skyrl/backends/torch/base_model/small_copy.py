"""Small random copies of models: the same classes and kinds of layers, with narrow layers and small limits.

A configuration is a dictionary of numbers whose names differ by architecture. They are reduced by endings of their
names; relations between them that an architecture needs are kept by trying several reductions.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import nn

from skyrl.backends.torch.base_model.loading import lacks_memory, unfilled

MAX_PARAMETERS = 2**27
"""Largest copy."""

HEADS = re.compile(r"(heads|n_head|num_query_groups)(_per_layer)?$")
WIDTHS = re.compile(
    r"(hidden_size|d_model|n_embd|emb_dim|embedding_dim|embed_proj_dim|embedding_size|d_ssm|lru_width)$"
)
INSIDE = re.compile(r"(head_dim|head_size|d_head|kv_channels|rotary_dim|lora_rank)$")
"""Widths inside of heads, or of what they share."""
INNER = re.compile(r"(intermediate_size|ffn_dim|ffn_hidden_size|intermediate_size_mlp|dff|dim_ff|n_inner|d_inner)$")
WIDTH = 64
"""Maximum of `INNER`."""
LAYERS = re.compile(r"(hidden_layers|n_layers?|num_layers|coder_layers|num_blocks)$")
ALL = 10**6
"""Number of layers of a copy that has all."""
LONGEST = 128
"""Longest sequence in tokens."""
VOCAB = 128
MANY = re.compile(r"(num_experts|n_routed_experts|local_experts|expert_num)$")
FEW = re.compile(r"(experts_per_tok|experts_per_token|moe_top_?k|moe_k|n_group|expert_group)$")
MAXIMA = (
    (re.compile("original_max_position_embeddings"), 16),
    (
        re.compile(
            r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_length|max_target_positions)$",
        ),
        LONGEST,
    ),
    (re.compile(r"max_distance$"), 32),  # more than distances that are exact, of which there are 16
    (re.compile(r"topk_blocks$"), 2),
    (
        re.compile(
            r"(window|window_len|window_size|chunk_size|chunk_length|local_attention|index_topk|index_kpool|block_size"
            r"|floor|floor_scale|rel_extent|mem_len|indexer_budget)$"
        ),
        8,
    ),
    (re.compile(r"(^|_)vocab(_size|$)"), VOCAB),
    (re.compile(r"token_id$"), VOCAB - 1),
    (re.compile(r"^topk_group$"), 1),
    (MANY, 8),
    (FEW, 2),
    (re.compile(r"n_groups$"), 1),
    (re.compile("^index_n_heads$"), 64),  # few heads give many keys the same score, 0, and so no order
)
"""Maximum of other numbers in a small copy, by the first pattern that a name matches. Lengths are in tokens."""
VARYING = re.compile(r"(idx|id|index|number|num)$")
"""Names of attributes of layers that differ between layers of a kind."""


def small_copy(model: Any, layers: Sequence[nn.Module]) -> Any | None:
    """Create a small random copy of a model on the CPU, in float32. None: the architecture has other needs.

    Args:
        model: The model, or its skeleton.
        layers: Its decoder blocks.
    """
    config = model.config
    count = _layers_needed(layers) or int(getattr(config, "num_hidden_layers", None) or 1)
    whole = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    reductions = (partial(_narrow, 8), partial(_narrow, 1), _divided, _short)
    for kept, reduced in product((count, ALL), reductions):
        try:
            small = type(config).from_dict(reduced(whole, kept))
            with torch.random.fork_rng(devices=[]):
                size = sum(x.numel() for x in unfilled(partial(_new, type(model), small)).parameters())
            if size <= MAX_PARAMETERS:
                copy = _filled(type(model), small)
                copy(input_ids=torch.ones(1, 2, dtype=torch.int64), use_cache=False)
                return copy
        except Exception as error:  # of any type, as each architecture has checks of its own
            if lacks_memory(error):
                raise
    return None


def _new(kind: Any, config: Any) -> Any:
    return kind._from_config(config, dtype=torch.float32)


def _filled(kind: Any, config: Any) -> Any:
    """Create a model in which each weight matters."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not those of GPUs
        model = _new(kind, config).eval()
        with torch.no_grad():
            for x in model.parameters():
                x.normal_(0, x.shape[-1] ** -0.5) if x.dim() > 1 else x.add_(0.1 * torch.randn_like(x))
            inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            if inputs is not outputs:
                inputs.normal_()
    return model.requires_grad_(False)


def _layers_needed(layers: Sequence[nn.Module]) -> int:
    """Number of first layers that include each kind of layer, at least 2."""
    kinds = [_kind(layer) for layer in layers]
    return max(2, 1 + max(kinds.index(kind) for kind in kinds)) if len(kinds) > 1 else len(kinds)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    def described() -> Iterator[Any]:
        for name, module in layer.named_modules():
            yield name, type(module).__name__
            for key, value in sorted(vars(module).items()):
                if isinstance(value, bool | int | str) and not VARYING.search(key):
                    yield key, value
            for key, weight in module.named_parameters(recurse=False):
                yield key, tuple(weight.shape)

    return tuple(described())


def _reduced(whole: Mapping[str, Any], count: int, own: Callable[[str, int], int], part: int = 1) -> dict[str, Any]:
    """Reduce a configuration to `count` layers and small limits, and its other sizes by `own`.

    `part` is the number by which `own` divides widths of heads.
    """

    def change(name: str, value: int) -> int:
        for pattern, most in ((LAYERS, count), *MAXIMA):
            if pattern.search(name):
                return min(value, most)
        return own(name, value)

    layers = next((value for name, value in whole.items() if LAYERS.search(name) and isinstance(value, int)), 0)

    def mapped(given: Any, name: str = "") -> Any:
        if isinstance(given, Mapping):
            return {key: mapped(value, str(key)) for key, value in given.items()}
        if isinstance(given, list | tuple):
            size = count if len(given) == layers else len(given) // part if name.endswith("_factor") else len(given)
            return [mapped(value, name) for value in given[:size]]
        return change(name, given) if isinstance(given, int) and not isinstance(given, bool) else given

    return mapped(whole)


def _narrow(part: int, whole: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Four heads of a part of the width, and narrow feed-forward layers."""
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    heads = next((whole[name] for name in names if name in whole), 1)
    keys = whole.get("num_key_value_heads") or heads

    def own(name: str, value: int) -> int:
        if HEADS.search(name):
            return min(value, 2 if name.endswith(("key_value_heads", "kv_heads")) and keys < heads else 4)
        if WIDTHS.search(name):
            return (whole.get("head_dim") or value // heads) * min(heads, 4) // part
        if INSIDE.search(name):
            return value // part if value % (2 * part) == 0 else value
        return min(value, WIDTH) if INNER.search(name) else value

    return _reduced(whole, count, own, part)


def _divided(whole: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Numbers of heads and widths divided by the same number."""
    heads = [value for name, value in whole.items() if HEADS.search(name) and isinstance(value, int) and value > 1]
    factor = gcd(*heads) if heads else 1
    factor = factor if factor % 2 else factor // 2

    def own(name: str, value: int) -> int:
        scaled = any(pattern.search(name) for pattern in (HEADS, WIDTHS, INNER))
        return value // factor if scaled and value % max(factor, 1) == 0 else value

    return _reduced(whole, count, own)


def _short(whole: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Widths and numbers of heads as they are."""
    return _reduced(whole, count, lambda name, value: value)
