"""Mesh axes of a decoder's parameters and adapters, derived from the names of their dimensions.

A mesh has three axes: `fsdp` shards the residual stream, `tp` shards heads, inner widths and the vocabulary, and `ep`
shards experts. A new kind of dimension needs an entry here. `skyrl.backends.jax.layout` places arrays by this table.
"""

from skyrl.tx.design.design import Attention, DeltaNet, Mixer
from skyrl.tx.design.parameters import Param

Spec = tuple[str | None, ...]
"""Mesh axis of each dimension of an array, in the format of `jax.sharding.PartitionSpec`. None: not sharded."""

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
    # Small, and used by all heads.
    "query_latent": None,
    "latent": None,
    "stored": None,
    "head_dim": None,
    # The router compares the scores of all experts.
    "experts": None,
    # The state of a gated DeltaNet is not sharded.
    "channels": None,
    "memory_value": None,
    "value_heads": None,
    "value_dim": None,
    "one": None,
    "width": None,
}
"""Mesh axis of each dimension, by the dimension's name in `Param.axes`."""


def partition(param: Param, *, shard_attention_heads: bool = True) -> Spec:
    """Return the mesh axes of a parameter's array, stacked over layers and experts.

    Args:
        param: Entry of the table of parameters.
        shard_attention_heads: True to shard attention over `tp`.
    """
    return _stack(param) + _matrix(param, shard_attention_heads)


def adapter_partition(param: Param, *, shard_attention_heads: bool = True) -> tuple[Spec, Spec]:
    """Return the mesh axes of `lora_A` and `lora_B` of an adaptable parameter. Slots of a bank are not sharded."""
    matrix = _matrix(param, shard_attention_heads)
    inner, outer = matrix if param.transposed else matrix[::-1]
    return (*_stack(param), inner, None), (*_stack(param), None, outer)


def whole_heads(param: Param, mixer: Mixer | None, parts: int) -> bool:
    """Return True if `parts` devices get whole heads of an attention parameter. Also True for other parameters.

    Args:
        param: Entry of the table of parameters.
        mixer: Token mixer of the parameter's layer; None for parameters outside of layers.
        parts: Size of the mesh axis `tp`.
    """
    if "self_attn" not in param.path or mixer is None or isinstance(mixer, DeltaNet):
        return True
    heads = mixer.kv_heads if isinstance(mixer, Attention) and "key_value" in param.axes else mixer.heads
    return heads % parts == 0


def _stack(param: Param) -> Spec:
    layers = () if param.stack.layers is None else (None,)
    return layers if param.stack.experts is None else (*layers, "ep")


def _matrix(param: Param, shard_attention_heads: bool) -> Spec:
    """Return the mesh axes of one tensor. `fsdp` shards neither `hidden` vectors nor vocabulary matrices."""
    whole: set[str | None] = {None}
    if param.path[-1] == "scale":
        whole |= {"fsdp", "tp"}
    if param.axes == ("hidden",) or "vocab" in param.axes:
        whole.add("fsdp")
    if "self_attn" in param.path and not shard_attention_heads:
        whole.add("tp")
    return tuple(None if MESH_AXES[axis] in whole else MESH_AXES[axis] for axis in param.axes)
