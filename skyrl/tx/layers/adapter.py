"""The adapter: what one model has of its own beside the base model."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from skyrl.tx.layers.dropout import Dropout


class Adapter(NamedTuple):
    """State of one model alone: LoRA weights, or (with a slot axis, see below) those of a *bank*. A pytree.

    Every adapter of a base model has the same tree; modules that are not trained have A = B = 0 and zero gradients.
    Ranks are padded with zeros, which gradients preserve. A model that is trained as a whole has a base of its own
    instead, and a critic has a value head beside.
    """

    weights: dict[str, Any]
    """`{"layers": {"self_attn": {"q_proj": pair, ...}, "mlp": {...}}, "lm_head": pair}`, or `{"base": state}` with
    all parameters of the split NNX model; `"value_head"` `[hidden]` beside either.

    A pair is `{"lora_A": float32 [in, rank], "lora_B": float32 [rank, out]}`, below "layers" (and other groups of
    layers, if the model has several) with a leading [layers] axis, and then [experts] where each has its own. In a
    bank a group is a list of such trees, one per layer, where layers are unrolled, and pairs are `[in, slots, rank]`
    and `[slots, rank, out]`, of experts `[experts, slots, in, rank]` and `[experts, slots, rank, out]`, with the
    [layers] axis first where layers are scanned.

    With several residual streams each group has "attn_connector" and "mlp_connector" too, see
    `skyrl.tx.layers.connector`: `{"phi", "alpha", "bias"}`, in a bank with a [slots] axis before the last one.
    """
    scaling: Float[Array, "..."]
    """alpha / rank: a scalar, `[slots]` in a bank."""
    dropout: Dropout | None = None
    """Dropout of what the pairs read, in a pass that is trained on."""

    @property
    def rank(self) -> int:
        """The padded rank; 0 with a base of its own."""
        return 0 if "base" in self.weights else self.weights["lm_head"]["lora_A"].shape[-1]

    @property
    def own_base(self) -> Any | None:
        """Parameters in the place of the base model's, if there are."""
        return self.weights.get("base")

    @property
    def value_head(self) -> Float[Array, "hidden"] | None:
        """Factor of final hidden states that gives values, of a critic."""
        return self.weights.get("value_head")
