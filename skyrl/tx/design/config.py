"""Access to members of a config.json that any version of transformers may have written. Errors name the member."""

from typing import Any

from skyrl.tx.design.design import ACTIVATIONS, LayerKind


def head_dim_of(config: Any) -> int:
    """Return the width of a head. Older files omit it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads_of(config: Any) -> int:
    """Return the number of key/value heads. Older files omit it if it equals the number of query heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def experts_of(config: Any) -> int | None:
    """Return the number of experts per layer of a mixture-of-experts model. None for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, None))), None)


def activation_of(config: Any, name: str = "hidden_act") -> str:
    """Return the activation of the feed-forward block. Raises ValueError if it is not implemented."""
    value = getattr(config, name)
    if value not in ACTIVATIONS:
        raise ValueError(
            f"{name}={value!r} is not implemented (known: {', '.join(ACTIVATIONS)}); use another base model"
        )
    return value


def kinds_of(config: Any, windowed: bool | None = None) -> list[LayerKind]:
    """Return the kind of each layer of a model whose layers share one rotation.

    Args:
        config: Configuration of the model. If it has `layer_types`, they determine which layers have a window.
        windowed: For files without `layer_types`. True if all layers have a window, False if none has. None: use
            `use_sliding_window` and `max_window_layers`.

    Raises ValueError for types of layers that are not implemented.
    """
    window, types = getattr(config, "sliding_window", None), layer_types(config)
    if types is None:
        on = getattr(config, "use_sliding_window", False) if windowed is None else windowed
        whole = getattr(config, "max_window_layers", 0) if windowed is None else 0
        return [LayerKind(window if on and i >= whole else None) for i in range(config.num_hidden_layers)]
    return [LayerKind(window if kind == "sliding_attention" else None) for kind in types]


def layer_types(config: Any, *known: str) -> list[str] | None:
    """Return `layer_types`, one per layer, or None. Raises ValueError for types that are not implemented.

    `known` are the implemented types, by default full and sliding attention.
    """
    types = getattr(config, "layer_types", None)
    known = known or ("full_attention", "sliding_attention")
    if others := sorted(set(types or []) - set(known)):
        raise ValueError(
            f"layer_types has {', '.join(others)}, which is not implemented (known: {', '.join(sorted(known))}); "
            "use another base model"
        )
    return types
