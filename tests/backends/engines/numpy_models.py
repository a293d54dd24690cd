"""Models of test engines: a Qwen3 in NumPy, and one whose samples reveal a number in an adapter."""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]


class Adapter:
    """An adapter's files, as they were when they were read."""

    def __init__(self, path: str):
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        self.tensors = load_file(Path(path) / "adapter_model.safetensors")
        self.rank = int(config["r"])
        self.scaling = config["lora_alpha"] / self.rank

    @property
    def marker(self) -> int:
        """Number that it was given (`write_marker`)."""
        return int(self.tensors["marker"][0])


class Model(Protocol):
    vocab_size: int

    def logits(self, tokens: np.ndarray, adapter: Adapter | None) -> np.ndarray:
        """Logits float32 of the token that follows."""
        ...


class MarkerModel:
    """Likes one token above all: the adapter's marker."""

    vocab_size = 128

    def logits(self, tokens: np.ndarray, adapter: Adapter | None) -> np.ndarray:
        logits = np.zeros(self.vocab_size, np.float32)
        logits[adapter.marker if adapter else 0] = 100.0
        return logits


class NumpyQwen3:
    """A Qwen3 of a model folder in float32, with LoRA on any linear map, computed from the beginning for each token."""

    def __init__(self, folder: Path):
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        files = [load_file(file) for file in folder.glob("model*.safetensors")]
        self.weights = {name: x.astype(np.float32) for tensors in files for name, x in tensors.items()}
        self.vocab_size = self.config["vocab_size"]

    def logits(self, tokens: np.ndarray, adapter: Adapter | None) -> np.ndarray:
        config, adapted = self.config, adapter.tensors if adapter else {}
        heads, shared, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        angles = np.arange(len(tokens))[:, None] * config["rope_theta"] ** -(np.arange(0, width, 2) / width)
        cos, sin = np.cos(np.concatenate([angles] * 2, -1)), np.sin(np.concatenate([angles] * 2, -1))

        def linear(x: np.ndarray, module: str) -> np.ndarray:
            y, name = x @ self.weights[f"{module}.weight"].T, f"base_model.model.{module}"
            if f"{name}.lora_A.weight" in adapted:
                assert adapter is not None
                pair = adapted[f"{name}.lora_A.weight"], adapted[f"{name}.lora_B.weight"]
                y = y + (x @ pair[0].T) @ pair[1].T * adapter.scaling
            return y

        def normed(x: np.ndarray, module: str) -> np.ndarray:
            scale = np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
            return x / scale * self.weights[f"{module}.weight"]

        def turned(x: np.ndarray) -> np.ndarray:
            half = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
            return x * cos[:, None] + half * sin[:, None]

        x = self.weights["model.embed_tokens.weight"][tokens]
        future = np.triu(np.full((len(tokens), len(tokens)), -np.inf, np.float32), 1)
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            y = normed(x, f"{at}.input_layernorm")
            q, k, v = (linear(y, f"{at}.self_attn.{name}_proj").reshape(len(tokens), -1, width) for name in "qkv")
            q, k = turned(normed(q, f"{at}.self_attn.q_norm")), turned(normed(k, f"{at}.self_attn.k_norm"))
            k, v = (np.repeat(each, heads // shared, 1) for each in (k, v))
            weights = softmax(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width) + future)
            x = x + linear(np.einsum("hqk,khd->qhd", weights, v).reshape(len(tokens), -1), f"{at}.self_attn.o_proj")
            y = normed(x, f"{at}.post_attention_layernorm")
            gate, up = linear(y, f"{at}.mlp.gate_proj"), linear(y, f"{at}.mlp.up_proj")
            x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
        return linear(normed(x, "model.norm")[-1], "lm_head").astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())
