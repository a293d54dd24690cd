"""A backend without jax: real ordering, versions, files and failures, with toy arithmetic in place of a network.

A model is a vector w. The log-probability of target t is w . feature(t), the loss of a token -weight x logprob, so
gradients are exact sums; the optimizer is Adam. A sampled token is a hash of (weights, prompt, seed, sample, place).
Tokens of a prompt or a datum can break things: `POISON` raises in the middle of the work, `KILL` kills the process,
`HANG` never ends.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict
from safetensors.numpy import load

from skyrl.backends.backend import (
    Completion,
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    Operation,
    OptimStep,
    Publish,
    Sample,
    SaveCheckpoint,
    SaveSnapshot,
)
from skyrl.backends.common.models.checkpoint_folder import PEFT_CONFIG, PEFT_TENSORS, header_of, kind_of
from skyrl.backends.executor import Executor, FairQueue, Quantum, Work
from skyrl.backends.statistics import Statistics
from skyrl.errors import RequestError
from skyrl.types import (
    AdamParams,
    BackendInfo,
    Datum,
    ErrorResponse,
    ForwardBackwardOutput,
    GeneratedSequence,
    LoraConfig,
    ModelOutput,
    OptimStepOutput,
    Origin,
    SampleOutput,
    SaveOutput,
    TokenTable,
)
from skyrl.utils.adapters.fitting import Features, fitted_adapter
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import read_folder
from skyrl.utils.files.stored_folders import on_disk, write_stored

POISON = 13
"""A token that makes its request fail with an internal error."""
KILL = 66
"""A token that kills the process with SIGKILL."""
HANG = 67
"""A token that computes for ever."""
EOS = 0
WIDTH = 4
ACTIVE_PARAMETERS = 1000
"""As it says of itself."""
ADAPTABLE = {
    "model.layers.0.self_attn.q_proj": Features(WIDTH, WIDTH, "attn"),
    "model.layers.0.mlp.down_proj": Features(WIDTH, WIDTH, "mlp"),
}


class FakeConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    max_lora_rank: int = 64
    vocab_size: int = 512
    max_context_length: int = 1024
    quanta_per_pass: int = 2
    """Quanta that a forward_backward takes."""
    most_together: int = 4
    """Quanta of passes that are computed in one call."""
    burst_s: float = 0.0
    """Seconds that a burst of sampling takes."""
    rows: int | None = None
    """Samples that run at a time; None: all."""
    samples: bool = True
    """False: models are trained only."""
    die_before_ready: bool = False
    """The process dies while it loads, without a word."""


@dataclass(frozen=True)
class FakeModel:
    lora_config: LoraConfig
    weights: np.ndarray
    first_moment: np.ndarray
    second_moment: np.ndarray
    step: int = 0
    gradient_sums: np.ndarray | None = None

    @classmethod
    def fresh(cls, lora_config: LoraConfig) -> "FakeModel":
        weights = np.random.default_rng(lora_config.seed).normal(size=WIDTH)
        return cls(lora_config, weights, np.zeros(WIDTH), np.zeros(WIDTH))

    def stepped(self, params: AdamParams) -> "FakeModel":
        gradient = np.zeros(WIDTH) if self.gradient_sums is None else self.gradient_sums
        step = self.step + 1
        first = params.beta1 * self.first_moment + (1 - params.beta1) * gradient
        second = params.beta2 * self.second_moment + (1 - params.beta2) * gradient**2
        unbiased = first / (1 - params.beta1**step), second / (1 - params.beta2**step)
        weights = self.weights * (1 - params.learning_rate * params.weight_decay)
        weights = weights - params.learning_rate * unbiased[0] / (np.sqrt(unbiased[1]) + params.eps)
        return FakeModel(self.lora_config, weights, first, second, step)

    def to_files(self) -> dict[str, bytes]:
        state = {
            "lora_config": self.lora_config.model_dump(),
            "weights": self.weights.tolist(),
            "first_moment": self.first_moment.tolist(),
            "second_moment": self.second_moment.tolist(),
            "step": self.step,
            "gradient_sums": None if self.gradient_sums is None else self.gradient_sums.tolist(),
        }
        return {"state.json": json.dumps(state).encode()}

    @classmethod
    def from_folder(cls, path: str, digest: str | None = None) -> "FakeModel":
        with on_disk(path, Path(tempfile.gettempdir())) as folder:
            files = read_folder(folder, digest)
        if PEFT_TENSORS in files:
            return cls.of_upload(files, path)
        state = json.loads(files["state.json"])
        arrays = (np.asarray(state[name]) for name in ("weights", "first_moment", "second_moment"))
        sums = None if state["gradient_sums"] is None else np.asarray(state["gradient_sums"])
        return cls(LoraConfig(**state["lora_config"]), *arrays, step=state["step"], gradient_sums=sums)

    @classmethod
    def of_upload(cls, files: dict[str, bytes], path: str) -> "FakeModel":
        """Its vector is what the adapter makes of ones."""
        config = kind_of(header_of(files, path)).lora_config
        found, rank, alpha = fitted_adapter(load(files[PEFT_TENSORS]), json.loads(files[PEFT_CONFIG]), ADAPTABLE)
        weights = sum(alpha / rank * pair.b @ pair.a @ np.ones(WIDTH) for pair in found.values())
        return cls(config, np.asarray(weights, np.float64), np.zeros(WIDTH), np.zeros(WIDTH))


class PartOfPass(NamedTuple):
    """The inputs of a quantum."""

    request_id: str
    data: list[Datum]
    weights: np.ndarray


class FakeBackend(Executor):
    """The same promises as a real backend, in microseconds."""

    config: FakeConfig

    def __init__(self, base_model: str, config: FakeConfig, progress: Callable[[str], None] = lambda message: None):
        super().__init__(base_model, config)
        if base_model == "missing":
            raise RequestError(f"base_model={base_model}: there is no such model; name another")
        if config.die_before_ready:
            os.kill(os.getpid(), signal.SIGKILL)
        progress("reading weights")
        self.models: dict[str, FakeModel] = {}
        self.versions: dict[str, np.ndarray] = {}
        self.sampler = FakeSampler(self)
        self.journal: list[str | tuple[str, ...]] = []
        """Requests as they come to be queued here, and those of each call that computes."""
        self.base_id = "base of the fake"
        self.gate: threading.Semaphore | None = None
        """Gate that each call that computes has to pass."""

    def submit(self, operation: Operation) -> None:
        self.journal.append(operation.request_id)
        super().submit(operation)

    def info(self) -> BackendInfo:
        return BackendInfo(
            base_model=self.base_model,
            architecture="Fake",
            vocab_size=self.config.vocab_size,
            max_context_length=self.config.max_context_length,
            max_lora_rank=self.config.max_lora_rank,
            tokenizer_path="",
            active_parameters=ACTIVE_PARAMETERS,
            adaptable=ADAPTABLE,
            samples=self.config.samples,
            base_id=self.base_id,
        )

    def has_model(self, model_id: str) -> bool:
        return model_id in self.models

    def drop_version(self, version: str) -> None:
        self._writer.forget_version(version)
        self.versions.pop(version, None)

    def discard_gradients(self, model_id: str) -> None:
        if model_id in self.models:
            self.models[model_id] = dataclasses.replace(self.models[model_id], gradient_sums=None)

    def run(self, operation: ModelOperation) -> Work:
        model_id = operation.model_id
        if isinstance(operation, ForwardBackward):
            return (yield from self._forward_backward(operation))
        yield
        if isinstance(operation, CreateModel):
            if model_id in self.models:
                raise RequestError(f"model_id={model_id} exists already; choose another id")
            self.models[model_id] = FakeModel.fresh(operation.lora_config)
            return ModelOutput(model_id)
        if isinstance(operation, LoadCheckpoint):
            # Through the writer, so that a save which is still being written is read after its end.
            model = self._read(operation)
            if not operation.load_optimizer:
                model = dataclasses.replace(FakeModel.fresh(model.lora_config), weights=model.weights)
            self.models[model_id] = model
            return ModelOutput(model_id)
        if isinstance(operation, LoadSnapshot):
            self.models[model_id] = self._read(operation)
            return ModelOutput(model_id)
        model = self._model(model_id)
        match operation:
            case OptimStep(adam_params=params):
                crash_point("engine: optimizer step computed, not kept")
                self.models[model_id] = model.stepped(params)
                norm = 0.0 if model.gradient_sums is None else float(np.linalg.norm(model.gradient_sums))
                return OptimStepOutput({"skyrl.ai/grad_norm": norm, "skyrl.ai/learning_rate": params.learning_rate})
            case SaveCheckpoint(path=path):
                return self._write(operation, path, dataclasses.replace(model, gradient_sums=None))
            case SaveSnapshot(path=path):
                return self._writer.snapshot(model_id, path, lambda: write(path, model))
            case Publish(version=version, path=path):
                self.versions[version] = model.weights
                if path is None:
                    return SaveOutput("")
                if operation.persist:
                    return self._write(operation, path, model)
                self._writer.keep_version(version, model_id, path, lambda: write(path, model))
                return SaveOutput(path)
            case DeleteModel():
                del self.models[model_id]
                return ModelOutput(model_id)
        raise AssertionError(operation)

    def _read(self, operation: LoadCheckpoint | LoadSnapshot) -> FakeModel:
        path, digest = operation.path, operation.digest
        return self._writer.read(path, lambda: FakeModel.from_folder(path, digest)).result()

    def _write(self, operation: ModelOperation, path: str, model: FakeModel) -> "Future[SaveOutput]":
        return self._writer.submit(operation.model_id, path, lambda: write(path, model))

    def _model(self, model_id: str) -> FakeModel:
        if model_id not in self.models:
            raise RequestError(f"model_id={model_id} is not loaded; create it, or load it from a checkpoint, first")
        return self.models[model_id]

    def _forward_backward(self, operation: ForwardBackward) -> Work:
        count, weights = self.config.quanta_per_pass, self._model(operation.model_id).weights
        cost = -(-sum(len(datum.tokens) for datum in operation.data) // count)
        outputs, gradient = [], np.zeros(WIDTH)
        for number in range(count):
            first, last = (len(operation.data) * n // count for n in (number, number + 1))
            part = PartOfPass(operation.request_id, operation.data[first:last], weights)
            for output, slope in (yield Quantum(cost, ("pass", operation.forward_only), part)):
                outputs.append(output)
                gradient += slope
        if not operation.forward_only:
            model = self.models[operation.model_id]
            sums = gradient if model.gradient_sums is None else model.gradient_sums + gradient
            self.models[operation.model_id] = dataclasses.replace(model, gradient_sums=sums)
        loss = float(sum(output["elementwise_loss"].sum() for output in outputs))
        return ForwardBackwardOutput(outputs, {"loss:sum": loss})

    def most_together(self, kind: Hashable) -> int:
        return self.config.most_together

    def compute(self, quanta: list[Quantum]) -> list[list[tuple[dict[str, np.ndarray], np.ndarray]]]:
        """(output, gradient) of each datum."""
        parts: list[PartOfPass] = [quantum.inputs for quantum in quanta]
        self.journal.append(tuple(part.request_id for part in parts))
        if (gate := self.gate) is not None:
            gate.acquire()
        return [[slope_of(datum, part.weights) for datum in part.data] for part in parts]


def slope_of(datum: Datum, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    break_on(datum.tokens)
    targets = datum.loss_fn_inputs["target_tokens"]
    token_weights = datum.loss_fn_inputs.get("weights", np.ones(targets.shape))
    logprobs = feature(targets) @ weights
    losses = -(token_weights * logprobs).reshape(len(targets), -1).sum(axis=1)
    output = {"logprobs": logprobs.astype(np.float32), "elementwise_loss": losses.astype(np.float32)}
    return output, -(feature(targets) * token_weights[..., None]).reshape(-1, WIDTH).sum(axis=0)


def write(path: str, model: FakeModel) -> SaveOutput:
    return SaveOutput(path, *write_stored(path, model.to_files()))


@dataclass
class _Running:
    request: Sample
    weights: np.ndarray
    sequences: list[list[int]]
    finished: set[int]


class FakeSampler:
    """One token per running sequence and burst."""

    def __init__(self, backend: FakeBackend):
        self._backend = backend
        self._waiting: FairQueue[_Running] = FairQueue()
        self._running: dict[str, _Running] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        return (*self._running, *(waiting.request.request_id for waiting in self._next()))

    @property
    def elsewhere(self) -> tuple[str, ...]:
        return ()

    @property
    def statistics(self) -> Statistics:
        return {"running_sequences": sum(len(running.sequences) for running in self._running.values())}

    def add(self, request: Sample) -> None:
        sequences: list[list[int]] = [[] for _ in range(request.num_samples)]
        self._waiting.add(request, _Running(request, self._weights(request), sequences, set()))

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._waiting.weigh(weights)

    def cancel(self, request_id: str) -> None:
        self._waiting.remove(request_id)
        self._running.pop(request_id, None)

    def _next(self) -> list[_Running]:
        """Those that begin with the next burst."""
        rows = self._backend.config.rows
        return list(
            itertools.islice(self._waiting.order(), None if rows is None else max(0, rows - len(self._running)))
        )

    def burst(self) -> list[Completion]:
        time.sleep(self._backend.config.burst_s)
        for waiting in self._next():
            self._running[waiting.request.request_id] = self._waiting.begin(waiting.request.request_id)
        completions = []
        for request_id, running in list(self._running.items()):
            self._waiting.charge(running.request.tenant, len(running.sequences) - len(running.finished))
            try:
                self._advance(running)
            except RuntimeError:
                result = ErrorResponse(f"internal error (request {request_id})", "server")
                completions.append(Completion(request_id, result))
                del self._running[request_id]
                continue
            if len(running.finished) == len(running.sequences):
                completions.append(Completion(request_id, self._output(running)))
                del self._running[request_id]
        return completions

    def _weights(self, request: Sample) -> np.ndarray:
        if request.version is None:
            return np.zeros(WIDTH)
        if request.version in self._backend.versions:
            return self._backend.versions[request.version]
        if request.path is None:
            raise RequestError(f"version={request.version} is not known here; name a checkpoint that exists")
        return FakeModel.from_folder(request.path).weights

    def _advance(self, running: _Running) -> None:
        request, params = running.request, running.request.params
        break_on(request.prompt)
        for index, tokens in enumerate(running.sequences):
            if index in running.finished:
                continue
            dice = (params.seed, index) if params.temperature > 0 else ()
            key = (running.weights.tolist(), request.prompt.tolist(), dice, len(tokens))
            digest = hashlib.sha256(repr(key).encode()).digest()
            tokens.append(int.from_bytes(digest[:4], "little") % self._backend.config.vocab_size)
            if tokens[-1] in stop_tokens(request) or len(tokens) == params.max_tokens:
                running.finished.add(index)

    def _output(self, running: _Running) -> SampleOutput:
        request = running.request
        sequences = [
            GeneratedSequence(
                np.asarray(tokens, np.int32),
                np.full(len(tokens), -1.0, np.float32),
                "stop" if tokens[-1] in stop_tokens(request) else "length",
                table(len(tokens), request.topk_sample_logprobs),
                (Origin(0, request.version, self._backend.base_id),),
            )
            for tokens in running.sequences
        ]
        prompt_logprobs, topk = None, table(len(request.prompt), request.topk_prompt_logprobs)
        unscored = slice(0, len(request.prompt) - (request.prompt_logprobs_last_n or len(request.prompt) - 1))
        if request.prompt_logprobs:
            prompt_logprobs = (feature(request.prompt) @ running.weights).astype(np.float32)
            prompt_logprobs[unscored] = np.nan
        if topk is not None:
            topk[0][unscored], topk[1][unscored] = 0, -99999.0
        targets = request.target_prompt_logprobs
        if targets is not None:
            logprobs = np.where(targets.values < 0, 0, -1 - targets.values).astype(np.float32)
            targets = dataclasses.replace(targets, values=logprobs)
        drawn = table(len(request.prompt) - 1, request.prompt_alt_tokens_k)
        return SampleOutput(sequences, prompt_logprobs, topk, target_prompt_logprobs=targets, prompt_alt_tokens=drawn)


def table(rows: int, k: int) -> TokenTable | None:
    """Tokens 0 to k - 1 in every row; None where there are none."""
    shape = (rows, k)
    ids = np.broadcast_to(np.arange(k, dtype=np.int32), shape).copy()
    return (ids, np.full(shape, -2.0, np.float32)) if k else None


def stop_tokens(request: Sample) -> set[int]:
    stop = request.params.stop
    return {EOS} if stop is None else {token for token in stop if isinstance(token, int)}


def feature(tokens: np.ndarray) -> np.ndarray:
    """float64 `[..., WIDTH]`."""
    return np.cos(np.multiply.outer(tokens, np.arange(1, WIDTH + 1)))


def break_on(tokens: np.ndarray) -> None:
    if KILL in tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    while HANG in tokens:
        time.sleep(1)
    if POISON in tokens:
        raise RuntimeError("poisoned")
