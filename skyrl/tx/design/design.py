"""A decoder's description: sizes and options, from which its parameters and its computation follow."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Functions of a gate, by Hugging Face's names."""


@dataclass(frozen=True)
class Frequencies:
    """Frequencies of rotary position embedding: angles per position of the pairs that are turned."""

    values: tuple[float, ...]
    """float32. Pair i is dimensions i and i + len(values); dimensions from 2 len(values) on are not turned."""
    factor: float = 1.0
    """Factor of cosines and sines."""


@dataclass(frozen=True)
class Attention:
    """Attention with grouped query heads. Head h reads the key/value head h // (heads / kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    bias: bool = False
    """On query, key and value projections."""
    output_bias: bool = False
    head_norms: bool = False
    """Norms of each head's query and key, before they are rotated."""
    whole_norms: bool = False
    """Norms of the queries of all heads together, and of the keys, before they are rotated."""
    softcap: float | None = None
    """Scores are softcap * tanh(scores / softcap)."""
    gated: bool = False
    """The query projection makes a gate beside each head's query. Its sigmoid is a factor of what the head reads."""

    @property
    def cached(self) -> tuple[int, int, int]:
        """Shape of a token in the cache: heads, and each one's key and value width."""
        return self.kv_heads, self.head_dim, self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are linear maps of a narrow vector per token, the latent.

    Beside it stands a rotated key, which all heads share (DeepSeek-V2, https://arxiv.org/abs/2405.04434).
    """

    heads: int
    query_latent: int | None
    """Width of the vector that queries are made of; None: of the residual stream."""
    latent: int
    plain_dim: int
    """Width of the part of a head's query and key that is not rotated."""
    rotated_dim: int
    value_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    interleaved: bool = True
    """Rotated pairs are the dimensions 2 i and 2 i + 1; else i and i + half."""
    bias: bool = False
    """On the maps from and to the residual stream, but for queries without a latent."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of latents."""

    @property
    def cached(self) -> tuple[int, int, int]:
        """Cache shape as of `Attention`: one head, whose key is the value (the latent) and what is stored beside it."""
        return 1, self.rotated_dim, self.latent


@dataclass(frozen=True)
class DeltaNet:
    """A matrix per head that maps keys to values, which fades and is corrected at each token, and is read by queries.

    It is of one size however long the sequence is (Gated DeltaNet, https://arxiv.org/abs/2412.06464). Value head h has
    the queries and keys of key head h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution of queries, keys and values reaches over."""
    activation: str = "silu"
    """Activation of the convolution's results."""

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
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
    """A router that sends each token to some of many gated maps, and the weighted sum of those."""

    count: int
    active: int
    """Experts of a token."""
    inner: int
    activation: str = "silu"
    normalised: bool = True
    """True if the weights of a token's experts are scaled to sum to 1; False: each is its part of all probabilities."""
    sigmoid: bool = False
    """Score of an expert is the sigmoid of its logit alone, ranked with a correction added to it that balances
    experts (Wang et al. 2024, https://arxiv.org/abs/2408.15664); else the softmax of all."""
    groups: int = 1
    """Parts of the experts. The two highest ranked ones of each rank the part."""
    active_groups: int = 1
    """Parts that a token's experts are in."""
    factor: float = 1.0
    """Factor of the weights of a token's experts."""
    shared: int = 0
    """Inner width of a gated map of all tokens beside; 0: there is none."""


@dataclass(frozen=True)
class LayerKind:
    """In what layers of the same parameters may differ."""

    window: int | None = None
    """Tokens that a token attends to, itself included; None: all before it."""
    rotation: int = 0
    """Place in `Design.rotations`."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that have parameters of the same shapes: those that follow each other, or each so many-th one."""

    first: int
    """Number of the first one in the whole model."""
    kinds: tuple[LayerKind, ...]
    """Kind of each layer."""
    attention: Mixer
    feed_forward: Gated | Experts
    output_norms: bool = False
    """Norms of what attention and feed-forward add to the residual stream."""
    input_norms: bool = True
    """Norms of what attention and feed-forward read."""
    step: int = 1
    """From the number of a layer to that of the next one. So many groups take turns."""

    @property
    def name(self) -> str:
        """Name of its part in trees of parameters."""
        return f"layers_{self.first}" if self.first else "layers"

    @property
    def numbers(self) -> range:
        """Numbers of its layers in the whole model."""
        return range(self.first, self.first + len(self.kinds) * self.step, self.step)


@dataclass(frozen=True)
class Design:
    """A whole decoder."""

    hidden: int
    vocab: int
    tied: bool
    """True if the vocabulary projection is the embedding."""
    groups: tuple[LayerGroup, ...]
    rotations: tuple[Frequencies, ...]
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the factors of norms: 1 where they are stored as differences from it."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    unread: tuple[str, ...] = ()
    """Beginnings of names of tensors that are left out, such as those of layers that predict tokens further ahead."""

    @property
    def layers(self) -> int:
        """Layers of all groups."""
        return sum(len(group.kinds) for group in self.groups)

    @property
    def blocks(self) -> Iterator[tuple[LayerGroup, ...]]:
        """Groups that take turns, together: one layer of each, then the next of each."""
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
    """Groups of layers, given each one's kind and parts. Patterns that repeat become groups that take turns."""
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
    """Length and number of the equal pieces that cover most from the beginning on, the shortest of several."""
    best = 1, 1
    for length in range(1, max(1, len(parts) // 2) + 1):
        count = 1
        while parts[count * length : (count + 1) * length] == parts[:length]:
            count += 1
        if count * length > best[0] * best[1] and (count > 1 or length == 1):
            best = length, count
    return best
