"""Definition of useful work, in floating-point operations (a multiply-add is two).

Only matrix products count, and only those that the mathematics needs: causal attention over the keys visible to a token
(half of the square), adapters at their true rank, no padding, no recomputation. So the work depends on the request
only, not on the program, and fractions of a machine's peak are comparable between versions.

Full fine-tuning needs three products per base matrix application, but training an adapter only two: forward (2 N) and
backward to the activations (2 N); the base has no weight gradient. The adapter's own matrices need all three.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense decoder with gated MLP and grouped-query attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    def projections(self) -> list[tuple[int, int]]:
        """(in, out) of each linear layer of one decoder layer: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, q), (self.hidden, kv), (self.hidden, kv), (q, self.hidden)]
        mlp = [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return attention + mlp

    def layer_parameters(self) -> int:
        """Base parameters in linear layers, all decoder layers, without the vocabulary projection."""
        return self.layers * sum(rows * columns for rows, columns in self.projections())

    def layer_adapter_parameters(self, rank: int) -> int:
        """Adapter parameters on those linear layers."""
        return self.layers * sum(rank * (rows + columns) for rows, columns in self.projections())


TINY = Shape(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=768, vocab=4096)
MEDIUM = Shape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=16384)
SHAPES = {"tiny": TINY, "medium": MEDIUM}
QWEN3 = {
    "0.6B": Shape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151_936),
    "1.7B": Shape(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocab=151_936),
    "4B": Shape(hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=9728, vocab=151_936),
    "8B": Shape(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=151_936),
}
"""Shapes of Qwen3 (https://arxiv.org/abs/2505.09388, table 1); the first three have tied vocabularies."""


def attention(shape: Shape, tokens: int) -> int:
    """Scores and weighted values of a causal sequence of `tokens`: two products per (query, visible key) pair."""
    pairs = tokens * (tokens + 1) // 2
    return 2 * 2 * shape.layers * shape.heads * shape.head_dim * pairs


def linear(shape: Shape, rank: int, tokens: int, logits: int) -> int:
    """Linear layers, base and adapter, forward: `tokens` through the layers, `logits` through the vocabulary."""
    per_token = shape.layer_parameters() + shape.layer_adapter_parameters(rank)
    per_logit = shape.hidden * shape.vocab + rank * (shape.hidden + shape.vocab)
    return 2 * (per_token * tokens + per_logit * logits)


def forward(shape: Shape, rank: int, tokens: int) -> int:
    """One sequence, log-probabilities at every position."""
    return linear(shape, rank, tokens, tokens) + attention(shape, tokens)


def forward_backward(shape: Shape, rank: int, tokens: int) -> int:
    """One sequence, gradients of an adapter of `rank` on every linear layer (vocabulary projection too)."""
    base = 2 * linear(shape, 0, tokens, tokens)
    adapter = 3 * (linear(shape, rank, tokens, tokens) - linear(shape, 0, tokens, tokens))
    return base + adapter + 3 * attention(shape, tokens)


def decode(shape: Shape, rank: int, prompt: int, generated: int) -> int:
    """Prefill of `prompt` tokens and `generated` samples. The last sample is not fed back."""
    fed = prompt + generated - 1
    return linear(shape, rank, fed, generated) + attention(shape, fed)
