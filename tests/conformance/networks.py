"""Numbers of a network: adapters written by PEFT, and the gradient that a backend applies."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

import oracle
from skyrl.backends.backend import AbstractBackend, ForwardBackward, OptimStep
from skyrl.backends.common.models.checkpoint_folder import TRAINING_STATE, pack_header
from skyrl.backends.common.models.kind import Kind
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig
from skyrl.utils.files.atomic_folders import write_folder
from tests.conformance.operations import a_load, a_publish, done, fresh

MODULES = {
    "attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "unembed": ["lm_head"],
}
"""Linear maps of each group that a `LoraConfig` may train."""
EVERYWHERE = [name for names in MODULES.values() for name in names]
PLAIN = AdamParams(learning_rate=1e6, beta1=0.0, beta2=0.0, eps=1e6)
"""Plain gradient descent: with both betas 0 and a huge epsilon, a step moves each weight by minus its gradient."""


def write_base(folder: Path, tied: bool = False) -> Path:
    """Write a random Qwen3 of hidden size 32 with the built-in tokenizer. Returns the folder."""
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    return make_model(folder, tied=tied, **sizes)


class Network(NamedTuple):
    """A backend that computes a network, and the Hugging Face folder of the network."""

    backend: AbstractBackend
    folder: Path


def write_adapter(base: Path, folder: Path, modules: list[str], seed: int = 0, rank: int = 4, **options) -> Path:
    """Write a PEFT adapter with random A and B as the server stores an uploaded one. Returns the folder."""
    config = PeftConfig(r=rank, target_modules=modules, task_type="CAUSAL_LM", **{"lora_alpha": 6, **options})
    model = get_peft_model(oracle.load(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "saved", save_embedding_layers=False)
    groups = [group for group, names in MODULES.items() if set(names) & set(modules)]
    kind = Kind(LoraConfig.of_groups(rank, config.lora_alpha, groups))
    files = {path.name: path.read_bytes() for path in (folder / "saved").iterdir()}
    write_folder(folder / "adapter", files | {TRAINING_STATE: pack_header(kind, str(base), 0, 0)})
    return folder / "adapter"


def plain_datum(tokens: np.ndarray) -> Datum:
    """Datum in which each token after the first is a target, with weight 1."""
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)})


def loaded(backend: AbstractBackend, adapter: Path) -> str:
    """Create a model from an adapter. Returns its id."""
    model_id = fresh("loaded")
    done(backend, a_load(model_id, adapter, load_optimizer=False))
    return model_id


def scored(
    backend: AbstractBackend, model_id: str, data: list[Datum], loss_fn="cross_entropy", config=None, forward_only=False
) -> ForwardBackwardOutput:
    """Run one pass."""
    operation = ForwardBackward(
        request_id=fresh("pass"),
        model_id=model_id,
        data=data,
        loss_fn=loss_fn,
        loss_fn_config=config or {},
        forward_only=forward_only,
    )
    (output,) = done(backend, operation)
    assert isinstance(output, ForwardBackwardOutput)
    return output


def stepped(backend: AbstractBackend, model_id: str, params: AdamParams) -> dict[str, float]:
    """Run an optimizer step. Returns its metrics."""
    (output,) = done(backend, OptimStep(request_id=fresh("step"), model_id=model_id, adam_params=params))
    return output.metrics


def published(backend: AbstractBackend, model_id: str, folder: Path) -> dict[str, np.ndarray]:
    """Tensors of the adapter, by their names in a PEFT file."""
    done(backend, a_publish(model_id, fresh("version"), folder))
    return oracle.adapter(folder)


def applied_gradient(
    backend: AbstractBackend, model_id: str, before: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """Gradient sums of the model, derived from the change in a step of gradient descent."""
    stepped(backend, model_id, PLAIN)
    after = published(backend, model_id, folder)
    return {name: value - after[name] for name, value in before.items()}


def assert_same_gradient(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Assert equality within 1e-4 of the largest entry."""
    assert actual.keys() == expected.keys()
    scale = max(np.abs(value).max() for value in expected.values())
    assert scale > 0
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=1e-4 * scale, err_msg=name)


def target_logprobs(model, datum: Datum) -> torch.Tensor:
    """Differentiable log-probabilities of the targets, in their shape, computed by Hugging Face."""
    rows = torch.log_softmax(oracle.logits(model, datum.tokens.tolist()).float(), -1)
    targets = torch.tensor(datum.loss_fn_inputs["target_tokens"], dtype=torch.int64)
    return rows.gather(-1, targets.reshape(len(targets), -1)).reshape(targets.shape)
