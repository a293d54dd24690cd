"""Products by group against NumPy's float64, one row at a time."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl.tx.layers.devices import compiling_for
from skyrl.tx.layers.grouped import grouped, grouped_product

IN, OUT = 6, 10
GROUPS = {
    "one row": ([2], 4),
    "fewer rows than groups": ([3, 0, 3], 5),
    "all in one group": ([1] * 40, 3),
    "many in few groups": (np.random.default_rng(0).integers(0, 3, 500).tolist(), 3),
    "with empty groups": (np.random.default_rng(1).choice([0, 4, 5], 100).tolist(), 7),
}


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def target(request):
    """Platform that programs are traced for; all run on the CPU."""
    with compiling_for(request.param):
        yield request.param


@pytest.mark.parametrize("name", GROUPS)
def test_a_row_is_multiplied_by_its_groups_matrix_and_so_are_gradients(name):
    groups, count = GROUPS[name]
    draw = np.random.default_rng(2).normal
    rows, matrices, cotangent = draw(size=(len(groups), IN)), draw(size=(count, IN, OUT)), draw(size=(len(groups), OUT))

    @jax.jit
    def ours(rows, matrices, groups):
        def product(rows, matrices):
            grouping = grouped(groups, count)
            return grouping.scatter(grouped_product(grouping.gather(rows, 1), matrices, grouping))

        result, pullback = jax.vjp(product, rows, matrices)
        return result, *pullback(jnp.asarray(cotangent, jnp.float32))

    arrays = (jnp.asarray(array, jnp.float32) for array in (rows, matrices))
    result, of_rows, of_matrices = ours(*arrays, jnp.asarray(groups, jnp.int32))
    expected = np.zeros_like(matrices)
    for row, group in enumerate(groups):
        np.testing.assert_allclose(result[row], rows[row] @ matrices[group], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(of_rows[row], matrices[group] @ cotangent[row], rtol=1e-4, atol=1e-5)
        expected[group] += np.outer(rows[row], cotangent[row])
    np.testing.assert_allclose(of_matrices, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_several_groupings_under_vmap_equal_each_by_itself():
    draws = np.random.default_rng(0)
    rows = jnp.asarray(draws.normal(size=(3, 50, IN)), jnp.float32)
    matrices = jnp.asarray(draws.normal(size=(3, 4, IN, OUT)), jnp.float32)
    groups = jnp.asarray(draws.integers(0, 4, (3, 50)), jnp.int32)

    def total(matrices, rows, groups):
        grouping = grouped(groups, 4)
        return (grouped_product(grouping.gather(rows, 1), matrices, grouping) ** 2).sum()

    together = jax.jit(jax.vmap(jax.grad(total)))(matrices, rows, groups)
    for one in range(3):
        alone = jax.grad(total)(matrices[one], rows[one], groups[one])
        np.testing.assert_allclose(together[one], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_a_row_that_is_nan_reaches_no_other():
    rows = jnp.ones((4, IN)).at[1].set(jnp.nan)
    grouping = grouped(jnp.asarray([0, 0, 1, 1], jnp.int32), 2)
    product = grouping.scatter(grouped_product(grouping.gather(rows, 1), jnp.ones((2, IN, OUT)), grouping))
    assert np.isnan(product[1]).all() and np.isfinite(np.asarray(product)[[0, 2, 3]]).all()


def test_memory_grows_with_rows_and_not_with_rows_times_groups():
    rows, count = 1024, 32

    def total(rows, matrices, groups):
        grouping = grouped(groups, count)
        return grouped_product(grouping.gather(rows, 1), matrices, grouping).sum()

    arguments = jnp.ones((rows, IN)), jnp.ones((count, IN, OUT)), jnp.zeros(rows, jnp.int32)
    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(*arguments))
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"[fi]32\[([\d,]+)\]", program)]
    assert max(sizes) <= 2 * rows * OUT


@pytest.mark.parametrize("name", [name for name in GROUPS if GROUPS[name][1] > 3])
@pytest.mark.parametrize("together", [False, True])
def test_rows_of_groups_on_another_device_give_zeros_and_no_blocks(name, together):
    """With all blocks of two batches, if `together`."""
    groups, count = GROUPS[name]
    here = count // 2
    draw = np.random.default_rng(3).normal
    rows, matrices = draw(size=(len(groups), IN)), draw(size=(here, IN, OUT))

    def product(rows, groups):
        def total(rows, matrices):
            grouping = grouped(groups, here, of=count)
            result = grouping.scatter(grouped_product(grouping.gather(rows, 1), matrices, grouping))
            return (result**2).sum() / 2, (result, grouping)

        return jax.grad(total, argnums=(0, 1), has_aux=True)(rows, jnp.asarray(matrices, jnp.float32))

    batch = jnp.stack([jnp.asarray(rows, jnp.float32)] * 2), jnp.stack([jnp.asarray(groups), -1 - jnp.asarray(groups)])
    found = jax.jit(jax.vmap(product))(*batch) if together else jax.jit(product)(batch[0][0], batch[1][0])
    (of_rows, of_matrices), (result, grouping) = jax.tree.map(lambda leaf: leaf[0], found) if together else found
    expected = np.zeros_like(matrices)
    for row, group in enumerate(groups):
        wanted = rows[row] @ matrices[group] if group < here else np.zeros(OUT)
        np.testing.assert_allclose(result[row], wanted, rtol=1e-4, atol=1e-5)
        back = matrices[group] @ wanted if group < here else np.zeros(IN)
        np.testing.assert_allclose(of_rows[row], back, rtol=1e-4, atol=1e-4)
        if group < here:
            expected[group] += np.outer(rows[row], wanted)
    np.testing.assert_allclose(of_matrices, expected, rtol=1e-4, atol=1e-3)
    size, at_once = grouping.source.shape[1], grouping.group.shape[1]
    counts = np.bincount([group for group in groups if group < here], minlength=here)
    assert grouping.used == -(-sum(-(-counts // size)) // at_once)
