"""Plans of published models against programs that XLA compiles for devices that are not here.

Each case compiles the layout that `skyrl plan` proposes, in a process of its own, in one to twenty minutes. It needs
libtpu or JAX's CUDA plugin, in an environment of its own (docs/plan.md):

    python -m pytest -m slow -s -p no:xdist tests/backends/test_compiled_plans.py

It prints the rows of the table in docs/accelerators.md.
"""

import json
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

QWEN3 = {
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
MODELS = {
    "Qwen3-8B": {
        **QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "Llama-3.1-70B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
}
DEVICES = {
    "Qwen3-8B": ("h100:8", "v5e:8", "v6e:8", "v5p:8"),
    "Qwen3-30B-A3B": ("h100:8", "v5e:16", "v6e:8", "v5p:8"),
    "Llama-3.1-70B": ("h100:8", "v5e:64", "v6e:16", "v5p:8"),
}
CASES = [(model, devices) for model in MODELS for devices in DEVICES[model]]
GIB = 2**30


def compiled(model: str, devices: str) -> dict:
    """The compiled plan of the best layout, as JSON."""
    command = [sys.executable, "-c", "from skyrl.cli import main; main()", "plan", json.dumps(MODELS[model])]
    options = ["--devices", devices, "--backend", "jax", "--compile", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=7000)
    assert done.returncode == 0, done.stderr[-2000:]
    (layout,) = json.loads(done.stdout)["layouts"]
    return layout


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("model", "devices"), CASES)
def test_a_plan_has_the_memory_and_exchanges_of_compiled_programs(model, devices):
    compiler = "jax_cuda13_plugin" if devices.startswith("h") else "libtpu"
    if find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    begin = time.monotonic()
    found = compiled(model, devices)
    seconds, programs = time.monotonic() - begin, found["programs"]
    sizes = (
        ", ".join(f"{name.removesuffix('_size')} {size}" for name, size in found["layout"].items() if size > 1) or "one"
    )
    print()
    for program in programs:
        first = f"{model}, {devices}, {sizes}, {seconds:.0f} s" if program is programs[0] else ""
        received = sum(program["received"].values()) / GIB
        figures = [program["total"] / GIB, program["planned"] / GIB, received]
        print(f"| {first} | {program['name']} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    for program in programs:
        assert program["total"] <= program["planned"], program["name"]
    passes = [program for program in programs if program["name"].startswith("forward_backward")]
    largest = max(passes, key=lambda program: program["total"])
    assert largest["planned"] <= 1.25 * largest["total"]
    expected = found["training"]["exchanged_bytes_per_step"]
    assert sum(passes[0]["received"].values()) == pytest.approx(expected, rel=0.05, abs=2**20)
