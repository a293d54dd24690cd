"""Random adapters in PEFT layout for a Qwen3 of a folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from skyrl.utils.files.atomic_folders import Content

RANK, ALPHA, SCALE = 4, 8, 0.3
GROUPS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "unembed": ("lm_head",),
}


def random_adapter(model: Path, groups: tuple[str, ...], seed: int) -> dict[str, Content]:
    """Files of an adapter on these groups of modules."""
    random, tensors, names = np.random.default_rng(seed), {}, [name for group in groups for name in GROUPS[group]]
    for module, (out, into) in _modules(model):
        if module.rpartition(".")[2] in names:
            tensors[f"base_model.model.{module}.lora_A.weight"] = random.normal(0, SCALE, (RANK, into))
            tensors[f"base_model.model.{module}.lora_B.weight"] = random.normal(0, SCALE, (out, RANK))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": names}
    return {
        "adapter_model.safetensors": save({name: x.astype(np.float32) for name, x in tensors.items()}),
        "adapter_config.json": json.dumps(config | {"base_model_name_or_path": str(model)}).encode(),
    }


def _modules(model: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, x in load_file(model / "model.safetensors").items():
        if x.ndim == 2 and "embed" not in name:
            yield name.removesuffix(".weight"), x.shape
