"""Options that are left to the platform."""

from contextlib import closing
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl.backends.common.memory_plan import CACHE_SHARE, GIB, contexts
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.jax.compile_cache import DETERMINISTIC_ON_GPU
from skyrl.backends.jax.defaults import resolved
from skyrl.errors import RequestError
from skyrl.tx.synthetic.make_model import make_model

LEFT = 50 * GIB
TOKEN = 36 * 2 * 8 * 128 * 2
"""Bytes of keys and values of a token of Qwen3-4B in bfloat16."""


def on(platform: str, exact: bool = False, left: int = LEFT, token: int = TOKEN, **options):
    return resolved(JaxBackendConfig(**options), platform, exact, left, token)


@pytest.mark.parametrize(
    ("platform", "exact", "asked", "used"),
    [
        ("cpu", True, "auto", "highest"),
        ("cpu", False, "auto", "highest"),
        ("gpu", True, "auto", "highest"),
        ("tpu", True, "auto", "highest"),
        ("gpu", False, "auto", "high"),
        ("tpu", False, "auto", "high"),
        ("gpu", False, "highest", "highest"),
        ("gpu", True, "default", "default"),
    ],
)
def test_products_are_exact_where_base_weights_are_float32(platform, exact, asked, used):
    assert on(platform, exact, matmul_precision=asked).matmul_precision == used


def test_a_cpu_has_small_micro_batches_and_a_small_cache():
    assert on("cpu", left=10**15)[1:3] == (512, 2 * GIB)


@pytest.mark.parametrize(("kib", "rows"), [(1, 128), (32, 128), (33, 64), (64, 64), (256, 32)])
def test_rows_on_a_cpu_follow_from_the_size_of_keys_and_values(kib, rows):
    assert on("cpu", token=kib * 1024).rows == rows


def test_an_accelerators_cache_is_a_share_of_what_base_weights_leave():
    assert on("gpu").cache_bytes == int(CACHE_SHARE * LEFT)


@pytest.mark.parametrize(("left", "rows"), [(0, 32), (12 * GIB, 64), (24 * GIB, 128), (50 * GIB, 256), (10**15, 256)])
def test_an_accelerators_rows_follow_from_its_cache(left, rows):
    assert on("gpu", left=left).rows == rows


def test_a_base_model_that_leaves_nothing_has_no_cache_of_negative_size():
    assert on("gpu", left=-GIB).cache_bytes == 0


@pytest.mark.parametrize(("room", "cache"), [(None, 20 * GIB), (30 * GIB, 20 * GIB), (5 * GIB, 5 * GIB)])
def test_the_cache_keeps_to_what_memory_utilization_leaves(room, cache):
    assert resolved(JaxBackendConfig(), "gpu", False, LEFT, TOKEN, room).cache_bytes == cache


def test_memory_utilization_below_the_base_weights_is_refused(tiny_model):
    with pytest.raises(RequestError, match=r"gpu_memory_utilization=1e-09 of .* is less than base weights take"):
        JaxBackend(str(tiny_model), JaxBackendConfig(gpu_memory_utilization=1e-9, compilation_cache=False))


def test_rows_of_an_accelerator_are_no_more_than_the_tokens_of_a_call():
    assert on("gpu", sample_max_num_batched_tokens=100).rows == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_max_num_batched_tokens": 31}, "sample_max_num_batched_tokens=31 is below 32"),
        ({"sample_max_num_batched_tokens": 32, "sample_max_num_sequences": 33}, "sample_max_num_sequences=33 is above"),
    ],
)
def test_calls_that_can_read_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        JaxBackendConfig(**options)


def test_what_is_configured_stays():
    options = {"train_tile_tokens": 1024, "kv_cache_gib": 3.0, "sample_max_num_sequences": 7}
    for platform in ("cpu", "gpu"):
        assert on(platform, **options)[1:4] == (1024, 3 * GIB, 7)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_are_of_the_asked_type_and_of_the_scale_that_keeps_activations(tmp_path, dtype):
    folder = make_model(tmp_path / "empty", weights=False, layers=9, tied=True, dtype=dtype)
    assert not list(folder.glob("*.safetensors"))
    backend = JaxBackend(
        str(folder), JaxBackendConfig(dtype=dtype, load_format="dummy", compilation_cache=False, warm_up=False)
    )
    model = backend.model
    backend.close()
    leaves = jax.tree.leaves(model.layers)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    weight = np.asarray(model.layers.mlp.down_proj.weight[...], np.float32)
    assert weight.std() == pytest.approx(weight.shape[2] ** -0.5, rel=0.02)
    assert np.asarray(model.layers.mlp.gate_proj.weight[...], np.float32).std() == pytest.approx(256**-0.5, rel=0.02)
    assert (np.asarray(model.norm.scale[...], np.float32) == 1).all()


def test_xla_knows_the_option_that_makes_gpus_deterministic():
    """It refuses options that it does not know, on every platform."""
    program = jax.jit(lambda x: x @ x, compiler_options=DETERMINISTIC_ON_GPU)
    np.testing.assert_array_equal(program(jnp.eye(3)), np.eye(3))


def test_rows_that_have_states_are_fewer():
    state = 24 * 32 * 128 * 128 * 4  # float32, of 24 layers of 32 heads
    assert resolved(JaxBackendConfig(), "gpu", False, LEFT, TOKEN, state_bytes=state).rows < on("gpu").rows


@pytest.mark.parametrize(
    ("config", "room", "lengths"),
    [
        ({"max_position_embeddings": 131_072}, 65_536, [32_768, 16_384, 8192]),
        ({"max_position_embeddings": 131_072}, 65_535, [16_384, 8192]),
        ({"max_position_embeddings": 131_072}, 0, [8192]),
        ({"max_position_embeddings": 20_000}, 10**6, [20_000, 16_384, 8192]),
        ({"max_position_embeddings": 4096}, 10**6, [4096]),
        ({}, 10**6, [32_768, 16_384, 8192]),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"type": "longrope"}}, 10**6, [8192]),
    ],
)
def test_contexts_are_as_long_as_the_cache_has_room_for_and_rotations_do_not_depend_on_it(config, room, lengths):
    config = SimpleNamespace(**config)
    assert contexts(0, config, room) == lengths
    assert contexts(1000, config, room) == [1000]


@pytest.mark.parametrize(("memory_limit_gib", "context"), [(0, 32_768), (4.0, 8192)])
def test_a_default_context_is_as_long_as_memory_trains(tiny_model, memory_limit_gib, context):
    config = JaxBackendConfig(
        memory_limit_gib=memory_limit_gib, kv_cache_gib=1, gradient_checkpointing=False, warm_up=False
    )
    with closing(JaxBackend(str(tiny_model), config)) as backend:
        assert backend.info().max_context_length == context
        assert backend.plan.left >= backend.plan.model
