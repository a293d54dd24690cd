"""The kernel for TPUs: interpreted on the CPU against PyTorch's float64, and lowered for a TPU."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from skyrl.tx.layers.attention import attention
from skyrl.tx.layers.cached_attention import Pages
from skyrl.tx.layers.devices import ROWS, compiling_for
from skyrl.tx.layers.splash_attention import splash_attention

BATCH, TOKENS, HEADS, DIM = 2, 384, 4, 16
"""Three blocks of queries and of keys."""
SEGMENTS = np.full((BATCH, TOKENS), -1, np.int32)
for row, lengths in enumerate([[5, 200, 100], [384]]):
    SEGMENTS[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
USED = SEGMENTS >= 0
NAMES = ["mixed", "query", "key", "value"]
"""Compared arrays: the result and the gradients of the inputs."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Variant:
    dtype: str = "float32"
    kv_heads: int = 2
    window: int | None = None
    windows: tuple[int, ...] = ()
    softcap: float | None = None

    def arrays(self) -> list[jax.Array]:
        """Query, key, value and cotangent. Unused cells have no cotangent."""
        draw = np.random.default_rng(7).normal
        heads = HEADS, self.kv_heads, self.kv_heads, HEADS
        drawn = [jnp.asarray(draw(size=(BATCH, TOKENS, count, DIM)), self.dtype) for count in heads]
        return [*drawn[:3], jnp.where(jnp.asarray(USED)[:, :, None, None], drawn[3], jnp.zeros((), self.dtype))]

    @property
    def options(self) -> dict:
        window = jnp.asarray(self.window) if self.windows else self.window
        return {"window": window, "windows": self.windows, "softcap": self.softcap}


VARIANTS = {
    "packed": Variant(),
    "window": Variant(window=100),
    "scanned_window": Variant(window=100, windows=(2**30, 100, 2**30)),
    "scanned_without": Variant(window=2**30, windows=(2**30, 100, 2**30)),
    "softcap": Variant(softcap=2.0),
    "bfloat16": Variant("bfloat16", window=150, softcap=5.0),
    "one_key": Variant(kv_heads=1),
    "ungrouped": Variant(kv_heads=HEADS),
}


@dataclass
class Case:
    ours: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    tolerance: float


def with_gradients(function: Callable) -> Callable:
    @jax.jit
    def run(query, key, value, cotangent, segments):
        mixed, pullback = jax.vjp(lambda *inputs: function(*inputs, segments), query, key, value)
        return mixed, *pullback(cotangent)

    return run


