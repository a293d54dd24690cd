"""Formulas for useful work against a count of the products in a model written out plainly.

The oracle is a decoder in which each query is multiplied with the keys it may see and with nothing else. Its products
are counted where JAX writes them down, in the jaxpr of the function and of its gradient.
"""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import model_shapes
from skyrl.backends.planning import flops

SHAPE = flops.Shape(hidden=12, layers=2, heads=4, kv_heads=2, head_dim=6, intermediate=20, vocab=30)
RANK = 3
TOKENS = 5


def products(jaxpr) -> int:
    """Operations of all matrix products of a jaxpr."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            length = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * length * math.prod(equation.outvars[0].aval.shape)
        total += sum(products(inner.jaxpr) for inner in equation.params.values() if hasattr(inner, "jaxpr"))
    return total


def pair(size: tuple[int, int]):
    rows, columns = size
    base = jnp.ones((rows, columns))
    return base, (jnp.ones((rows, RANK)), jnp.ones((RANK, columns)))


def apply(x, base, adapter):
    lora_a, lora_b = adapter
    return x @ base + (x @ lora_a) @ lora_b


def attend(query, keys, values):
    """One head, one position."""
    return jax.nn.softmax(keys @ query) @ values


def layer(x, bases, adapters):
    q, k, v = (apply(x, base, adapter) for base, adapter in zip(bases[:3], adapters[:3], strict=True))
    heads, group = SHAPE.heads, SHAPE.heads // SHAPE.kv_heads
    q, k, v = q.reshape(TOKENS, heads, -1), k.reshape(TOKENS, heads // group, -1), v.reshape(TOKENS, heads // group, -1)
    mixed = jnp.stack(
        [
            jnp.concatenate([attend(q[t, h], k[: t + 1, h // group], v[: t + 1, h // group]) for h in range(heads)])
            for t in range(TOKENS)
        ]
    )
    x = x + apply(mixed, bases[3], adapters[3])
    gate, up = apply(x, bases[4], adapters[4]), apply(x, bases[5], adapters[5])
    return x + apply(jax.nn.silu(gate) * up, bases[6], adapters[6])


def model():
    """(loss of the embeddings and the adapters, embeddings, adapters)."""
    parameters = [[pair(size) for size in SHAPE.projections()] for _ in range(SHAPE.layers)]
    head = pair((SHAPE.hidden, SHAPE.vocab))
    adapters = ([[adapter for _, adapter in one] for one in parameters], head[1])

    def loss(x, adapters):
        layers, head_adapter = adapters
        for one, layer_adapters in zip(parameters, layers, strict=True):
            x = layer(x, [base for base, _ in one], layer_adapters)
        return jax.nn.log_softmax(apply(x, head[0], head_adapter)).sum()

    return loss, jnp.ones((TOKENS, SHAPE.hidden)), adapters


def test_forward_counts_the_products_of_a_plain_model():
    loss, x, adapters = model()
    assert flops.forward(SHAPE, RANK, TOKENS) == products(jax.make_jaxpr(loss)(x, adapters).jaxpr)


def test_forward_backward_counts_the_products_of_its_gradient():
    loss, x, adapters = model()
    gradient = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, adapters)
    assert flops.forward_backward(SHAPE, RANK, TOKENS) == products(gradient.jaxpr)


def test_decoding_one_token_is_a_forward_pass_with_one_row_of_logits():
    per_row = 2 * (SHAPE.hidden * SHAPE.vocab + RANK * (SHAPE.hidden + SHAPE.vocab))
    expected = flops.forward(SHAPE, RANK, TOKENS) - (TOKENS - 1) * per_row
    assert flops.decode(SHAPE, RANK, TOKENS, 1) == expected


@pytest.mark.parametrize("prompt", [1, 7])
def test_decoding_costs_the_same_however_its_tokens_are_split(prompt: int):
    split = flops.decode(SHAPE, RANK, prompt, 4)
    logits = 2 * (SHAPE.hidden * SHAPE.vocab + RANK * (SHAPE.hidden + SHAPE.vocab))
    assert split == flops.decode(SHAPE, RANK, prompt + 3, 1) + 3 * logits


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.44), ("1.7B", 1.4), ("4B", 3.6), ("8B", 6.95)])
def test_shapes_of_qwen3_have_the_parameters_beside_embeddings_that_its_model_cards_name(name, billions):
    shown = len(str(billions).split(".")[1])
    assert round(model_shapes.QWEN3[name].layer_parameters() / 1e9, shown) == billions
