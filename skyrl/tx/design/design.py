"""Description of a decoder: sizes and options, which determine its parameters and its computation."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Supported activations of gated blocks, by Hugging Face's names."""


@dataclass(frozen=True)
class Frequencies:
    """Frequencies of rotary position embedding: the angle, in radians per position, of each rotated pair."""

    values: tuple[float, ...]
    """float32. Pair i is dimensions i and i + len(values); dimensions from 2 len(values) on are not rotated."""
    factor: float = 1.0
    """Factor that multiplies cosines and sines."""


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. Query head h uses key/value head h // (heads / kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    bias: bool = False
    """True if query, key and value projections have biases."""
    output_bias: bool = False
    head_norms: bool = False
    """True if each head's query and key are normalised before rotation."""
    whole_norms: bool = False
    """True if the queries of all heads are normalised together before rotation, and so are the keys."""
    softcap: float | None = None
    """If set, scores are softcap * tanh(scores / softcap)."""
    gated: bool = False
    """True if the query projection also produces a gate per head. Its sigmoid multiplies the output of the head."""

    @property
    def cached(self) -> tuple[int, int, int]:
        """Shape of a token in the cache: (number of heads, key width, value width)."""
        return self.kv_heads, self.head_dim, self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are linear maps of a small vector per token, the latent.

    In addition, all heads share a rotated key (DeepSeek-V2, https://arxiv.org/abs/2405.04434).
    """

    heads: int
    query_latent: int | None
    """Width of the latent of queries; None: queries are projected from the residual stream directly."""
    latent: int
    plain_dim: int
    """Width of the unrotated part of a head's query and key."""
    rotated_dim: int
    value_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    interleaved: bool = True
    """True if rotated pairs are the dimensions 2 i and 2 i + 1; False: i and i + half."""
    bias: bool = False
    """True if projections from and to the residual stream have biases. Queries without a latent never have biases."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of latents."""

    @property
    def cached(self) -> tuple[int, int, int]:
        """Cache shape as in `Attention`: one head, with the rotated key as the key and the latent as the value."""
        return 1, self.rotated_dim, self.latent


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet: each head has a recurrent state, a matrix that maps keys to values.

    Each token decays and updates the state, whose size is independent of the sequence length
    (https://arxiv.org/abs/2412.06464). Value head h uses queries and keys of key head h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Width in tokens of the convolution of queries, keys and values."""
    activation: str = "silu"
    """Activation after the convolution."""

    @property
    def keys(self) -> int:
        """Total width of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Total width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


Mixer = Attention | LatentAttention | DeltaNet
"""Token mixer of a layer: attention, latent attention or gated DeltaNet."""


@dataclass(frozen=True)
class Gated:
    """activation(gate) * up, projected down (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    inner: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: a router selects some experts (gated blocks) per token and sums their weighted outputs."""

    count: int
    active: int
    """Number of experts per token."""
    inner: int
    activation: str = "silu"
    normalised: bool = True
    """True if the weights of a token's experts are normalised to sum to 1; False: the weights are the scores."""
    sigmoid: bool = False
    """True if the score of an expert is the sigmoid of its logit, and experts are ranked by score plus a correction
    that balances their load (Wang et al. 2024, https://arxiv.org/abs/2408.15664). False: scores are the softmax."""
    groups: int = 1
    """Number of groups of experts. Groups are ranked by the sum of the scores of their two highest ranked experts."""
    active_groups: int = 1
    """Number of groups per token. The token's experts are selected from these groups."""
    factor: float = 1.0
    """Factor of the weights of a token's experts."""
    shared: int = 0
    """Inner width of the shared expert, which processes all tokens; 0: there is none."""


@dataclass(frozen=True)
class LayerKind:
    """Properties that may differ between layers with equal parameter shapes."""

    window: int | None = None
    """Number of tokens that a token attends to, including itself; None: itself and all before it."""
    rotation: int = 0
    """Index in `Design.rotations`."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers with equal parameter shapes: consecutive layers, or every `step`-th layer."""

    first: int
    """Number of the first layer in the whole model."""
    kinds: tuple[LayerKind, ...]
    """Kind of each layer."""
    attention: Mixer
    feed_forward: Gated | Experts
    output_norms: bool = False
    """True if outputs of attention and feed-forward are normalised."""
    input_norms: bool = True
    """True if inputs of attention and feed-forward are normalised."""
    step: int = 1
    """Distance between the numbers of consecutive layers of the group; `step` groups are interleaved."""

    @property
    def name(self) -> str:
        """Key of the group in parameter trees."""
        return f"layers_{self.first}" if self.first else "layers"

    @property
    def numbers(self) -> range:
        """Numbers of the group's layers in the whole model."""
        return range(self.first, self.first + len(self.kinds) * self.step, self.step)


@dataclass(frozen=True)
class Design:
    """A complete decoder."""

    hidden: int
    vocab: int
    tied: bool
    """True if the vocabulary projection is the embedding."""
    groups: tuple[LayerGroup, ...]
    rotations: tuple[Frequencies, ...]
    norm_eps: float
    norm_offset: float = 0.0
    """Offset added to the scales of norms: 1 if scales are stored as differences from 1."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    unread: tuple[str, ...] = ()
    """Name prefixes of skipped tensors, such as tensors of multi-token prediction layers."""

    @property
    def layers(self) -> int:
        """Number of layers in all groups."""
        return sum(len(group.kinds) for group in self.groups)

    @property
    def blocks(self) -> Iterator[tuple[LayerGroup, ...]]:
        """Tuples of interleaved groups, in model order. A tuple's groups take turns, one layer at a time."""
        place = 0
        while place < len(self.groups):
            end = place + self.groups[place].step
            yield self.groups[place:end]
            place = end


def grouped(
    kinds: Sequence[LayerKind],
    feed_forwards: Sequence[Gated | Experts],
    attentions: Sequence[Mixer],
    *,
    output_norms: bool,
    input_norms: bool,
) -> tuple[LayerGroup, ...]:
    """Build groups from the kind and blocks of each layer. Repeating patterns become interleaved groups."""
    groups: list[LayerGroup] = []
    norms = {"output_norms": output_norms, "input_norms": input_norms}
    parts = list(zip(attentions, feed_forwards, strict=True))
    first = 0
    while first < len(parts):
        step, count = _longest_repetition(parts[first:])
        end = first + step * count
        for number in range(first, first + step):
            groups.append(LayerGroup(number, tuple(kinds[number:end:step]), *parts[number], **norms, step=step))
        first = end
    return tuple(groups)


def _longest_repetition(parts: Sequence[Hashable]) -> tuple[int, int]:
    """Return (length, count) of the repeated prefix that covers the most layers. Shorter prefixes win ties."""
    best = 1, 1
    for length in range(1, max(1, len(parts) // 2) + 1):
        count = 1
        while parts[count * length : (count + 1) * length] == parts[:length]:
            count += 1
        if count * length > best[0] * best[1] and (count > 1 or length == 1):
            best = length, count
    return best
