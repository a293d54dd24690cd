"""Members of a config.json, whatever its age, and errors that name them."""

from typing import Any

from skyrl.tx.design.design import ACTIVATIONS, LayerKind


def head_dim_of(config: Any) -> int:
    """Width of a head, which older files leave out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads_of(config: Any) -> int:
    """Key and value heads, which older files leave out where they are as many as query heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def experts_of(config: Any) -> int | None:
    """Experts per layer of a mixture-of-experts model, None of a dense one."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, None))), None)


def activation_of(config: Any, name: str = "hidden_act") -> str:
    """The feed-forward part's activation. Raises ValueError for one that is not implemented."""
    value = getattr(config, name)
    if value not in ACTIVATIONS:
        raise ValueError(
            f"{name}={value!r} is not implemented (known: {', '.join(ACTIVATIONS)}); use another base model"
        )
    return value


def kinds_of(config: Any, windowed: bool | None = None) -> list[LayerKind]:
    """The kind of each layer of a model with one rotation.

    Args:
        config: Of the model. `layer_types` says which layers have a window, if it is there.
        windowed: Whether all layers have one, where the file does not say. None: as `use_sliding_window` says.

    Raises ValueError for types of layers that are not implemented.
    """
    window, types = getattr(config, "sliding_window", None), layer_types(config)
    if types is None:
        on = getattr(config, "use_sliding_window", False) if windowed is None else windowed
        whole = getattr(config, "max_window_layers", 0) if windowed is None else 0
        return [LayerKind(window if on and i >= whole else None) for i in range(config.num_hidden_layers)]
    return [LayerKind(window if kind == "sliding_attention" else None) for kind in types]


def layer_types(config: Any, *known: str) -> list[str] | None:
    """`layer_types`, one for each layer. Raises ValueError for those that are not implemented.

    `known` are those that are, by default full and sliding attention.
    """
    types = getattr(config, "layer_types", None)
    known = known or ("full_attention", "sliding_attention")
    if others := sorted(set(types or []) - set(known)):
        raise ValueError(
            f"layer_types has {', '.join(others)}, which is not implemented (known: {', '.join(sorted(known))}); "
            "use another base model"
        )
    return types
