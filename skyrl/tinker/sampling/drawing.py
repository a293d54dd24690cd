"""Samples of named models, in the queue of all samples.

The samples of a caller and its model belong to a session that the server makes, so limits, fair sharing, usage and
retention are those of the Tinker API. Such a session is idle, and later ends, when its model is sampled no more.
"""

import asyncio
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
from sqlmodel import Session

from skyrl.backends.operations import NO_OPTIONS, Progress
from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.context import Service
from skyrl.tinker.database.tables import SessionRow
from skyrl.tinker.errors import SampleFailed
from skyrl.tinker.identity import ids
from skyrl.tinker.identity.callers import EVERYBODY, Caller
from skyrl.tinker.operations.sampling import SampleInput
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.requests.queue import RequestQueue
from skyrl.tinker.results import Answer, Failure
from skyrl.tinker.sampling.models import NamedModel
from skyrl.tinker.sampling.samplers import join_sampler, make_sampler
from skyrl.tinker.wire import schemas
from skyrl.tinker.wire.parsing import Body, Parsed, SamplerAddress
from skyrl.types import SampleOutput, SamplingOptions, SamplingParams

OPERATION = replace(OPERATIONS[ids.SAMPLE], encode=pickle.dumps)
"""The sampling operation. Its results stay in this process, as they are."""
MOST_CLIENTS = 10_000
"""Maximum number of samplers that are remembered. A forgotten one is looked up again."""
WAIT_S = 60.0
"""Seconds after which a wait for an outcome begins again."""


@dataclass(frozen=True)
class Draw:
    """A prompt and what to sample after it."""

    prompt: np.ndarray
    """int32 `[prompt]`."""
    params: SamplingParams
    options: SamplingOptions = NO_OPTIONS
    num_samples: int = 1
    alternatives: int = 0
    """Number of most likely tokens to report at each generated position."""
    routing_key: str | None = None
    """See `Sample.routing_key`."""
    prompt_alternatives: int | None = None
    """The same for the prompt, whose log-probabilities are then reported, too. None: they are not."""
    reports_progress: bool = False
    """Report tokens as they are generated."""


class Drawing:
    """Samples of one prompt that are being drawn. Made by `Draws.draw`."""

    def __init__(self, queue: RequestQueue):
        self._queue = queue
        self.request_id = ""
        self._reports: deque[Progress] = deque()
        self._arrived = asyncio.Event()
        self._reported: defaultdict[int, list[int]] = defaultdict(list)
        """Tokens of each sequence that were reported so far."""
        self._again: Counter[int] = Counter()
        """Number of these tokens that the present engine has reported, too, if there was another before."""
        self._differs = False
        """True if an engine has drawn other tokens than the one before."""

    def tokens(self, report: Progress) -> None:
        """Note new tokens."""
        known, tokens = self._reported[report.number], report.tokens.tolist()
        at = self._again[report.number]
        old = len(known) - at
        self._again[report.number] += len(tokens)
        if tokens[:old] != known[at : at + len(tokens)]:
            self._differs = True
            self._arrived.set()
        if old < len(tokens):
            known += tokens[old:]
            self._reports.append(replace(report, tokens=report.tokens[old:], logprobs=report.logprobs[old:]))
            self._arrived.set()

    def restart(self) -> None:
        """Expect all tokens again: draws of a seed are repeatable."""
        self._again.clear()

    async def result(self) -> SampleOutput:
        """Wait for the samples. Their charge is final once the answer to the client is stored (`settle`).

        Raises:
            RequestError: The request cannot be served.
            SampleFailed: The server failed.
        """
        outcome = None
        while outcome is None:
            future = self._queue.futures.get(self.request_id)
            if future is None or self._queue.futures.closing:
                raise SampleFailed("the server is stopping, or has no memory for the answer; send the request again")
            outcome = await future.wait(WAIT_S)
        if isinstance(outcome, Answer):
            return pickle.loads(outcome.body)
        if isinstance(outcome, Failure) and outcome.category == "user":
            raise RequestError(outcome.error)
        raise SampleFailed(outcome.error if isinstance(outcome, Failure) else "the answer is gone; send it again")

    @property
    def is_complete(self) -> bool:
        """True if the samples are complete and charged."""
        future = self._queue.futures.get(self.request_id)
        return future is not None and isinstance(future.outcome, Answer)

    def _check(self) -> None:
        if self._differs:
            raise SampleFailed("the engine has ended, and the next one draws other tokens; send the request again")

    async def reports(self) -> AsyncIterator[Progress | SampleOutput]:
        """Yield all tokens as they are generated, then the result. Raises the same errors as `result`.

        Tokens of backends that report no progress are yielded when all samples are complete.
        """
        ended = asyncio.ensure_future(self.result())
        ended.add_done_callback(lambda _: self._arrived.set())
        try:
            while not ended.done() or self._reports:
                await self._arrived.wait()
                self._arrived.clear()
                self._check()
                while self._reports:
                    yield self._reports.popleft()
            output = ended.result()
            for number, sequence in enumerate(output.sequences):
                known = self._reported[number]
                self._differs |= sequence.tokens[: len(known)].tolist() != known
                if self._differs:
                    break
                if (first := len(known)) < len(sequence.tokens):
                    yield Progress(self.request_id, number, sequence.tokens[first:], sequence.logprobs[first:])
            self._check()
            yield output
        finally:
            ended.cancel()


