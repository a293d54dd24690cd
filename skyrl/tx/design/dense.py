"""The decoder on which most families are based: grouped-query attention, a gated feed-forward block, and pre-norm."""

from collections.abc import Sequence
from typing import Any

from skyrl.tx.design.config import activation_of, head_dim_of, kinds_of, kv_heads_of
from skyrl.tx.design.design import Attention, Design, Experts, Frequencies, Gated, LayerKind, Mixer, grouped
from skyrl.tx.design.rotations import frequencies


def attention_of(config: Any, **options: Any) -> Attention:
    """Return attention of the configured sizes. `options` are fields of `Attention`. Default scale: 1 / sqrt(width)."""
    width = head_dim_of(config)
    sizes = config.num_attention_heads, kv_heads_of(config), width
    return Attention(*sizes, **{"scale": width**-0.5} | options)


def dense_design(
    config: Any,
    attention: Mixer | Sequence[Mixer],
    *,
    kinds: Sequence[LayerKind] | None = None,
    feed_forwards: Sequence[Gated | Experts] | None = None,
    mlp_bias: bool = False,
    output_norms: bool = False,
    input_norms: bool = True,
    rotations: tuple[Frequencies, ...] | None = None,
    **options: Any,
) -> Design:
    """Return a decoder of the configured sizes.

    Args:
        config: Configuration of the model.
        attention: Attention of all layers, or one per layer.
        kinds: Kind of each layer; None: as in `kinds_of`.
        feed_forwards: Feed-forward block of each layer; None: gated blocks of `intermediate_size`.
        mlp_bias: True if those gated blocks have biases.
        output_norms: See `LayerGroup`.
        input_norms: See `LayerGroup`.
        rotations: See `Design`; None: one rotation for all layers, from the configuration.
        options: Other fields of `Design`.
    """
    kinds = kinds_of(config) if kinds is None else kinds
    if feed_forwards is None:
        feed_forwards = [Gated(config.intermediate_size, activation_of(config), mlp_bias)] * len(kinds)
    attentions = attention if isinstance(attention, Sequence) else [attention] * len(kinds)
    return Design(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        groups=grouped(kinds, feed_forwards, attentions, output_norms=output_norms, input_norms=input_norms),
        rotations=(frequencies(config),) if rotations is None else rotations,
        norm_eps=config.rms_norm_eps,
        **options,
    )
