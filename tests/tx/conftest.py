"""Tiny models in folders, as ours and as transformers'."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import SIZES
from transformers import Qwen3ForCausalLM

from skyrl.tx.io.weights import load_model
from skyrl.tx.models.types import ModelForCausalLM
from skyrl.tx.synthetic.make_model import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model folders by kind: "untied" or "tied" embeddings."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(kind: str) -> Path:
        return make_model(root / kind, **SIZES, tied=kind == "tied", seed=3)

    return make


@pytest.fixture(scope="session", params=[True, False], ids=["unrolled", "scanned"])
def load(request, folder) -> Callable[..., ModelForCausalLM]:
    """Our models by kind and options."""

    @cache
    def make(kind: str = "untied", **options) -> ModelForCausalLM:
        return load_model(folder(kind), **{"unroll_layers": request.param} | options)

    return make


@pytest.fixture(scope="session")
def reference(folder) -> Callable[[str], Qwen3ForCausalLM]:
    """transformers' models by kind, in float32; a new one each time, because PEFT changes what it wraps."""

    def make(kind: str = "untied") -> Qwen3ForCausalLM:
        return Qwen3ForCausalLM.from_pretrained(folder(kind), dtype=torch.float32)

    return make


@pytest.fixture(scope="session")
def ids() -> np.ndarray:
    """int32 `[3, 11]` token ids."""
    return np.random.default_rng(1).integers(0, SIZES["vocab"], (3, 11)).astype(np.int32)
