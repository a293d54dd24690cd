"""The adapter: the weights that a trained model has in addition to the base model."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from skyrl.tx.layers.dropout import Dropout


class Adapter(NamedTuple):
    """Weights of one trained model, or of several: a *bank*, whose arrays have a slot axis (see `weights`). A pytree.

    All adapters of a base model have the same tree; modules that are not trained have A = B = 0 and zero gradients.
    Ranks are padded with zeros, which stay zero in training. A model with full fine-tuning has its own base parameters
    instead of LoRA weights. A critic has a value head in addition.
    """

    weights: dict[str, Any]
    """`{"layers": {"self_attn": {"q_proj": pair, ...}, "mlp": {...}}, "lm_head": pair}`, or `{"base": state}` with
    all parameters of the split NNX model; either may also have `"value_head"` `[hidden]`.

    A pair is `{"lora_A": float32 [in, rank], "lora_B": float32 [rank, out]}`. Below "layers" (and other groups of
    layers, if the model has several), pairs have a leading [layers] axis, and then an [experts] axis for experts.

    In a bank, pairs are `[in, slots, rank]` and `[slots, rank, out]`; for experts, `[experts, slots, in, rank]` and
    `[experts, slots, rank, out]`. If layers are scanned, the [layers] axis comes first. If layers are unrolled, a group
    is a list of trees, one per layer.

    With several residual streams, each group also has "attn_connector" and "mlp_connector", which are
    `{"phi", "alpha", "bias"}` (see `skyrl.tx.layers.connector`). In a bank, each connector array has a [slots] axis
    before its last axis.
    """
    scaling: Float[Array, "..."]
    """alpha / rank: a scalar; `[slots]` in a bank."""
    dropout: Dropout | None = None
    """Dropout on the inputs of LoRA pairs. Used only in training passes."""

    @property
    def rank(self) -> int:
        """Padded rank; 0 for a model with its own base parameters."""
        return 0 if "base" in self.weights else self.weights["lm_head"]["lora_A"].shape[-1]

    @property
    def own_base(self) -> Any | None:
        """Parameters that replace the base model's; None if there are none."""
        return self.weights.get("base")

    @property
    def value_head(self) -> Float[Array, "hidden"] | None:
        """Value head of a critic: its product with a token's final hidden state is the value. None for other models."""
        return self.weights.get("value_head")
