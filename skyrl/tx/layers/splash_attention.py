"""Attention of packed sequences on TPUs, by JAX's splash attention kernel.

A flash attention kernel (Dao et al. 2022, https://arxiv.org/abs/2205.14135): scores are computed block by block in the
chip's memory, in both passes, and blocks that no query sees are skipped. `skyrl.tx.layers.packed_attention` computes
the same with plain XLA, on other platforms and for shapes that the kernel does not take.

Scores, softmax and sums are float32. Products of bfloat16 inputs take one pass of the matrix unit, as in other flash
attention kernels: it rounds weights to bfloat16, and so does the backward pass with gradients of scores.
"""

from collections.abc import Callable
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
"""Mesh axes over which heads are split. Rows of a batch are split over `fsdp` by the caller's `vmap`."""


def suits(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads head_dim"],
    value: Float[Array, "batch tokens kv_heads value_dim"],
    window: int | Int[Array, ""] | None,
) -> bool:
    """Return True if `splash_attention` takes these inputs. Otherwise, use `packed_attention`.

    It does not take lengths that are no multiples of 128, values of another width than keys (latent attention), windows
    that differ between the layers of a scan, heads that the mesh does not divide, and bfloat16 inputs if the precision
    of products is "highest", where the kernel would round.
    """
    (_, tokens, heads, head_dim), kv_heads, parts = query.shape, key.shape[2], _parts()
    exact = jax.config.jax_default_matmul_precision == "highest"
    return (
        tokens % BLOCKS[-1] == 0
        and value.shape[3] == head_dim
        and (window is None or isinstance(window, int))
        and heads % parts == 0
        and (kv_heads % parts == 0 or parts % kv_heads == 0)
        and not (exact and query.dtype == jnp.bfloat16)
    )


def splash_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens kv_heads head_dim"],
    value: Float[Array, "batch tokens kv_heads head_dim"],
    segment_ids: Int[Array, "batch tokens"],
    *,
    window: int | None = None,
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
        softcap: If set, scores are softcap * tanh(scores / softcap).
        interpret: Run the kernel without a TPU, slowly.
    """
    parts, kv_heads = _parts(), key.shape[2]
    if kv_heads % parts:
        key, value = (jnp.repeat(x, parts // kv_heads, axis=2) for x in (key, value))

    def of_device(query: Array, key: Array, value: Array, segments: Array) -> Array:
        kernel = _kernel(query.shape[1], query.shape[2], window, softcap, interpret)
        of_rows = jax.vmap(lambda query, key, value, own: kernel(query, key, value, SegmentIds(own, own)))
        return _with_precision(of_rows, query, key, value, segments)

    if parts * axis_size("fsdp") > 1:
        split = PartitionSpec(None, HEAD_AXES)
        specs = split, split, split, PartitionSpec()
        of_device = jax.shard_map(of_device, in_specs=specs, out_specs=split, check_vma=False)
    mixed = of_device(*(jnp.swapaxes(x, 1, 2) for x in (query, key, value)), segment_ids)
    return jnp.swapaxes(mixed, 1, 2)


def _kernel(heads: int, tokens: int, window: int | None, softcap: float | None, interpret: bool):
    """Return the kernel for one row: (query, key, value `[heads, tokens, head_dim]`, segments) -> output."""
    shape, size = (tokens, tokens), next(size for size in BLOCKS if tokens % size == 0)
    mask = CausalMask(shape) if window is None or window >= tokens else LocalMask(shape, (window - 1, 0), 0)
    sizes = BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    return make_splash_mha(
        MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )


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
    coarse = x.dtype == jnp.bfloat16 or jax.config.jax_default_matmul_precision in (None, "default")
    return jax.default_matmul_precision("default" if coarse else "highest")


def _parts() -> int:
    """Return the number of devices among which heads are split."""
    return axis_size(HEAD_AXES[0]) * axis_size(HEAD_AXES[1])
