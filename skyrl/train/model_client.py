"""One model of a backend, as a trainer uses it: passes, steps, sampling from its newest weights, files."""

import zlib
from collections.abc import Sequence
from itertools import count
from typing import TypeVar

import numpy as np

from skyrl.algorithms.objective import Objective
from skyrl.backends.async_client import BackendClient
from skyrl.backends.operations import (
    CreateModel,
    ExportModel,
    ForwardBackward,
    LoadCheckpoint,
    Operation,
    OptimStep,
    Publish,
    Sample,
    SaveCheckpoint,
)
from skyrl.train.config import SamplingParams as SamplingConfig
from skyrl.train.rollouts.sampler import Sampled
from skyrl.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStepOutput,
    SampleOutput,
    SamplingParams,
)

T = TypeVar("T")

_numbers = count()


class Learner:
    """A model that is trained. Awaiting its methods in order is what orders their effects.

    Args:
        client: The backend that holds it.
        model_id: Its name there.
    """

    def __init__(self, client: BackendClient, model_id: str):
        self.client = client
        self.model_id = model_id

    async def create(self, lora_config: LoraConfig, value_head: bool = False) -> None:
        """Make the model with fresh weights."""
        await self.client.run(
            CreateModel(request_id=_new_id(), model_id=self.model_id, lora_config=lora_config, value_head=value_head)
        )

    async def forward_backward(self, data: list[Datum], loss: str | Objective) -> ForwardBackwardOutput:
        """Add the gradients of a loss to the model's sums."""
        return await self._pass(data, loss, forward_only=False)

    async def forward(self, data: list[Datum], loss: str | Objective, reference: bool = False) -> ForwardBackwardOutput:
        """What the loss is computed from, by the model or by the base model that it started from."""
        return await self._pass(data, loss, forward_only=True, reference=reference)

    async def _pass(
        self, data: list[Datum], loss: str | Objective, forward_only: bool, reference: bool = False
    ) -> ForwardBackwardOutput:
        operation = ForwardBackward(
            request_id=_new_id(),
            model_id=self.model_id,
            data=data,
            loss_fn=loss,
            forward_only=forward_only,
            reference=reference,
        )
        return await self._expect(operation, ForwardBackwardOutput)

    async def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Apply the gradients that were added up, unless their norm is not finite: then they are dropped."""
        operation = OptimStep(request_id=_new_id(), model_id=self.model_id, adam_params=adam, skip_if_not_finite=True)
        return (await self._expect(operation, OptimStepOutput)).metrics

    async def save(self, path: str) -> None:
        """Write weights and optimizer state to a folder."""
        await self.client.run(SaveCheckpoint(request_id=_new_id(), model_id=self.model_id, path=path))

    async def load(self, path: str) -> None:
        """The inverse of `save`; makes the model if there is none."""
        await self.client.run(LoadCheckpoint(request_id=_new_id(), model_id=self.model_id, path=path))

    async def export(self, path: str) -> None:
        """Write the whole model in Hugging Face format, adapters merged."""
        await self.client.run(ExportModel(request_id=_new_id(), model_id=self.model_id, path=path))

    async def _expect(self, operation: Operation, kind: type[T]) -> T:
        result = await self.client.run(operation)
        assert isinstance(result, kind), result
        return result


class Policy(Learner):
    """A model that samples too: always with the weights that were published last. A `rollouts.Sampler`.

    What a call draws depends on the seed, the version, the session and the length of the prompt only.

    Args:
        client: The backend that holds it.
        model_id: Its name there.
        seed: Of all that is sampled.
    """

    def __init__(self, client: BackendClient, model_id: str, seed: int):
        super().__init__(client, model_id)
        self._seed = seed
        self.version = -1
        """Number of the weights that are sampled: optimizer steps taken when they were published."""

    async def publish(self, version: int) -> None:
        """Sample with the current weights from now on; what is being sampled goes on with those it began with."""
        await self.client.run(
            Publish(request_id=_new_id(), model_id=self.model_id, version=self._name(version), path=None)
        )
        before, self.version = self.version, version
        if before not in (-1, version):
            self.client.drop_version(self._name(before))

    async def sample(self, prompt_token_ids: Sequence[int], params: SamplingConfig, session_id: str) -> Sampled:
        """See `rollouts.Sampler`. Log-probabilities are at the temperature, as the trainer computes them."""
        version = self.version
        assert version >= 0, "publish before sampling"
        prompt = np.asarray(prompt_token_ids, np.int32)
        entropy = [self._seed, version, zlib.crc32(session_id.encode()), len(prompt)]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
        operation = Sample(
            request_id=_new_id(),
            version=self._name(version),
            prompt=prompt,
            params=SamplingParams(
                max_tokens=params.max_generate_length,
                seed=seed,
                stop=list(params.stop) if params.stop else None,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
            ),
            tempered_logprobs=True,
        )
        (sequence,) = (await self._expect(operation, SampleOutput)).sequences
        return Sampled(
            sequence.tokens.tolist(),
            None if params.logprobs is None else sequence.logprobs.tolist(),
            sequence.stop_reason,
            version,
        )

    def _name(self, version: int) -> str:
        return f"{self.model_id}/{version}"


def _new_id() -> str:
    """Unique in this process, as a backend is."""
    return str(next(_numbers))
