"""Models on a backend that runs in this process. They implement the protocols of `skyrl.train.policies.policy`."""

import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import TypeVar

import numpy as np

from skyrl.algorithms.checks.arrays import check_token_ids
from skyrl.algorithms.objective import Objective
from skyrl.backends.async_client import BackendClient
from skyrl.backends.backend import AbstractBackend
from skyrl.backends.operations import (
    CreateModel,
    ExportModel,
    ForwardBackward,
    LoadCheckpoint,
    Operation,
    OptimStep,
    Progress,
    Publish,
    Sample,
    SaveCheckpoint,
)
from skyrl.config import SamplingParams as SamplingConfig
from skyrl.errors import RequestError, WrongWeights
from skyrl.train.policies.sampling_options import options_of
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.tracking.metrics import Metrics
from skyrl.types import (
    AdamParams,
    BackendInfo,
    Datum,
    ForwardBackwardOutput,
    GeneratedSequence,
    LoraConfig,
    OptimStepOutput,
    SampleOutput,
    SamplingParams,
    version_hash,
)

T = TypeVar("T")

_numbers = count()


class BackendModels:
    """The models of a run on one backend. The backend runs in a separate thread.

    This is a context manager. Its exit stops the backend and the thread.

    Args:
        backend: The backend.
        section: Section of the run's configuration that has the backend's options. Error messages name it.
    """

    def __init__(self, backend: AbstractBackend, section: str = ""):
        self._client, self._section = BackendClient(backend), section

    def __enter__(self) -> "BackendModels":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the backend and its thread."""
        self._client.close()

    def check_samples(self) -> None:
        """Raise `RequestError` if the backend can train the base model but cannot sample from it."""
        self._client.backend.info().check_samples()

    def learner(self, model_id: str) -> "BackendLearner":
        return BackendLearner(self._client, model_id, self._section)

    def policy(self, model_id: str, seed: int) -> "BackendPolicy":
        return BackendPolicy(self._client, model_id, seed, self._section)


class BackendLearner:
    """A `Learner` on a backend.

    Args:
        client: Client of the backend.
        model_id: Name of the model on the backend.
        section: Same as in `BackendModels`.
    """

    def __init__(self, client: BackendClient, model_id: str, section: str = ""):
        self._client = client
        self._model_id = model_id
        self._section = section

    def info(self) -> BackendInfo:
        return self._client.backend.info()

    @cached_property
    def _vocab_size(self) -> int:
        return self.info().vocab_size

    async def create(self, lora_config: LoraConfig, value_head: bool = False) -> None:
        operation = CreateModel(
            request_id=_new_id(), model_id=self._model_id, lora_config=lora_config, value_head=value_head
        )
        try:
            await self._client.run(operation)
        except RequestError as error:
            where = f" (options of the backend are set as {self._section}.<option>)" if self._section else ""
            raise RequestError(f"{error}{where}") from error

    async def forward_backward(self, data: list[Datum], loss: str | Objective) -> ForwardBackwardOutput:
        return await self._pass(data, loss, forward_only=False)

    async def forward(self, data: list[Datum], loss: str | Objective, reference: bool = False) -> ForwardBackwardOutput:
        return await self._pass(data, loss, forward_only=True, reference=reference)

    async def _pass(
        self, data: list[Datum], loss: str | Objective, forward_only: bool, reference: bool = False
    ) -> ForwardBackwardOutput:
        for name, arrays in (
            ("tokens", [datum.tokens for datum in data]),
            ("target_tokens", [datum.loss_fn_inputs["target_tokens"] for datum in data]),
        ):
            check_token_ids(name, np.concatenate([ids.reshape(-1) for ids in arrays]), self._vocab_size, arrays)
        operation = ForwardBackward(
            request_id=_new_id(),
            model_id=self._model_id,
            data=data,
            loss_fn=loss,
            forward_only=forward_only,
            reference=reference,
        )
        return await self._expect(operation, ForwardBackwardOutput)

    async def optim_step(self, adam: AdamParams) -> Metrics:
        operation = OptimStep(request_id=_new_id(), model_id=self._model_id, adam_params=adam, skip_if_not_finite=True)
        return (await self._expect(operation, OptimStepOutput)).metrics

    async def save(self, path: str) -> None:
        await self.begin_save(path)

    def begin_save(self, path: str) -> Awaitable[object]:
        return self._client.begin(SaveCheckpoint(request_id=_new_id(), model_id=self._model_id, path=path))

    async def load(self, path: str, optimizer: bool = True) -> None:
        await self._client.run(
            LoadCheckpoint(request_id=_new_id(), model_id=self._model_id, path=path, load_optimizer=optimizer)
        )

    async def export(self, path: str) -> None:
        await self._client.run(ExportModel(request_id=_new_id(), model_id=self._model_id, path=path))

    async def export_adapter(self, path: str) -> None:
        version = f"{self._model_id}, exported to {path}"
        await self._client.run(Publish(request_id=_new_id(), model_id=self._model_id, version=version, path=path))
        self._client.drop_version(version)

    async def _expect(self, operation: Operation, kind: type[T]) -> T:
        result = await self._client.run(operation)
        assert isinstance(result, kind), result
        return result


class BackendPolicy(BackendLearner):
    """A `Policy` on a backend.

    Args:
        client: Client of the backend.
        model_id: Name of the model on the backend.
        seed: Seed of all samples.
        section: Same as in `BackendModels`.
    """

    def __init__(self, client: BackendClient, model_id: str, seed: int, section: str = ""):
        super().__init__(client, model_id, section)
        self._seed = seed
        self._version = -1
        self.address: str | None = None
        self._published: dict[str, int] = {}
        """Numbers of published versions, by their hashes."""

    async def publish(self, version: int) -> None:
        await self._client.run(
            Publish(request_id=_new_id(), model_id=self._model_id, version=self._name(version), path=None)
        )
        before, self._version = self._version, version
        self._published[version_hash(self._name(version))] = version
        if before not in (-1, version):
            self._client.drop_version(self._name(before))

    async def sample(self, prompt_token_ids: Sequence[int], params: SamplingConfig, session_id: str) -> Sampled:
        version = self._version
        assert version >= 0, "publish before sampling"
        prompt = np.asarray(prompt_token_ids, np.int32)
        check_token_ids("prompt", prompt, self._vocab_size)
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
            options=options_of(params),
            routing_key=session_id,
            tempered_logprobs=True,
        )
        (sequence,) = (await self._expect(operation, SampleOutput)).sequences
        self._check_stamp(version, sequence)
        return Sampled(
            sequence.tokens.tolist(),
            None if params.logprobs is None else sequence.logprobs.tolist(),
            sequence.stop_reason,
            version,
            sequence.origins,
        )

    async def draw(self, sample: Sample, on_tokens: Callable[[Progress], None]) -> SampleOutput:
        assert self._version >= 0, "publish before sampling"
        number, request_id = self._version, sample.request_id
        operation = replace(sample, request_id=_new_id(), version=self._name(number), path=None, tempered_logprobs=True)
        result = await self._client.run(operation, lambda report: on_tokens(replace(report, request_id=request_id)))
        assert isinstance(result, SampleOutput), result
        for sequence in result.sequences:
            self._check_stamp(number, sequence)
        return result

    def version_of(self, fingerprint: str) -> int | None:
        return None if "," in fingerprint else self._published.get(fingerprint.rpartition("-")[2])

    def _check_stamp(self, version: int, sequence: GeneratedSequence) -> None:
        """Raise `WrongWeights` if a sample was drawn from other weights than those requested."""
        asked = self._name(version), self._base_id
        for origin in sequence.origins:
            if (origin.version, origin.base) != asked:
                raise WrongWeights(
                    f"a sample was asked of version={asked[0]} on base={asked[1]}, and drawn from "
                    f"version={origin.version} on base={origin.base} by {origin.engine or 'the backend itself'}; "
                    "what is trained on such samples is worth nothing, so the run ends"
                )

    @cached_property
    def _base_id(self) -> str:
        return self.info().base_id

    def _name(self, version: int) -> str:
        return f"{self._model_id}/{version}"


def _new_id() -> str:
    """Create an id that is unique in this process. This is sufficient because the backend is in this process."""
    return str(next(_numbers))
