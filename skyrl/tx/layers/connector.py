"""Connectors: trained modules through which a sub-block uses several residual streams (mHC, arXiv:2512.24880).

Around attention or feed-forward, X `[n, hidden]` are the n streams of a token, and x `[n hidden]` is the concatenation
of the normalised streams:

    H_pre  = sigmoid(alpha_pre (x phi_pre) + b_pre)         u  = sum over s of H_pre[s] X[s]
    H_post = 2 sigmoid(alpha_post (x phi_post) + b_post)    X' = M X + H_post y,  y = block(norm(u))
    M      = 20 Sinkhorn rounds of exp(alpha_res (x phi_res) + b_res): rows divided by their sums, then columns

An adapter contains phi `[n hidden, 2 n + n^2]`, alpha `[3]` and bias `[2 n + n^2]`, with the parts pre, post, res in
this order. bias is b minus the initial b, which is log(1 / (n - 1)), -0.2 to 0.2 and 10 I for the three parts. With
phi and bias 0, the mean of the streams is the residual stream of the plain model, as H_post sums to n and each column
of M to 1. If the alpha of a part is exactly 0, the part has no connector: H or M keeps its initial value, without
gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from skyrl.tx.layers.lora import Lora

Streams = Float[Array, "batch tokens streams hidden"]
Hidden = Float[Array, "batch tokens hidden"]
ROUNDS = 20
DIAGONAL = 10.0
"""Initial diagonal of b_res: a stream keeps all but about exp(-10) of itself."""
SPREAD = 0.2
"""Bound of the initial b_post, which runs from -SPREAD to SPREAD over the streams, so that the streams diverge."""


class PlainResidual:
    """The residual connection of a model with one stream."""

    @staticmethod
    def read(x: Hidden) -> Hidden:
        """Return the input of the sub-block."""
        return x

    @staticmethod
    def write(x: Hidden, y: Hidden) -> Hidden:
        """Return the stream after the sub-block with output `y`."""
        return x + y


class Connector(NamedTuple):
    """Connection of several streams with a sub-block: float32 weights for each token."""

    pre: Float[Array, "batch tokens streams"]
    post: Float[Array, "batch tokens streams"]
    mix: Float[Array, "batch tokens streams streams"]

    @classmethod
    def of(cls, x: Streams, lora: Lora, norm: Callable[[Streams], Streams]) -> "Connector":
        """Compute the connection from the streams.

        Args:
            x: Streams before the sub-block.
            lora: View of the connector's parameters.
            norm: Norm of the sub-block, applied to each stream.
        """
        n = x.shape[-2]
        wide = np.promote_types(x.dtype, np.float32)
        projected, alpha, bias = _projected(norm(x).reshape(*x.shape[:2], -1).astype(wide), lora)
        scale = alpha[..., np.repeat([0, 1, 2], [n, n, n * n])]
        values = scale * projected + jnp.where(scale == 0, 0.0, bias) + start(n)[None, None].astype(wide)
        pre, post, res = jnp.split(values, [n, 2 * n], axis=-1)
        return cls(jax.nn.sigmoid(pre), 2 * jax.nn.sigmoid(post), sinkhorn(res.reshape(*res.shape[:-1], n, n)))

    def read(self, x: Streams) -> Hidden:
        """Return the input of the sub-block."""
        return (self.pre[..., None] * x.astype(self.pre.dtype)).sum(-2).astype(x.dtype)

    def write(self, x: Streams, y: Hidden) -> Streams:
        """Return the streams after the sub-block with output `y`."""
        wide, added = x.astype(self.mix.dtype), y.astype(self.mix.dtype)
        mixed = (self.mix[..., None] * wide[..., None, :, :]).sum(-2)  # no matrix product, which may round its inputs
        return (mixed + self.post[..., None] * added[..., None, :]).astype(x.dtype)


def start(n: int) -> np.ndarray:
    """Return the initial b_pre, b_post and b_res. With them, a model computes the same as with a single stream."""
    parts = np.full(n, -np.log(n - 1)), np.linspace(-SPREAD, SPREAD, n), DIAGONAL * np.eye(n).reshape(-1)
    return np.concatenate(parts).astype(np.float32)


@jax.checkpoint  # recompute the rounds in the backward pass
def sinkhorn(logits: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Scale exp(logits) so that columns sum to 1, and rows nearly so. Computed in log space."""

    def normalise(logits: Array, _: None) -> tuple[Array, None]:
        logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return logits - jax.nn.logsumexp(logits, axis=-2, keepdims=True), None

    return jnp.exp(jax.lax.scan(normalise, logits, length=ROUNDS)[0])


def mean(x: Streams | Hidden) -> Hidden:
    """Average several streams to one residual stream."""
    return x if x.ndim == 3 else x.mean(-2, dtype=np.promote_types(x.dtype, np.float32)).astype(x.dtype)


def _projected(x: Float[Array, "batch tokens n_hidden"], lora: Lora) -> tuple[Array, Array, Array]:
    """Return (x phi, alpha, bias), which broadcast together. In a bank, each row uses its own slot's parameters."""
    phi, alpha, bias = (lora.weights[name] for name in ("phi", "alpha", "bias"))
    if lora.slots is None:
        return x @ phi, alpha[None, None], bias[None, None]
    inner, slots, outputs = phi.shape
    every = (x @ phi.reshape(inner, -1)).reshape(*x.shape[:-1], slots, outputs)
    own = lora.slots[:, None] == jnp.arange(slots)[None]
    projected = jnp.where(own[:, None, :, None], every, 0.0).sum(-2)
    at = jnp.maximum(lora.slots, 0)
    alpha = jnp.where(lora.slots[:, None] < 0, 0.0, alpha[at])
    return projected, alpha[:, None], bias[at][:, None]