def expected(variant: Variant, arrays: list[jax.Array]) -> dict[str, np.ndarray]:
    """Results by the textbook, with all scores."""
    *leaves, cotangent = (torch.tensor(np.asarray(array, np.float64), requires_grad=True) for array in arrays)
    query, key, value = leaves
    key, value = (x.repeat_interleave(HEADS // variant.kv_heads, dim=2) for x in (key, value))
    scores = torch.einsum("bthd,bshd->bhts", query, key)
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    ids, places = torch.tensor(SEGMENTS), torch.arange(TOKENS)
    before = places[:, None] - places[None, :]
    visible = (before >= 0) & (before < (variant.window or TOKENS)) & (ids[:, :, None] == ids[:, None, :])
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
    mixed = torch.einsum("bhts,bshd->bthd", weights, value)
    mixed.backward(cotangent.detach())
    return dict(zip(NAMES, [mixed.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)], strict=True))


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    variant = VARIANTS[request.param]
    arrays = variant.arrays()
    found = with_gradients(partial(splash_attention, **variant.options, interpret=True))(*arrays, SEGMENTS)
    assert all(leaf.dtype == variant.dtype for leaf in found)
    ours = dict(zip(NAMES, (np.asarray(leaf, np.float64) for leaf in found), strict=True))
    yield Case(ours, expected(variant, arrays), TOLERANCE[variant.dtype])


@pytest.mark.full
@pytest.mark.gate("packed")
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_float64(case, name):
    wanted = case.expected[name][USED]
    np.testing.assert_allclose(case.ours[name][USED], wanted, atol=case.tolerance * np.abs(wanted).max(), rtol=0)


@pytest.mark.full
@pytest.mark.gate("packed")
def test_padding_is_finite_and_has_no_gradient(case):
    assert np.all(np.isfinite(case.ours["mixed"]))
    assert not any(np.any(case.ours[name][~USED]) for name in NAMES[1:])


MESHES = pytest.mark.parametrize(
    "sizes", [(2, 2, 2), (1, 1, 2), (4, 1, 2)], ids=lambda sizes: "x".join(map(str, sizes))
)
"""Rows are split over `fsdp`, and heads over `ep` and `tp`, of which the first mesh has more devices than keys."""


def on_rows(function: Callable, sizes: tuple[int, int, int]) -> tuple[Callable, Mesh]:
    """Return the function over rows of a mesh, as training calls it, and the mesh."""
    devices = np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.jit(jax.vmap(function, axis_name=ROWS, spmd_axis_name="fsdp")), Mesh(devices, ("fsdp", "ep", "tp"))


@pytest.mark.full
@MESHES
def test_devices_of_a_mesh_compute_what_float64_does(sizes):
    arrays = VARIANTS["packed"].arrays()
    run, mesh = on_rows(with_gradients(partial(splash_attention, interpret=True)), sizes)
    copies = sizes[0] * sizes[1]
    stacks = [np.tile(np.asarray(array), (copies, 1, 1, 1))[:, None] for array in arrays]
    with jax.set_mesh(mesh):
        found = run(*stacks, np.tile(SEGMENTS, (copies, 1))[:, None])
    for ours, wanted in zip(found, expected(VARIANTS["packed"], arrays).values(), strict=True):
        ours = np.asarray(ours)[:, 0].reshape(copies, *wanted.shape)
        np.testing.assert_allclose(ours[:, USED], np.tile(wanted[USED][None], (copies, 1, 1, 1)), atol=1e-4, rtol=0)


def lowered(tokens=256, dtype="bfloat16", value_dim=64, windows=(), sizes=None) -> str:
    """The program of a training pass through attention, as it is compiled for a TPU."""
    ids = jnp.zeros((1, tokens), jnp.int32)

    def total(query, key, value, window):
        options = {"pages": None, "scale": 0.3, "window": window if windows else 100, "windows": windows}
        return attention(query, key, value, positions=ids, segments=ids, **options)[0].sum()

    run, rows, mesh = jax.jit(jax.grad(total, argnums=(0, 1, 2))), (), None
    if sizes is not None:
        (run, mesh), rows = on_rows(run, sizes), (sizes[0] * sizes[1],)
    shapes = [(*rows, 1, tokens, *last) for last in ((HEADS, 64), (2, 64), (2, value_dim))]
    inputs = [*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), jax.ShapeDtypeStruct(rows, jnp.int32)]
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        return run.trace(*inputs).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("precision", ["default", "high"])
def test_a_tpu_runs_the_kernel_in_both_passes(precision):
    with compiling_for("tpu"), jax.default_matmul_precision(precision):
        assert lowered().count("@tpu_custom_call") == 3


def test_there_is_a_kernel_for_each_window_of_a_scan():
    with compiling_for("tpu"), jax.default_matmul_precision("high"):
        assert lowered(windows=(2**30, 100, 2**30, 300)).count("@tpu_custom_call") == 2 * 3


@MESHES
def test_each_device_of_a_mesh_runs_the_kernel(sizes):
    with compiling_for("tpu"), jax.default_matmul_precision("high"):
        assert lowered(sizes=sizes).count("@tpu_custom_call") == 3


def test_other_platforms_run_plain_xla():
    with jax.default_matmul_precision("high"):
        assert "tpu_custom_call" not in lowered()


@pytest.mark.parametrize(
    "options",
    [{"tokens": 64}, {"tokens": 192}, {"value_dim": 32}],
    ids=["short", "no multiple", "latent"],
)
def test_shapes_that_the_kernel_does_not_take_run_plain_xla(options):
    with compiling_for("tpu"), jax.default_matmul_precision("high"):
        assert "tpu_custom_call" not in lowered(**options)


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", 0), ("float32", 3)])
def test_highest_precision_keeps_float32_weights(dtype, kernels):
    with compiling_for("tpu"), jax.default_matmul_precision("highest"):
        assert lowered(dtype=dtype).count("@tpu_custom_call") == kernels


def test_training_and_sampling_on_a_tpu_round_queries_alike():
    tokens, dim = 32, 128
    arrays = [jnp.asarray(np.random.default_rng(0).normal(0, 1.5, (1, tokens, 2, dim)), jnp.bfloat16) for _ in range(3)]
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    empty = jnp.zeros((1, 2, dim, tokens), jnp.bfloat16), jnp.zeros((1, 2, tokens, dim), jnp.bfloat16)
    options = {"positions": positions, "segments": jnp.zeros_like(positions), "scale": dim**-0.5}
    run = jax.jit(lambda arrays, pages: attention(*arrays, pages=pages, **options)[0])
    with compiling_for("tpu"):
        trained, sampled = run(arrays, None), run(arrays, Pages(*empty, jnp.zeros((1, 1), jnp.int32)))
    assert (trained == sampled).mean() > 0.99
