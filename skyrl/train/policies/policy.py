"""Client side of the backend contract: a model that is trained, one that samples too, and where a run's models are.

Trainers are written against these protocols alone, so that a model may as well be on another machine.
"""

from collections.abc import Awaitable
from typing import Protocol

from skyrl.algorithms.objective import Objective
from skyrl.train.rollouts.sampler import Sampler
from skyrl.train.tracking.metrics import Metrics
from skyrl.types import AdamParams, BackendInfo, Datum, ForwardBackwardOutput, LoraConfig


class Learner(Protocol):
    """A model that is trained. Awaiting its methods in order is what orders their effects.

    Methods raise RequestError for what the caller can mend, StorageError, or RuntimeError.
    """

    def info(self) -> BackendInfo:
        """Facts about the base model, such as the longest sequence."""
        ...

    async def create(self, lora_config: LoraConfig, value_head: bool = False) -> None:
        """Make the model with fresh weights; with a value head it is a critic."""
        ...

    async def forward_backward(self, data: list[Datum], loss: str | Objective) -> ForwardBackwardOutput:
        """Add the gradients of a loss to the model's sums."""
        ...

    async def forward(self, data: list[Datum], loss: str | Objective, reference: bool = False) -> ForwardBackwardOutput:
        """Compute a loss without gradients, with the model or with the base model that it started from."""
        ...

    async def optim_step(self, adam: AdamParams) -> Metrics:
        """Apply the gradients that were added up, unless their norm is not finite: then they are dropped.

        Returns metrics of the step.
        """
        ...

    async def save(self, path: str) -> None:
        """Write weights and optimizer state to a folder."""
        ...

    def begin_save(self, path: str) -> Awaitable[object]:
        """Write them as they are now, whatever becomes of the model. It is done when what this returns is."""
        ...

    async def load(self, path: str, optimizer: bool = True) -> None:
        """Read what `save` wrote; makes the model if there is none. Without the optimizer it is a fresh one."""
        ...

    async def export(self, path: str) -> None:
        """Write the whole model in Hugging Face format, adapters merged."""
        ...

    async def export_adapter(self, path: str) -> None:
        """Write the adapter in PEFT's format. Only for a model that has one, and no value head."""
        ...


class Policy(Learner, Sampler, Protocol):
    """A model that samples too, always with the weights that were published last.

    A sample depends on the seed, the version, the session and the length of the prompt only. Its log-probabilities are
    at the temperature, as in training.
    """

    async def publish(self, version: int) -> None:
        """Sample with the current weights from now on; what is being sampled goes on with those it began with.

        `version` counts the optimizer steps that made them; samples tell it.
        """
        ...


class Models(Protocol):
    """The place where a run's models are. They share one base model."""

    def learner(self, model_id: str) -> Learner:
        """The model of that name, which `create` or `load` makes."""
        ...

    def policy(self, model_id: str, seed: int) -> Policy:
        """The same of a model that samples; `seed` is that of all its samples."""
        ...
