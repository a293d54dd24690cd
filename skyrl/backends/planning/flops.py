"""Definition of useful work, in floating-point operations (a multiply-add is two).

Only matrix products count, and only those that the mathematics needs: causal attention over the keys visible to a token
(half of the square), adapters at their true rank, no padding, no recomputation. So the work depends on the request
only, not on the program, and fractions of a machine's peak are comparable between versions.

Full fine-tuning needs three products per base matrix application, but training an adapter only two: forward (2 N) and
backward to the activations (2 N); the base has no weight gradient. The adapter's own matrices need all three.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl.backends.active_parameters import CHOSEN, EXPERTS


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
        """Base parameters that a token uses in linear layers, all decoder layers, without the vocabulary projection."""
        return self.layers * sum(rows * columns for rows, columns in self.projections())

    def stored_layer_parameters(self) -> int:
        """Parameters like `layer_parameters`, including those that a token does not use."""
        return self.layer_parameters()

    def expert_parameters(self) -> int:
        """Part of `layer_parameters` in experts that a router chooses."""
        return 0

    def layer_adapter_parameters(self, rank: int) -> int:
        """Adapter parameters on those linear layers."""
        return self.layers * sum(rank * (rows + columns) for rows, columns in self.projections())

    def stored_layer_adapter_parameters(self, rank: int) -> int:
        """Adapter parameters on all linear layers: of experts, all."""
        return self.layer_adapter_parameters(rank)


@dataclass(frozen=True)
class ExpertShape(Shape):
    """Sizes of a decoder whose MLPs are experts, of which a router chooses some for each token.

    `intermediate` is the width of dense MLPs, as in a dense decoder.
    """

    experts: int
    """Experts of a layer."""
    chosen: int
    """Experts that a token uses."""
    expert_width: int
    """Intermediate width of an expert."""
    dense_layers: int = 0
    """Layers with a dense MLP instead of experts."""
    shared_width: int = 0
    """Intermediate width of an expert that all tokens use, in each layer with experts."""

    def layer_parameters(self) -> int:
        return self._parameters(self.chosen)

    def stored_layer_parameters(self) -> int:
        return self._parameters(self.experts)

    def expert_parameters(self) -> int:
        return self._sparse_layers * self.chosen * 3 * self.hidden * self.expert_width

    def layer_adapter_parameters(self, rank: int) -> int:
        """Adapter parameters that a token uses. Routers have none."""
        return self._adapter_parameters(rank, self.chosen)

    def stored_layer_adapter_parameters(self, rank: int) -> int:
        return self._adapter_parameters(rank, self.experts)

    @property
    def _sparse_layers(self) -> int:
        return self.layers - self.dense_layers

    def _adapter_parameters(self, rank: int, experts: int) -> int:
        sizes = self.layers * sum(map(sum, self.projections()[:4]))
        sizes += 3 * (self.hidden + self.intermediate) * self.dense_layers
        sparse = experts * (self.hidden + self.expert_width) + (self.hidden + self.shared_width) * bool(
            self.shared_width
        )
        return rank * (sizes + 3 * sparse * self._sparse_layers)

    def _parameters(self, experts: int) -> int:
        attention = sum(rows * columns for rows, columns in self.projections()[:4])
        width = experts * self.expert_width + self.shared_width
        sparse = self.hidden * (3 * width + self.experts)  # with the router
        return (
            self.layers * attention
            + self._sparse_layers * sparse
            + self.dense_layers * 3 * self.hidden * (self.intermediate)
        )


def shape_of(config: Mapping[str, Any], matrices: int) -> Shape | None:
    """Return the sizes of a config.json; None if the model is no decoder of this form.

    Args:
        config: Contents of config.json; for a multimodal model, of its text part.
        matrices: Number of parameters in the model's matrices. A model has this form if the form's matrices have as
            many, to within 1 %.
    """
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not heads or not hidden:
        return None
    experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
    width = config.get("intermediate_size") or 0
    sizes = {
        "hidden": hidden,
        "layers": config.get("num_hidden_layers") or 0,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "intermediate": width,
        "vocab": config.get("vocab_size") or 0,
    }
    shape = Shape(**sizes)
    if experts:
        shape = ExpertShape(
            **sizes,
            experts=experts,
            chosen=next((config[name] for name in CHOSEN if config.get(name)), experts),
            expert_width=config.get("moe_intermediate_size") or width,
            dense_layers=config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ()),
            shared_width=config.get("shared_expert_intermediate_size") or 0,
        )
    embeddings = shape.hidden * shape.vocab * (1 if config.get("tie_word_embeddings") else 2)
    return shape if abs(shape.stored_layer_parameters() + embeddings - matrices) <= 0.01 * matrices else None


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


def full_forward_backward(shape: Shape, tokens: int) -> int:
    """One sequence, gradients of all weights."""
    return 3 * forward(shape, 0, tokens)


def decode(shape: Shape, rank: int, prompt: int, generated: int) -> int:
    """Prefill of `prompt` tokens and `generated` samples. The last sample is not fed back."""
    fed = prompt + generated - 1
    return linear(shape, rank, fed, generated) + attention(shape, fed)
