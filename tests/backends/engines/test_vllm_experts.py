"""vLLM reads our export of experts: each matrix is that of its expert, times the scale for B. `make test-vllm`.

vLLM 0.32 computes adapters of experts by Triton alone, so that on a CPU nothing can be sampled from them.
"""

import json
import os
import subprocess
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl.tx.io.peft import adapter_to_peft
from skyrl.tx.io.weights import load_model
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import LoraConfig
from tests.backends.engines.vllm_server import ENVIRONMENT
from tests.tx.tiny_models import trained_adapter

PYTHON = os.environ.get("SKYRL_TEST_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-vllm")
SIZES: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
SIZES |= {"vocab": 4096}
RANK, ALPHA = 4, 24.0
PROGRAM = """
import sys
import numpy as np
from vllm import LLM
from vllm.lora.request import LoRARequest

def matrices(model):
    found = {}
    for name, module in model.named_modules():
        for matrix in ("a", "b") if hasattr(module, "w13_lora_a_stacked") else ():
            gate, up = getattr(module, f"w13_lora_{matrix}_stacked")
            (down,) = getattr(module, f"w2_lora_{matrix}_stacked")
            for part, array in (("gate", gate), ("up", up), ("down", down)):
                found[f"{name} {part} {matrix}"] = array[0].float().numpy().copy()
    return found

if __name__ == "__main__":
    model, adapter, output = sys.argv[1:]
    options = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4, "max_loras": 2, "max_lora_rank": 8}
    engine = LLM(model, dtype="float32", enable_lora=True, **options)
    assert engine.llm_engine.add_lora(LoRARequest("ours", 1, adapter))
    (found,) = engine.apply_model(matrices)
    np.savez(output, **found)
"""


def test_vllm_has_the_matrices_of_each_expert_as_we_export_them(tmp_path):
    model = make_model(tmp_path / "model", "qwen3_moe", **SIZES, seed=0)
    config, settings = load_model(model).config, LoraConfig(rank=RANK, alpha=ALPHA, train_unembed=False)
    tensors, adapter_config = adapter_to_peft(trained_adapter(config, settings), settings, config)
    (adapter := tmp_path / "adapter").mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config))
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT | in_process
    (program := tmp_path / "program.py").write_text(PROGRAM)
    command = [PYTHON, str(program), str(model), str(adapter), str(tmp_path / "found.npz")]
    subprocess.run(command, env=variables, check=True)

    tensors = load_file(adapter / "adapter_model.safetensors")
    found = np.load(tmp_path / "found.npz")
    assert len(found) == 2 * 3 * 2
    for key, arrays in found.items():
        module, part, matrix = key.split()
        assert len(arrays) == 16
        for expert, array in enumerate(arrays):
            ours = tensors[f"base_model.model.{module}.{expert}.{part}_proj.lora_{matrix.upper()}.weight"]
            rows, columns = ours.shape
            expected = ours * (ALPHA / RANK if matrix == "b" else 1)
            np.testing.assert_allclose(array[:rows, :columns], expected, rtol=1e-6, err_msg=f"{key} {expert}")
