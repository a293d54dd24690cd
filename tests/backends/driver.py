"""Driving a backend in tests: one operation at a time, with data made on the spot."""

import itertools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from skyrl.backends.backend import (
    AbstractBackend,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    OptimStep,
    Publish,
    Sample,
    SaveCheckpoint,
)
from skyrl.types import AdamParams, Datum, LoraConfig, Result, SamplingParams

_numbers = itertools.count()


def finish(backend: AbstractBackend, operation) -> Result:
    """Submit an operation and step until it is done."""
    return finish_all(backend, [operation])[operation.request_id]


def finish_all(backend: AbstractBackend, operations, each_step=lambda: None) -> dict[str, Result]:
    """Submit operations and step until all are done, whatever they wait for meanwhile. Results by request."""
    wanted, results = {operation.request_id for operation in operations}, {}
    for operation in operations:
        backend.submit(operation)
    while not wanted <= results.keys():
        backend.wait()
        results |= {completion.request_id: completion.result for completion in backend.step()}
        each_step()
    return results


def training_state(folder: Path) -> dict[str, np.ndarray]:
    """Tensors of a training checkpoint, whichever processes wrote them."""
    parts: dict[str, list[np.ndarray]] = {}
    for file in sorted(folder.glob("training_state*.safetensors")):
        for name, part in load_file(file).items():
            parts.setdefault(name, []).append(part)
    return {name: np.concatenate(found) for name, found in parts.items()}


def new_id() -> str:
    return f"request-{next(_numbers)}"


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Those of a model's folder, or of an adapter's, in any number of files."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def datum(tokens, targets=None, **inputs) -> Datum:
    """Next-token targets (or the given ones), weights 1 unless given."""
    tokens = np.asarray(tokens, np.int32)
    targets = np.roll(tokens, -1) if targets is None else np.asarray(targets)
    inputs.setdefault("weights", np.ones(targets.shape, np.float32))
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return Datum(tokens, {"target_tokens": targets.astype(np.int32), **arrays})


def random_datum(length: int, seed: int = 0, vocab: int = 256) -> Datum:
    return datum(np.random.default_rng([seed, length]).integers(0, vocab, length))


def create(backend, model_id: str = "model", rank: int = 4, seed: int = 0, **flags) -> Result:
    config = LoraConfig(rank=rank, seed=seed, **flags)
    return finish(backend, CreateModel(request_id=new_id(), model_id=model_id, lora_config=config))


def delete(backend, model_id: str = "model") -> Result:
    return finish(backend, DeleteModel(request_id=new_id(), model_id=model_id))


def clear(backend) -> None:
    """Delete all models."""
    for model_id in list(backend.models):
        delete(backend, model_id)


def forward_backward(backend, data, model_id="model", loss_fn="cross_entropy", forward_only=False, **config) -> Result:
    return finish(
        backend,
        ForwardBackward(
            request_id=new_id(),
            model_id=model_id,
            data=data,
            loss_fn=loss_fn,
            loss_fn_config=config,
            forward_only=forward_only,
        ),
    )


def stepping(model_id: str = "model", learning_rate: float = 1e-2, **params) -> OptimStep:
    adam = AdamParams(learning_rate=learning_rate, **params)
    return OptimStep(request_id=new_id(), model_id=model_id, adam_params=adam)


def optim_step(backend, model_id: str = "model", learning_rate: float = 1e-2, **params) -> Result:
    return finish(backend, stepping(model_id, learning_rate, **params))


def train(backend, model_id: str = "model", steps: int = 1, seed: int = 0, **params) -> None:
    for step in range(steps):
        forward_backward(backend, [random_datum(12, seed + step)], model_id)
        optim_step(backend, model_id, **params)


def save(backend, path: Path, model_id: str = "model") -> Result:
    return finish(backend, SaveCheckpoint(request_id=new_id(), model_id=model_id, path=str(path)))


def load(backend, path: Path, model_id: str = "model", load_optimizer: bool = True) -> Result:
    return finish(
        backend,
        LoadCheckpoint(request_id=new_id(), model_id=model_id, path=str(path), load_optimizer=load_optimizer),
    )


def publish(backend, version: str, path: Path, model_id: str = "model", persist: bool = True) -> Result:
    return finish(
        backend, Publish(request_id=new_id(), model_id=model_id, version=version, path=str(path), persist=persist)
    )


def sampling(version: str | None, path: Path | None = None, num_samples: int = 1, **params) -> Sample:
    params.setdefault("max_tokens", 8)
    params.setdefault("seed", 0)
    params.setdefault("stop", [])
    return Sample(
        request_id=new_id(),
        version=version,
        path=None if path is None else str(path),
        prompt=np.asarray(params.pop("prompt", [1, 2, 3]), np.int32),
        params=SamplingParams(**params),
        num_samples=num_samples,
    )


def sample(backend, version: str | None, path: Path | None = None, num_samples: int = 1, **params) -> Result:
    return finish(backend, sampling(version, path, num_samples, **params))
