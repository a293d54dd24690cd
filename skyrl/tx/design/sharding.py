"""Mesh axes of a decoder's parameters and adapters, read from what their dimensions count.

A mesh has three axes: `fsdp` cuts the residual stream, `tp` heads, inner widths and the vocabulary, and `ep` experts. A
dimension that a new part of a decoder counts gets an entry here. There is no mesh yet; this is the table that it needs.
"""

from skyrl.tx.design.parameters import Param

Spec = tuple[str | None, ...]
"""Mesh axis of each dimension of an array, as `jax.sharding.PartitionSpec` takes them. None: whole on each device."""

MESH_AXES: dict[str, str | None] = {
    "vocab": "tp",
    "hidden": "fsdp",
    "query": "tp",
    "query_and_gate": "tp",
    "key_value": "tp",
    "value": "tp",
    "inner": "tp",
    "shared_inner": "tp",
    "expert_inner": "tp",
    # Narrow, and read by all heads.
    "query_latent": None,
    "latent": None,
    "stored": None,
    "head_dim": None,
    # Scores of a router are compared with each other.
    "experts": None,
    # The memory of a gated DeltaNet is whole on each device.
    "channels": None,
    "memory_value": None,
    "value_heads": None,
    "value_dim": None,
    "one": None,
    "width": None,
}
"""Mesh axis of a dimension of one tensor, by its name in `Param.axes`."""


def partition(param: Param, *, shard_attention_heads: bool = True) -> Spec:
    """Mesh axes of a parameter's array, of all its layers and experts.

    Args:
        param: From the table.
        shard_attention_heads: Whether `tp` cuts attention.
    """
    return _stack(param) + _matrix(param, shard_attention_heads)


def adapter_partition(param: Param, *, shard_attention_heads: bool = True) -> tuple[Spec, Spec]:
    """Mesh axes of `lora_A` and `lora_B` of a parameter that can be adapted. A bank's axis of slots has none."""
    matrix = _matrix(param, shard_attention_heads)
    inner, outer = matrix if param.transposed else matrix[::-1]
    return (*_stack(param), inner, None), (*_stack(param), None, outer)


def _stack(param: Param) -> Spec:
    layers = () if param.stack.layers is None else (None,)
    return layers if param.stack.experts is None else (*layers, "ep")


def _matrix(param: Param, shard_attention_heads: bool) -> Spec:
    """Mesh axes of one tensor. `fsdp` does not cut norms, other vectors of the stream, or the embedding's features."""
    whole: set[str | None] = {None}
    if param.path[-1] == "scale":
        whole |= {"fsdp", "tp"}
    if param.axes == ("hidden",) or "vocab" in param.axes:
        whole.add("fsdp")
    if "self_attn" in param.path and not shard_attention_heads:
        whole.add("tp")
    return tuple(None if MESH_AXES[axis] in whole else MESH_AXES[axis] for axis in param.axes)
