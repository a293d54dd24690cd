"""A backend with random weights of one shape, created on the device, and the jobs that cases measure on it."""

import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import model_shapes
from common import RANK
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import CreateModel, ForwardBackward, Operation, OptimStep, Publish, Sample
from skyrl.backends.planning import flops
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import AdamParams, Datum, ErrorResponse, LoraConfig, SampleOutput, SamplingParams
from skyrl.utils.files.paths import cache_folder

from .environment import rates, require_accelerator

TINY = flops.Shape(hidden=64, layers=9, heads=4, kv_heads=2, head_dim=16, intermediate=192, vocab=512)
"""Deep enough that its layers are scanned, like those of real models."""

SHAPES = {"tiny": TINY, **model_shapes.QWEN3}
UNTIED = {"8B"}

MOST_ROWS = 400
"""Rows of the largest decode batch of a case."""


def make_folder(scratch: str, name: str) -> Path:
    """Create a folder with configuration and tokenizer of a shape, without weights."""
    return make_model(
        Path(scratch) / f"qwen3-{name}",
        **asdict(SHAPES[name]),
        tied=name not in UNTIED,
        max_position=40_960,
        dtype="bfloat16",
        weights=False,
    )


class Loaded:
    """A backend in bfloat16 with rank-32 adapters on all linear layers.

    Args:
        name: Name of the shape, in `SHAPES`.
    """

    def __init__(self, name: str):
        self.shape = SHAPES[name]
        self.tiny = name == "tiny"
        self.tied = name not in UNTIED
        require_accelerator(self.tiny)
        self._numbers = itertools.count()
        self._scratch = tempfile.TemporaryDirectory(prefix="skyrl-on-device-")
        folder = make_folder(self._scratch.name, name)
        options: dict[str, Any] = {"sample_max_num_sequences": 16 if self.tiny else MOST_ROWS}
        if self.tiny:
            options |= {"train_tile_tokens": 128, "max_context_length": 256, "kv_cache_gib": 0.05}
        self.programs_cached_before = sum(1 for _ in (cache_folder() / "xla").glob("*-cache"))
        """Number of compiled programs of earlier processes. If above 0, startup times are those of a second start."""
        started = time.perf_counter()
        config = JaxBackendConfig(load_format="dummy", dtype="bfloat16", warm_up=False, **options)

        def progress(message: str) -> None:
            print(f"{time.perf_counter() - started:.1f} s: {message}", flush=True)

        self.backend = JaxBackend(str(folder), config, progress)
        self.ready_s = time.perf_counter() - started
        self.rates = rates(256 if self.tiny else 8192, 2**20 if self.tiny else 2**30)

    @classmethod
    def of(cls, process: dict[str, Any], name: str) -> "Loaded":
        """Return the instance created by earlier cases of the process, or a new one."""
        if name not in process:
            process[name] = cls(name)
        return process[name]

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def peak_flops(self) -> float:
        """Measured rate of bfloat16 products on this device."""
        return float(self.rates["bf16_tflops"]) * 1e12  # pyright: ignore[reportArgumentType]

    @property
    def bandwidth(self) -> float:
        """Measured bytes per second that a copy reads and writes."""
        return float(self.rates["copy_gb_s"]) * 1e9  # pyright: ignore[reportArgumentType]

    def planned(self) -> dict[str, object]:
        """Memory plan, in GiB by purpose."""
        names = ("total", "base", "cache", "training", "model", "left")
        return {f"plan_{name}_gib": round(getattr(self.backend.plan, name) / 2**30, 3) for name in names}

    def peak(self) -> dict[str, object]:
        """Peak memory in GiB so far; None if the platform does not report it."""
        import jax

        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {"peak_gib": None if peak is None else round(peak / 2**30, 3)}

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def finish(self, operations: Sequence[Operation]) -> list[Any]:
        """Run operations that are submitted together, and return their results. Raises RuntimeError for an error."""
        for operation in operations:
            self.backend.submit(operation)
        results: dict[str, Any] = {}
        while len(results) < len(operations):
            results |= {completion.request_id: completion.result for completion in self.backend.step()}
        for request_id, result in results.items():
            if isinstance(result, ErrorResponse):
                raise RuntimeError(f"{request_id}: {result.error}")
        return [results[operation.request_id] for operation in operations]

    def new_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def models(self, count: int) -> list[str]:
        """Names of this many models. Missing ones are created."""
        names = [f"model-{number}" for number in range(count)]
        missing = [name for name in names if not self.backend.has_model(name)]
        self.finish(
            [
                CreateModel(request_id=self.new_id(), model_id=name, lora_config=LoraConfig(rank=RANK, seed=seed))
                for seed, name in enumerate(missing)
            ]
        )
        return names

    def versions(self, models: Sequence[str]) -> list[str]:
        """Publish the current weights of models, in memory."""
        names = [f"{model}/{self.new_id()}" for model in models]
        self.finish(
            [
                Publish(request_id=self.new_id(), model_id=model, version=version, path=None, persist=False)
                for model, version in zip(models, names, strict=True)
            ]
        )
        return names

    def passes(self, models: Sequence[str], data: Sequence[list[Datum]], loss: str = "cross_entropy") -> list[Any]:
        """Run one step of every model: a pass over its data, and an optimizer step. Returns the results."""
        operations: list[Operation] = []
        for model, own in zip(models, data, strict=True):
            adam = AdamParams(learning_rate=1e-5)
            operations += [
                ForwardBackward(request_id=self.new_id(), model_id=model, data=own, loss_fn=loss, tenant=model),
                OptimStep(request_id=self.new_id(), model_id=model, adam_params=adam, tenant=model),
            ]
        return self.finish(operations)

    def reference_pass(self, model: str, data: list[Datum]) -> ForwardBackward:
        """A pass of the base model, forward only."""
        return ForwardBackward(
            request_id=self.new_id(),
            model_id=model,
            data=data,
            loss_fn="cross_entropy",
            forward_only=True,
            reference=True,
        )

    def sampling(self, version: str | None, prompt: np.ndarray, new: int, samples: int = 1) -> Sample:
        """A request for sequences of full length, with log-probabilities."""
        params = SamplingParams(max_tokens=new, seed=next(self._numbers), stop=[], temperature=1.0)
        return Sample(
            request_id=self.new_id(), version=version, prompt=prompt, params=params, num_samples=samples, tenant="one"
        )

    def prompt(self, length: int) -> np.ndarray:
        """New random tokens."""
        draws = np.random.default_rng([os.getpid(), next(self._numbers)])
        return draws.integers(0, self.shape.vocab, length).astype(np.int32)

    def datum(self, length: int) -> Datum:
        """A random sequence with cross-entropy on all of its tokens."""
        tokens = self.prompt(length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        return Datum(tokens[:-1], inputs)

    def rollout(self, prompt: np.ndarray, output: SampleOutput) -> list[Datum]:
        """Samples of a prompt with random advantages, for importance sampling."""
        data = []
        for sequence in output.sequences:
            tokens, before = np.concatenate([prompt, sequence.tokens]).astype(np.int32), len(prompt) - 1
            advantages = np.full(len(sequence.tokens), np.random.default_rng(len(data)).normal(), np.float32)
            inputs = {
                "target_tokens": tokens[1:],
                "weights": np.ones(len(tokens) - 1, np.float32),
                "logprobs": np.concatenate([np.zeros(before, np.float32), sequence.logprobs]),
                "advantages": np.concatenate([np.zeros(before, np.float32), advantages]),
            }
            data.append(Datum(tokens[:-1], inputs))
        return data
