"""Mesh axes of parameters: each family's, by hand, and the shards that JAX makes of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl.tx.design.family import Size, made_config
from skyrl.tx.design.parameters import Param, parameters
from skyrl.tx.design.sharding import adapter_partition, partition
from skyrl.tx.families import FAMILIES, design_of

SIZE = Size(64, 12, 4, 2, 16, 128, 320, tied=False, max_position=1024)
WANTED = {
    "embed_tokens": ("tp", None),
    "lm_head": ("tp", None),  # stored as [vocab, hidden]
    "q_proj": ("fsdp", "tp"),
    "k_proj": ("fsdp", "tp"),
    "v_proj": ("fsdp", "tp"),
    "o_proj": ("tp", "fsdp"),
    "gate_proj": ("fsdp", "tp"),
    "up_proj": ("fsdp", "tp"),
    "down_proj": ("tp", "fsdp"),
    "q_a_proj": ("fsdp", None),
    "q_b_proj": (None, "tp"),
    "kv_a_proj_with_mqa": ("fsdp", None),
    "kv_b_proj": (None, "tp"),
    "gate": ("fsdp", None),
    "in_proj_qkv": ("fsdp", None),
    "in_proj_z": ("fsdp", None),
    "in_proj_b": ("fsdp", None),
    "in_proj_a": ("fsdp", None),
    "out_proj": (None, "fsdp"),
    "conv1d": (None, None, None),
}
"""Of one matrix `[in, out]`, by the name of its module."""


def table(architecture: str) -> tuple[Param, ...]:
    return parameters(design_of(SimpleNamespace(**made_config(architecture, SIZE))))


def module_of(param: Param) -> str:
    return param.name.removesuffix(".weight").rpartition(".")[2]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_matrices_are_cut_where_the_mesh_cuts_what_they_map(architecture):
    for param in table(architecture):
        of_layers = (None,) * (param.stack.layers is not None) + ("ep",) * (param.stack.experts is not None)
        if len(param.shape) > 1:
            wanted = WANTED[module_of(param)]
            wanted = wanted[::-1] if param.path[-1] == "weight" else wanted  # [out, in]
            assert partition(param) == (*of_layers, *wanted), param.name


@pytest.mark.parametrize("architecture", FAMILIES)
def test_norms_are_whole_on_each_device(architecture):
    norms = [param for param in table(architecture) if "norm" in param.name]
    assert norms and all(set(partition(param)) == {None} for param in norms)


def test_biases_are_cut_as_the_features_that_they_are_added_to():
    biases = {
        param.name.split(".")[-2]: partition(param) for param in table("Qwen2ForCausalLM") if "bias" in param.name
    }
    assert biases == dict.fromkeys(("q_proj", "k_proj", "v_proj"), (None, "tp"))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_adapter_has_the_input_axis_in_a_and_the_output_axis_in_b(architecture):
    for param in table(architecture):
        if param.group is None:
            continue
        of_layers, (inner, outer) = partition(param)[:-2], WANTED[module_of(param)]
        if param.name == "lm_head.weight":
            inner, outer = outer, inner
        assert adapter_partition(param) == ((*of_layers, inner, None), (*of_layers, None, outer)), param.name


@pytest.mark.parametrize("architecture", FAMILIES)
def test_attention_may_be_whole_where_all_else_is_cut(architecture):
    for param in table(architecture):
        cut = partition(param, shard_attention_heads=False)
        if "self_attn" in param.path:
            assert "tp" not in cut
            assert ("fsdp" in cut) == ("fsdp" in partition(param))
        else:
            assert cut == partition(param)


PROGRAM = """
import json, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.tx.test_sharding import FAMILIES, adapter_partition, partition, table
shards = []
for place, cut in enumerate(("fsdp", "ep", "tp")):
    sizes = tuple(2 if at == place else 1 for at in range(3))
    mesh = jax.make_mesh(sizes, ("fsdp", "ep", "tp"), axis_types=(AxisType.Auto,) * 3)
    for architecture in FAMILIES:
        for param in table(architecture):
            arrays = [(param.whole_shape, partition(param))]
            if target := param.target:
                a, b = adapter_partition(param)
                arrays += [((*target.stack.shape, target.in_features, 8), a)]
                arrays += [((*target.stack.shape, 8, target.out_features), b)]
            for shape, spec in arrays:
                array = jax.device_put(np.zeros(shape, np.int8), NamedSharding(mesh, PartitionSpec(*spec)))
                shards.append((cut, shape, spec, [shard.data.shape for shard in array.addressable_shards]))
print(json.dumps(shards))
"""


@pytest.mark.full
def test_jax_gives_two_devices_the_halves_that_the_table_says():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command, root = [sys.executable, "-c", PROGRAM], Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    shards = json.loads(run.stdout)
    assert {cut for cut, _, spec, _ in shards if cut in spec} == {"fsdp", "ep", "tp"}
    for cut, shape, spec, found in shards:
        half = [size // 2 if axis == cut else size for size, axis in zip(shape, spec, strict=True)]
        assert found == [half, half], (cut, shape, spec)
