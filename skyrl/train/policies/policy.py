"""Client side of the backend interface: a model to train, a policy that also samples, and the models of a run.

Trainers use only these protocols, so an implementation may run a model on another machine.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from skyrl.algorithms.objective import Objective
from skyrl.backends.operations import Progress, Sample
from skyrl.train.rollouts.sampler import Sampler
from skyrl.train.tracking.metrics import Metrics
from skyrl.types import AdamParams, BackendInfo, Datum, ForwardBackwardOutput, LoraConfig, SampleOutput


class Learner(Protocol):
    """A model to train. Its methods take effect in the order in which they are awaited.

    Methods raise RequestError for errors that the caller can fix, StorageError, or RuntimeError.
    """

    def info(self) -> BackendInfo:
        """Return facts about the base model, such as its maximum sequence length."""
        ...

    async def create(self, lora_config: LoraConfig, value_head: bool = False) -> None:
        """Create the model with fresh weights. With `value_head`, it is a critic."""
        ...

    async def forward_backward(self, data: list[Datum], loss: str | Objective) -> ForwardBackwardOutput:
        """Accumulate the gradients of a loss."""
        ...

    async def forward(self, data: list[Datum], loss: str | Objective, reference: bool = False) -> ForwardBackwardOutput:
        """Compute a loss without gradients. With `reference`, the base model is used, not the trained weights."""
        ...

    async def optim_step(self, adam: AdamParams) -> Metrics:
        """Apply the accumulated gradients, or drop them if their norm is not finite.

        Returns metrics of the step.
        """
        ...

    async def save(self, path: str) -> None:
        """Write weights and optimizer state to a folder."""
        ...

    def begin_save(self, path: str) -> Awaitable[object]:
        """Start to write the current weights and optimizer state. Later changes do not affect the files.

        Returns an awaitable that completes when everything is written.
        """
        ...

    async def load(self, path: str, optimizer: bool = True) -> None:
        """Load a folder that `save` wrote, and create the model if it does not exist.

        `optimizer=False` resets the optimizer.
        """
        ...

    async def export(self, path: str) -> None:
        """Write the whole model in Hugging Face format. An adapter is merged into the weights."""
        ...

    async def export_adapter(self, path: str) -> None:
        """Write the adapter in PEFT format. Only for a model with an adapter and without a value head."""
        ...


class Policy(Learner, Sampler, Protocol):
    """A model that also samples. New samples use the weights that were published last.

    The randomness of a sample depends only on the seed, the version, the session and the length of the prompt. Its
    log-probabilities are at the sampling temperature, as in training.
    """

    async def publish(self, version: int) -> None:
        """Use the current weights for new samples. Running samples continue with the weights that they started with.

        `version` is the number of optimizer steps of these weights. Samples report their version.
        """
        ...


class Endpoint(Protocol):
    """A policy that also draws samples of other programs than the trainer."""

    address: str | None
    """URL at which it is served by HTTP; None: it is not."""

    def info(self) -> BackendInfo:
        """Return facts about the base model."""
        ...

    async def draw(self, sample: Sample, on_tokens: Callable[[Progress], None]) -> SampleOutput:
        """Draw a sample with the weights that were published last, whatever version it names.

        Its log-probabilities are at its temperature. `on_tokens` gets new tokens, in another thread, if the sample
        reports progress. Raises the same errors as a `Learner`.
        """
        ...

    def version_of(self, fingerprint: str) -> int | None:
        """Return the number of a version that was published, by the fingerprint of samples from it. None: unknown."""
        ...


class Models(Protocol):
    """The models of a run, which share one base model."""

    def learner(self, model_id: str) -> Learner:
        """Return the model with this name. Its method `create` or `load` creates it on the backend."""
        ...

    def policy(self, model_id: str, seed: int) -> Policy:
        """Return the policy with this name. All its samples use `seed`."""
        ...