@dataclass
class _Client:
    """This process as a client of a sampler, with a number of its own."""

    sampler_id: str
    number: int
    drawn: int = 0


class Draws:
    """Queues samples of named models. All methods are called on the event loop."""

    def __init__(self, service: Service, queue: RequestQueue):
        self._service = service
        self._queue = queue
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        """This process as a client of samplers, by the sampler's session; the longest unused first."""

    @asynccontextmanager
    async def draw(self, caller: Caller, model: NamedModel, draw: Draw, body: Body) -> AsyncIterator[Drawing]:
        """Queue samples. At the end of the block they are dropped, also if they are not complete.

        `body` is the request that they are of, whose size counts. Raises `Busy`, and the same errors as
        `Drawing.result`.
        """
        drawing = Drawing(self._queue)
        request = schemas.SampleRequest.model_construct(
            sampling_params=draw.params,
            num_samples=draw.num_samples,
            topk_sample_logprobs=draw.alternatives,
            prompt_logprobs=draw.prompt_alternatives is not None,
            topk_prompt_logprobs=draw.prompt_alternatives or 0,
        )
        given = SampleInput(
            request,
            draw.prompt,
            options=draw.options,
            reports_progress=draw.reports_progress,
            routing_key=draw.routing_key,
        )
        sampler_id, seq_id = await self._next(caller, model)
        address = SamplerAddress(sampling_session_id=sampler_id, seq_id=seq_id, num_samples=draw.num_samples)
        parsed = Parsed(address, given)
        drawing.request_id = await self._queue.samples.submit_parsed(OPERATION, body, parsed, caller, drawing)
        try:
            yield drawing
        finally:
            self._queue.samples.forget(drawing.request_id)

    async def _next(self, caller: Caller, model: NamedModel) -> tuple[str, int]:
        """Return the (sampler, seq_id) of the next request of a caller to a model."""
        session_id = ids.own_session_id(f"{caller.name} {self._service.info.base_model} {model.source}")
        client = self._clients.get(session_id)
        if client is not None and not await self._is_open(session_id, client.sampler_id):
            client = None
        if client is None:
            owner = await self._session(session_id, caller, model)
            sampler_id = await make_sampler(self._service, owner, 0, model.path)
            assert sampler_id is not None, "the session is of this model alone"
            client = _Client(sampler_id, await join_sampler(self._service, sampler_id))
            self._clients[session_id] = client
        if session_id in self._clients:
            self._clients.move_to_end(session_id)
        while len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        client.drawn += 1
        return client.sampler_id, client.number * ids.CLIENT_BLOCK + client.drawn

    async def _is_open(self, session_id: str, sampler_id: str) -> bool:
        """Return True if a session and its sampler can be used. They are removed some time after their last use."""
        try:
            await self._service.directory.sampler(sampler_id, EVERYBODY)
            return (await self._service.directory.session(session_id, EVERYBODY)).finished_at is None
        except UnknownName:
            return False

    async def _session(self, session_id: str, caller: Caller, model: NamedModel) -> SessionRow:
        """Return the server's session for a caller and a model. Opens it, if necessary again."""

        def insert(session: Session) -> None:
            row = session.get(SessionRow, session_id)
            if row is None:
                name = f"OpenAI routes: {model.name}"
                session.add(SessionRow(session_id=session_id, tenant=caller.tenant_of(session_id), display_name=name))
            else:
                row.finished_at = row.finish_reason = None

        await self._service.database.write(insert)
        self._service.directory.forget(session_id)
        return await self._service.directory.session(session_id, caller)
