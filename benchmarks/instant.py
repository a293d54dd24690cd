"""A backend without a model: it answers with made-up numbers, at once or after the time that models would take.

With it, the time of a trainer is the cost of the trainer itself.
"""

import time

import numpy as np
from pydantic import BaseModel

from skyrl.backends.executor import Executor, Work
from skyrl.backends.operations import (
    Completion,
    CreateModel,
    ForwardBackward,
    ModelOperation,
    OptimStep,
    Publish,
    Sample,
)
from skyrl.types import (
    BackendInfo,
    ForwardBackwardOutput,
    GeneratedSequence,
    ModelOutput,
    OptimStepOutput,
    SampleOutput,
    SaveOutput,
)

AT_ONCE = 256
"""Samples per burst."""


class Options(BaseModel):
    """Options of an instant backend."""

    vocab_size: int
    token_s: float = 0.0
    """Seconds per token in a forward pass and in sampling; three times this with gradients."""


class InstantBackend(Executor):
    """Passes and samples of the right shapes.

    Args:
        responses: int32 `[responses, tokens]`: sampled in turn. Samples end at their length.
        options: Vocabulary size and durations.
    """

    def __init__(self, responses: np.ndarray, options: Options):
        super().__init__("instant", options)
        self.sampler = InstantSampler(self, responses)
        self.waited_s = 0.0
        """Seconds that models would have taken."""
        self._options = options
        self._draws = np.random.default_rng(0)
        self._models: set[str] = set()

    def info(self) -> BackendInfo:
        return BackendInfo(
            base_model=self.base_model,
            architecture="Instant",
            vocab_size=self._options.vocab_size,
            max_context_length=2**20,
            max_lora_rank=64,
            tokenizer_path="",
        )

    def has_model(self, model_id: str) -> bool:
        return model_id in self._models

    def discard_gradients(self, model_id: str) -> None:
        pass

    def run(self, operation: ModelOperation) -> Work:
        yield
        match operation:
            case ForwardBackward():
                self.wait_for(operation.tokens * (1 if operation.forward_only else 3))
                return self._output(operation)
            case OptimStep(adam_params=params):
                return OptimStepOutput({"skyrl.ai/grad_norm": 1.0, "skyrl.ai/learning_rate": params.learning_rate})
            case Publish():
                return SaveOutput("")
            case CreateModel(model_id=model_id):
                self._models.add(model_id)
                return ModelOutput(model_id)
        raise AssertionError(operation)

    def wait_for(self, tokens: int) -> None:
        """Sleep for the duration of a forward pass over this many tokens."""
        if seconds := tokens * self._options.token_s:
            time.sleep(seconds)
            self.waited_s += seconds

    def _output(self, operation: ForwardBackward) -> ForwardBackwardOutput:
        """Create made-up inputs of the objective, all between -1 and 0."""
        assert not isinstance(operation.loss_fn, str)
        names = (*operation.loss_fn.outputs, "elementwise_loss")
        outputs = [
            {name: -self._draws.random(len(datum.tokens), np.float32) for name in names} for datum in operation.data
        ]
        return ForwardBackwardOutput(outputs, {"loss:sum": 0.0})


class InstantSampler:
    """Completes `AT_ONCE` samples at a time."""

    def __init__(self, backend: InstantBackend, responses: np.ndarray):
        self._backend = backend
        self._responses = responses
        self._logprobs = -np.random.default_rng(1).random(responses.shape, np.float32)
        self._waiting: dict[str, Sample] = {}
        self._drawn = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._waiting)[:AT_ONCE]

    @property
    def elsewhere(self) -> tuple[str, ...]:
        return ()

    def add(self, request: Sample) -> None:
        self._waiting[request.request_id] = request

    def cancel(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def burst(self) -> list[Completion]:
        drawn = {request_id: self._draw(self._waiting.pop(request_id)) for request_id in self.running}
        self._backend.wait_for(sum(len(sequence.tokens) for sequence in drawn.values()))
        return [Completion(request_id, SampleOutput([sequence])) for request_id, sequence in drawn.items()]

    def _draw(self, request: Sample) -> GeneratedSequence:
        row = self._drawn % len(self._responses)
        self._drawn += 1
        tokens, logprobs = (rows[row, : request.params.max_tokens].copy() for rows in (self._responses, self._logprobs))
        return GeneratedSequence(tokens, logprobs, "length")
