"""The low-rank part of a linear map, against PyTorch's float64."""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from skyrl.tx.layers.linear import Linear
from skyrl.tx.layers.lora import Lora
from skyrl.tx.models.decoder import is_costly_product

pytestmark = pytest.mark.gpu

IN, RANK, OUT, SLOTS = 6, 3, 5, 4
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
NAMES = ["delta", "x", "lora_A", "lora_B"]
"""Compared arrays: the result and the gradients of the inputs."""

CASES = [((4,), "float32"), ((4, 7), "float32"), ((4, 2, 7), "float32"), ((4, 7), "bfloat16")]
"""Leading axes and dtype of x."""

fixture = pytest.fixture(scope="module", params=CASES, ids=str)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def ours(
    x: jax.Array, a: np.ndarray, b: np.ndarray, scaling: jax.Array, slots: jax.Array | None, cotangent: np.ndarray
):
    def delta(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return Lora({"lora_A": a, "lora_B": b}, scaling, slots).delta(x)

    @jax.jit
    def run(x: jax.Array, a: jax.Array, b: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        result, pullback = jax.vjp(delta, x, a, b)
        return result, *pullback(cotangent)

    found = run(x, *(jnp.asarray(array, jnp.float32) for array in (a, b, cotangent)))
    assert [leaf.dtype for leaf in found] == [jnp.float32, x.dtype, jnp.float32, jnp.float32]
    return dict(zip(NAMES, (np.asarray(leaf, np.float64) for leaf in found), strict=True))


def expected(
    formula: str, x: jax.Array, a: np.ndarray, b: np.ndarray, scaling: np.ndarray, cotangent: np.ndarray
) -> dict[str, np.ndarray]:
    """`formula`: an einsum of x, A, B and the scaling."""
    leaves = [torch.tensor(np.asarray(array, np.float64), requires_grad=True) for array in (x, a, b)]
    result = torch.einsum(formula, *leaves, torch.tensor(scaling, dtype=torch.float64))
    result.backward(torch.tensor(cotangent, dtype=torch.float64))
    return dict(zip(NAMES, [result.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)], strict=True))


def assert_near(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * np.abs(wanted).max() / 4)


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], names: list[str], dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    for name in names:
        near = tolerance * np.abs(wanted[name]).max() / 4
        np.testing.assert_allclose(found[name], wanted[name], rtol=tolerance, atol=near, err_msg=name)


@fixture
def one_adapter(request: pytest.FixtureRequest) -> tuple[dict, dict, str]:
    shape, dtype = request.param
    x = jnp.asarray(drawn(*shape, IN), dtype)
    a, b, cotangent = drawn(IN, RANK), drawn(RANK, OUT), drawn(*shape, OUT)
    found = ours(x, a, b, jnp.float32(1.75), None, cotangent)
    return found, expected("...i,ir,ro,->...o", x, a, b, np.asarray(1.75), cotangent), dtype


def test_one_adapter_adds_the_scaled_product(one_adapter):
    found, wanted, dtype = one_adapter
    assert_equal(found, wanted, ["delta"], dtype)


def test_gradients_of_one_adapter_are_those_of_the_scaled_product(one_adapter):
    found, wanted, dtype = one_adapter
    assert_equal(found, wanted, NAMES[1:], dtype)


SLOT_OF_ROW = np.array([2, 0, 2, 3])
SCALING_OF_ROW = np.array([0.5, 2.0, 0.5, 1.25])


@fixture
def bank(request: pytest.FixtureRequest) -> tuple[dict, dict, str]:
    """Two rows share a slot, and one slot has no row."""
    shape, dtype = request.param
    x = jnp.asarray(drawn(*shape, IN), dtype)
    a, b, cotangent = drawn(IN, SLOTS, RANK), drawn(SLOTS, RANK, OUT), drawn(*shape, OUT)
    found = ours(x, a, b, jnp.asarray(SCALING_OF_ROW, jnp.float32), jnp.asarray(SLOT_OF_ROW, jnp.int32), cotangent)
    rows = [
        expected("...i,ir,ro,->...o", x[row], a[:, slot], b[slot], SCALING_OF_ROW[row], cotangent[row])
        for row, slot in enumerate(SLOT_OF_ROW)
    ]
    wanted = {name: np.stack([row[name] for row in rows]) for name in ("delta", "x")}
    wanted |= {"lora_A": np.zeros_like(a), "lora_B": np.zeros_like(b)}
    for row, slot in zip(rows, SLOT_OF_ROW, strict=True):
        wanted["lora_A"][:, slot] += row["lora_A"]
        wanted["lora_B"][slot] += row["lora_B"]
    return found, wanted, dtype


def test_each_row_of_a_bank_is_given_the_product_of_its_own_slot(bank):
    found, wanted, dtype = bank
    assert_equal(found, wanted, ["delta"], dtype)


def test_gradients_of_a_bank_are_those_of_each_rows_own_slot(bank):
    found, wanted, dtype = bank
    assert_equal(found, wanted, NAMES[1:], dtype)


def test_other_slots_leave_no_trace_however_large_their_weights_are():
    x, slots = jnp.asarray(drawn(4, 7, IN), jnp.float32), jnp.asarray(SLOT_OF_ROW, jnp.int32)
    a, b, cotangent = drawn(IN, SLOTS, RANK), drawn(SLOTS, RANK, OUT), drawn(4, 7, OUT)
    scaling = jnp.asarray(SCALING_OF_ROW, jnp.float32)
    before = ours(x, a, b, scaling, slots, cotangent)["delta"]
    a[:, 3] = b[3] = 1e18
    np.testing.assert_array_equal(ours(x, a, b, scaling, slots, cotangent)["delta"][:3], before[:3])


def test_checkpoints_of_products_keep_one_array_of_a_layers_width_in_the_types_of_the_base(capsys):
    linear = Linear({"weight": (384, 256)}, jnp.dtype("bfloat16"), nnx.Rngs(0))
    lora = Lora({"lora_A": jnp.ones((256, 8)), "lora_B": jnp.ones((8, 384))}, jnp.float32(2), None)

    def layer(x, weights):
        return jnp.sin(linear(jnp.sin(x), lora._replace(weights=weights)))

    kept = jax.checkpoint(layer, policy=is_costly_product)
    jax.ad_checkpoint.print_saved_residuals(kept, jnp.ones((1, 128, 256), jnp.bfloat16), lora.weights)
    products = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "output of dot_general" in line]
    assert sorted(products) == ["bf16[1,128,384]", "f32[1,128,8]"]
