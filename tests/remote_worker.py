"""The worker processes of `tests.remote`: a bigram model with adapters in NumPy, and what is held of it by handles.

The logits of what follows token t are base[t] + scaling * A[t] @ B, in float64, with the gradients of cross_entropy and
AdamW. A worker does what it is sent in that order, draws a token of each sample in between, and may take its time over
both. Tokens of a prompt or a datum break what computes them, as in `tests.fakes`.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from skyrl.backends.operations import Progress, Sample
from skyrl.types import AdamParams, Datum, GeneratedSequence, LoraConfig, Origin, SampleOutput, SaveOutput
from skyrl.utils.files.atomic_folders import read_folder, write_folder
from tests.fakes import break_on, stop_tokens

BASE_ID = "base of the remote"
PR_SET_PDEATHSIG = 1
TILE = "tile"
"""The command whose quanta share a dispatch, and their kind."""


class RemoteConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = 128
    ranks: int = 4
    """Tiles that a dispatch takes."""
    rows: int = 4
    """Sequences of a tile."""
    dispatch_s: float = 0.0
    """Seconds that tiles, or an optimizer step, take."""
    token_s: float = 0.001
    """Seconds that a token of each running sample takes."""
    samples: int = 8
    """Samples that run at a time."""
    hold: str | None = None
    """Folder: while it exists, tiles wait, and the file `begun` in it says that some do."""
    in_flight: int = 1
    deadline_s: float | None = None


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """All that a trained model is. Arrays are `[2, vocab, rank]`: A, and B transposed."""

    lora_config: LoraConfig
    weights: np.ndarray
    first_moment: np.ndarray
    second_moment: np.ndarray
    step: int = 0
    sums: np.ndarray | None = None

    @classmethod
    def fresh(cls, lora_config: LoraConfig, vocab: int) -> "Adapter":
        weights = np.zeros((2, vocab, lora_config.rank))
        weights[0] = np.random.default_rng(lora_config.seed).normal(size=weights[0].shape) / lora_config.rank**0.5
        return cls(lora_config, weights, np.zeros_like(weights), np.zeros_like(weights))

    def anew(self) -> "Adapter":
        """With the optimizer as at its start."""
        return Adapter(self.lora_config, self.weights, np.zeros_like(self.weights), np.zeros_like(self.weights))

    def stepped(self, params: AdamParams, norm: float) -> "Adapter":
        gradient = np.zeros_like(self.weights) if self.sums is None else self.sums
        if params.grad_clip_norm:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        step = self.step + 1
        first = params.beta1 * self.first_moment + (1 - params.beta1) * gradient
        second = params.beta2 * self.second_moment + (1 - params.beta2) * gradient**2
        size = np.sqrt(second / (1 - params.beta2**step)) + params.eps
        weights = self.weights * (1 - params.learning_rate * params.weight_decay)
        weights = weights - params.learning_rate * first / (1 - params.beta1**step) / size
        return Adapter(self.lora_config, weights, first, second, step)

    def write(self, path: str) -> SaveOutput:
        arrays = {name: array.tolist() for name, array in vars(self).items() if isinstance(array, np.ndarray)}
        content = json.dumps({"lora_config": self.lora_config.model_dump(), "step": self.step, **arrays}).encode()
        return SaveOutput(path, *write_folder(path, {"adapter.json": content}))

    @classmethod
    def read(cls, path: str, digest: str | None = None) -> "Adapter":
        stored = json.loads(read_folder(path, digest)["adapter.json"])
        config, step = LoraConfig(**stored.pop("lora_config")), stored.pop("step")
        return cls(config, **{name: np.asarray(values) for name, values in stored.items()}, step=step)


def logprobs(base: np.ndarray, adapter: Adapter | None, tokens: np.ndarray) -> np.ndarray:
    """Of what follows each token: `[tokens, vocab]`."""
    logits = base[tokens]
    if adapter is not None:
        logits = logits + adapter.lora_config.scaling * adapter.weights[0, tokens] @ adapter.weights[1].T
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def cross_entropy(base: np.ndarray, adapter: Adapter, datum: Datum, gradient: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of a datum, whose gradient is added to `gradient`."""
    break_on(datum.tokens)
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"].astype(float)
    places, scaling = np.arange(len(datum.tokens)), adapter.lora_config.scaling
    targets, weights = (array.reshape(len(places), -1) for array in (targets, weights))
    everything = logprobs(base, adapter, datum.tokens)
    own = np.take_along_axis(everything, targets, -1)
    slope = weights.sum(-1, keepdims=True) * np.exp(everything)
    np.subtract.at(slope, (places[:, None], targets), weights)
    np.add.at(gradient[0], datum.tokens, scaling * slope @ adapter.weights[1])
    gradient[1] += scaling * slope.T @ adapter.weights[0, datum.tokens]
    outputs = {"logprobs": own.reshape(datum.loss_fn_inputs["target_tokens"].shape)}
    outputs["elementwise_loss"] = -(weights * own).sum(-1)
    return {name: array.astype(np.float32) for name, array in outputs.items()}


# -- the worker process ------------------------------------------------------------------------------------------------


