"""Bytes that devices exchange, as read from the text of compiled programs, against programs whose exchange is known."""

import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from skyrl.backends.jax.collectives import received_bytes

RANKS, FLOATS, STEPS = 4, 1024, 5


def program(exchange: Callable) -> str:
    """Text of a program on four devices in which each has 1,024 floats and exchanges them in five steps of a loop."""

    def looped(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, sums: sums + exchange(jnp.sin(sums[: x.size])).sum(), x)

    mesh = Mesh(np.asarray(jax.devices()[:RANKS]), ("x",))
    spread = jax.shard_map(
        looped, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False
    )
    return jax.jit(spread).lower(jnp.ones(RANKS * FLOATS)).compile().as_text()


@pytest.mark.parametrize(
    ("kind", "exchange", "floats"),
    [
        ("all-reduce", partial(jax.lax.psum, axis_name="x"), 2 * FLOATS * 3 / 4),
        ("all-gather", partial(jax.lax.all_gather, axis_name="x"), FLOATS * 3),
        ("collective-permute", partial(jax.lax.ppermute, axis_name="x", perm=[(0, 1), (1, 2), (2, 3), (3, 0)]), FLOATS),
        ("all-to-all", lambda x: jax.lax.all_to_all(x.reshape(4, -1), "x", 0, 0), FLOATS * 3 / 4),
    ],
)
def test_a_collective_in_a_loop_counts_in_each_step(kind, exchange, floats):
    assert received_bytes(program(exchange)) == {kind: 4 * floats * STEPS}


def test_the_condition_of_a_loop_says_how_often_it_runs_if_nothing_else_does():
    text = re.sub('"known_trip_count":{[^}]*},?', "", program(partial(jax.lax.psum, axis_name="x")))
    assert "known_trip_count" not in text and received_bytes(text) == {"all-reduce": 4 * 2 * FLOATS * 3 / 4 * STEPS}


ON_A_GPU = """
ENTRY %main.1 (p: f32[8,1024]) -> f32[1024] {
  %started = ((f32[8,1024]{1,0}), f32[1,1024]{1,0}) reduce-scatter-start(%p), replica_groups=mesh['a'=2,'b'=8] {'b'}
  %gathered = (bf16[1,64]{1,0}, bf16[8,64]{1,0}) all-gather-start(%q), replica_groups=[2,8]<=[16], dimensions={0}
  %sums = (f32[4096,32]{1,0}, f32[4]{0}) all-reduce-start(%a, %b), replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""
"""Collectives as XLA writes them for GPUs, which are not here."""
ON_A_TPU = """
%starts (a: f32[1024]) -> (f32[8192], u32[]) {
  %gather.1 = f32[8192]{0} all-gather(%a), channel_id=2, replica_groups=[1,8]<=[8], attributes={chain_id="1"}
  ROOT %s = (f32[8192]{0}, u32[]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside_a_product (a: f32[1024], b: f32[8192]) -> f32[8192] {
  %gather.2 = f32[8192]{0} all-gather(%a), channel_id=2, replica_groups=[1,8]<=[8], attributes={chain_id="1"}
}

%all-reduce-scatter.1 (b: f32[8192]) -> f32[1024] {
  %sums = f32[8192]{0:T(1024)} all-reduce(%b), channel_id=5, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %part = f32[1024]{0:T(1024)} dynamic-slice(%sums, %place), dynamic_slice_sizes={1024}
}

ENTRY %main (a: f32[1024]) -> f32[1024] {
  %started = (f32[8192]{0}, u32[]) fusion(%a), kind=kCustom, calls=%starts
  %during = f32[8192]{0} fusion(%a, %started), kind=kOutput, calls=%beside_a_product
  ROOT %out = f32[1024]{0} fusion(%during), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
"""Collectives as libtpu writes them: one that runs beside a product, and sums of which each device gets a part."""


def test_collectives_of_a_tpu_count_once():
    assert received_bytes(ON_A_TPU) == {"all-gather": 7 * 4096, "reduce-scatter": 7 * 4096}


def test_started_collectives_count_their_results():
    assert received_bytes(ON_A_GPU) == {
        "reduce-scatter": 7 * 4096,
        "all-gather": 2 * 7 * 64,
        "all-reduce": 2 * 3 / 4 * 4 * (4096 * 32 + 4),
    }
