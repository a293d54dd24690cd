"""Attention of packed sequences on TPUs, by JAX's splash attention kernel.

A flash attention kernel (Dao et al. 2022, https://arxiv.org/abs/2205.14135): scores are computed block by block in the
chip's memory, in both passes, and blocks that no query sees are skipped. `skyrl.tx.layers.packed_attention` computes
the same with plain XLA, on other platforms and for shapes that the kernel does not take.

Scores, softmax and sums are float32. Products of bfloat16 inputs take one pass of the matrix unit, as in other flash
attention kernels: it rounds weights to bfloat16. The backward pass rounds weights and gradients of scores to bfloat16,
and reads a rounded output. Products of float32 inputs are float32, unless the precision of products is "default".
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    LocalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from skyrl.tx.layers.devices import axis_size

BLOCKS = 512, 256, 128
"""Sizes of blocks of queries and of keys. The largest that divides the length is used. MaxText's default is 512."""

HEAD_AXES = "ep", "tp"
"""Mesh axes over which heads are split. Rows are split over `fsdp`, by the caller's `vmap`. Devices of `ep`, which have
rows of their own in other layers, exchange them for heads."""


def suits(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads head_dim"],
    value: Float[Array, "batch tokens kv_heads value_dim"],
) -> bool:
    """Return True if `splash_attention` takes these inputs. Otherwise, use `packed_attention`.

    It does not take lengths that are no multiples of 128, values of another width than keys (latent attention), heads
    that the mesh does not divide, and bfloat16 inputs if the precision of products is "highest", as it would round.
    """
    (_, tokens, heads, head_dim), kv_heads, parts = query.shape, key.shape[2], _parts()
    return (
        tokens % BLOCKS[-1] == 0
        and value.shape[3] == head_dim
        and heads % parts == 0
        and (kv_heads % parts == 0 or parts % kv_heads == 0)
        and not (jax.default_matmul_precision.value == "highest" and query.dtype == jnp.bfloat16)
    )


def splash_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads head_dim"],
    value: Float[Array, "batch tokens kv_heads head_dim"],
    segment_ids: Int[Array, "batch tokens"],
    *,
    window: int | Int[Array, ""] | None = None,
    windows: Sequence[int] = (),
    softcap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Compute attention of each token to itself and earlier tokens of its segment, as `packed_attention`.

    Each device of a mesh computes some heads. A key/value head is copied if several devices need it.

    Args:
        query: Queries, which are scaled already. Head h uses key/value head h // group.
        key: Keys.
        value: Values.
        segment_ids: Segment of each token.
        window: Number of tokens that a token attends to, including itself; None: itself and all before it.
        windows: All possible values of `window`, if it is an array. There is a kernel for each.
        softcap: If set, scores are softcap * tanh(scores / softcap).
        interpret: Run the kernel without a TPU, slowly.
    """
    parts, kv_heads, tokens = _parts(), key.shape[2], query.shape[1]
    if kv_heads % parts:
        key, value = (jnp.repeat(x, parts // kv_heads, axis=2) for x in (key, value))
    window = tokens if window is None else window
    reaches = sorted({min(reach, tokens) for reach in ([window] if isinstance(window, int) else windows)})
    index = jnp.sum(jnp.asarray(reaches[:-1], jnp.int32) < window)
    kernels = [partial(_with_precision, partial(_of_rows, reach, softcap, interpret)) for reach in reaches]

    def of_device(*arrays: Array) -> Array:  # query, key, value, segments and index
        return jax.lax.switch(arrays[-1], kernels, *arrays[:-1])

    if parts * axis_size("fsdp") > 1:
        split, whole = PartitionSpec(None, HEAD_AXES), PartitionSpec()
        specs = split, split, split, whole, whole
        of_device = jax.shard_map(of_device, in_specs=specs, out_specs=split, check_vma=False)
    mixed = of_device(*(jnp.swapaxes(x, 1, 2) for x in (query, key, value)), segment_ids, index)
    return jnp.swapaxes(mixed, 1, 2)


def _of_rows(
    window: int,
    softcap: float | None,
    interpret: bool,
    query: Float[Array, "batch heads tokens head_dim"],
    key: Float[Array, "batch kv_heads tokens head_dim"],
    value: Float[Array, "batch kv_heads tokens head_dim"],
    segment_ids: Int[Array, "batch tokens"],
) -> Float[Array, "batch heads tokens head_dim"]:
    """Run the kernel on the heads of one device."""
    heads, tokens = query.shape[1:3]
    shape, size = (tokens, tokens), next(size for size in BLOCKS if tokens % size == 0)
    mask = CausalMask(shape) if window == tokens else LocalMask(shape, (window - 1, 0), 0)
    sizes = BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    kernel = make_splash_mha(
        MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )

    def of_row(query: Array, key: Array, value: Array, own: Array) -> Any:
        return kernel(query, key, value, segment_ids=SegmentIds(own, own))

    return jax.vmap(of_row)(query, key, value, segment_ids)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_precision(function: Callable[..., Array], query: Array, *others: Array) -> Array:
    """Apply a kernel with a precision that it knows, in both passes: the default one, or the highest for float32."""
    with _precision(query):
        return function(query, *others)


def _with_precision_forward(function: Callable[..., Array], query: Array, *others: Array) -> tuple[Array, Any]:
    with _precision(query):
        return jax.vjp(function, query, *others)


def _with_precision_backward(_: Any, pullback: Any, gradient: Array) -> Any:
    with _precision(gradient):
        return pullback(gradient)


_with_precision.defvjp(_with_precision_forward, _with_precision_backward)


def _precision(x: Array) -> AbstractContextManager[Any]:
    coarse = x.dtype == jnp.bfloat16 or jax.default_matmul_precision.value in (None, "default")
    return jax.default_matmul_precision("default" if coarse else "highest")


def _parts() -> int:
    """Return the number of devices among which heads are split."""
    return axis_size(HEAD_AXES[0]) * axis_size(HEAD_AXES[1])