class Worker:
    """Does the commands that it is sent, each of which is a method; draws a token of each sample between them."""

    def __init__(self, config: RemoteConfig, say: Callable[[Any], None]):
        self.config, self.say = config, say
        self.base = np.random.default_rng(0).normal(size=(config.vocab_size, config.vocab_size))
        self.held: dict[int, Any] = {}
        """Adapters, and gradients of the tiles of a pass by their numbers, by handle."""
        self.samples: dict[str, tuple[Sample, Adapter | None, list[list[tuple[int, float]]]]] = {}
        """With (token, logprob) of each sequence."""

    def configure(self, config: RemoteConfig) -> None:
        self.config = config

    def put(self, handle: int, adapter: Adapter | LoraConfig) -> None:
        fresh = isinstance(adapter, LoraConfig)
        self.held[handle] = Adapter.fresh(adapter, self.config.vocab_size) if fresh else adapter

    def get(self, handle: int) -> Adapter:
        return self.held[handle]

    def free(self, handle: int) -> None:
        self.held.pop(handle, None)

    def tile(self, handle: int, sums: int, number: int, data: list[Datum]) -> list[dict[str, np.ndarray]]:
        gradient = np.zeros_like(self.held[handle].weights)
        outputs = [cross_entropy(self.base, self.held[handle], datum, gradient) for datum in data]
        self.held.setdefault(sums, {})[number] = gradient
        return outputs

    def add(self, handle: int, sums: int) -> None:
        adapter, tiles = self.held[handle], self.held[sums]
        total = sum((tiles[number] for number in sorted(tiles)), 0.0 if adapter.sums is None else adapter.sums)
        self.held[handle] = dataclasses.replace(adapter, sums=total)

    def clear(self, handle: int) -> None:
        self.held[handle] = dataclasses.replace(self.held[handle], sums=None)

    def step(self, handle: int, stepped: int, params: AdamParams, only_finite: bool) -> float:
        adapter = self.held[handle]
        norm = 0.0 if adapter.sums is None else float(np.linalg.norm(adapter.sums))
        skipped = only_finite and not np.isfinite(norm)
        self.held[stepped] = dataclasses.replace(adapter, sums=None) if skipped else adapter.stepped(params, norm)
        return norm

    def draw(self, request: Sample, handle: int | None) -> None:
        adapter = None if handle is None else self.held[handle]
        self.samples[request.request_id] = request, adapter, [[] for _ in range(request.num_samples)]

    def cancel(self, request_id: str) -> None:
        self.samples.pop(request_id, None)

    def draw_tokens(self) -> None:
        """One of each sequence that runs."""
        time.sleep(self.config.token_s)
        for request_id in list(self.samples)[: self.config.samples]:
            request, adapter, sequences = self.samples[request_id]
            break_on(request.prompt)
            running = [number for number, drawn in enumerate(sequences) if not _reason(request, drawn)]
            for number in running:
                before = sequences[number][-1][0] if sequences[number] else request.prompt[-1]
                everything = logprobs(self.base, adapter, np.asarray(before))
                place = len(sequences[number])
                token = _drawn(everything, request, number, place)
                sequences[number].append((token, float(everything[token])))
                tokens, scores = np.asarray([token], np.int32), everything[[token]].astype(np.float32)
                if request.reports_progress:
                    self.say((None, Progress(request_id, number, tokens, scores)))
            if all(_reason(request, drawn) for drawn in sequences):
                del self.samples[request_id]
                self.say((None, (request_id, self._output(request, adapter, sequences))))

    def _output(self, request: Sample, adapter: Adapter | None, sequences: list[list[tuple[int, float]]]):
        prompt = None
        if request.prompt_logprobs:
            own = logprobs(self.base, adapter, request.prompt[:-1])
            own = np.take_along_axis(own, request.prompt[1:, None], -1)[:, 0]
            prompt = np.concatenate([[np.nan], own]).astype(np.float32)
        origin = Origin(0, request.version, BASE_ID)
        drawn = [(np.asarray(x, float).reshape(-1, 2), _reason(request, x)) for x in sequences]
        return SampleOutput(
            [
                GeneratedSequence(x[:, 0].astype(np.int32), x[:, 1].astype(np.float32), why, None, (origin,))
                for x, why in drawn
            ],
            prompt,
        )


def _reason(request: Sample, drawn: list[tuple[int, float]]) -> Any:
    """Reason why a sequence ends; None if it does not yet."""
    if drawn and drawn[-1][0] in stop_tokens(request):
        return "stop"
    return "length" if len(drawn) == request.params.max_tokens else None


def _drawn(everything: np.ndarray, request: Sample, number: int, place: int) -> int:
    assert request.params.seed is not None
    if request.params.temperature == 0:
        return int(everything.argmax())
    odds = np.cumsum(np.exp((everything - everything.max()) / request.params.temperature))
    uniform = np.random.default_rng([request.params.seed % 2**64, number, place]).random()
    return int(np.searchsorted(odds, uniform * odds[-1], side="right"))


def _wait_until_gone(folder: Path) -> None:
    while folder.exists():
        with contextlib.suppress(FileNotFoundError):
            (folder / "begun").touch()
        time.sleep(0.01)


def work(handle: int, config: str) -> None:
    """The life of a worker: it ends with its driver, or with the other end of its pipe, whatever it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a process that is stopped reads no pipe
    pipe, inbox = Connection(handle), queue.SimpleQueue()
    worker = Worker(RemoteConfig.model_validate_json(config), pipe.send)

    def read() -> None:
        try:
            while True:
                inbox.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        while worker.samples and inbox.empty():
            worker.draw_tokens()
        number, commands = inbox.get()
        if any(name in (TILE, "step") for name, *_ in commands):
            if worker.config.hold is not None and any(name == TILE for name, *_ in commands):
                _wait_until_gone(Path(worker.config.hold))
            time.sleep(worker.config.dispatch_s)
        try:
            answer = [getattr(worker, name)(*arguments) for name, *arguments in commands]
        except Exception as error:
            if number is None:
                raise
            answer = error
        if number is not None:
            pipe.send((number, answer))
