"""Answers to requests for samples, whole or as streams, whatever the form of their choices."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar
from uuid import uuid4

import numpy as np
from fastapi import Depends, Request
from fastapi.responses import JSONResponse, Response
from sqlmodel import Session
from starlette.types import Receive, Scope, Send

from skyrl.algorithms.checks.requests import MAX_NUM_SAMPLES
from skyrl.backends.operations import Progress
from skyrl.errors import RequestError
from skyrl.tinker.database.ledger.sample_charges import settle
from skyrl.tinker.database.retrying_writer import PASSING
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.http.openai.dialect import stream, unless_gone
from skyrl.tinker.http.openai.schemas import SampledRequest
from skyrl.tinker.http.routes.dependencies import BodyDependency, CallerDependency, session_name
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.sampling.capture import Node
from skyrl.tinker.sampling.capture_store import Call
from skyrl.tinker.sampling.drawing import Draw, Drawing
from skyrl.tinker.sampling.models import NamedModel, find_model
from skyrl.tinker.sampling.retries import Asked, Retries
from skyrl.tinker.sampling.text import SampledText
from skyrl.tinker.server import TinkerServer
from skyrl.tinker.wire.parsing import Body
from skyrl.types import GeneratedSequence, SampleOutput
from skyrl.utils.chats import Message
from skyrl.utils.failpoints import crash_point
from skyrl.utils.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Choice = dict[str, Any]
Reports = AsyncIterator[tuple[int, Progress | SampleOutput]]
"""Reports of a request's samples, each with the number of its prompt."""
PIECE_BYTES = 2**16
"""Bytes of an answer that are sent at a time."""
LARGE_BYTES = 2**15
"""Bytes of results above which an answer is made in a thread."""


class Answer(ABC):
    """A request for samples and the answers to it. A subclass has the form of one route's choices.

    Args:
        request: The request.
        model: The model that it names.
        tokenizer: The model's tokenizer.
        prompts: Its prompts, int32 tokens.
        longest: Tokens of the model's context.
        call: Call of a captured session, with its plan. None: nothing is captured.
    """

    PREFIX: ClassVar[str]
    """Prefix of the ids of answers."""
    OBJECTS: ClassVar[tuple[str, str]]
    """Names of the types of an answer and of an event."""

    def __init__(
        self,
        request: SampledRequest,
        model: NamedModel,
        tokenizer: Tokenizer,
        prompts: list[np.ndarray],
        longest: int,
        call: Call | None = None,
    ):
        self.request = request
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.longest = longest
        self.call = call
        self.outputs: list[SampleOutput] | None = None
        """Samples of each prompt, once all are complete."""
        self.is_stored = False
        """True once the answer is being stored."""
        self._head = {"id": f"{self.PREFIX}-{uuid4().hex}", "created": int(time.time()), "model": model.name}
        if len(prompts) * self.count > MAX_NUM_SAMPLES:
            raise RequestError(
                f"n={self.count} for {len(prompts)} prompts: at most {MAX_NUM_SAMPLES} choices in all; ask for fewer"
            )

    @cached_property
    def _texts(self) -> list[SampledText]:
        """Texts of a stream's choices."""
        return [self.text() for _ in range(len(self.prompts) * self.count)]

    @property
    def count(self) -> int:
        """Number of choices for each prompt."""
        return self.request.n or 1

    @abstractmethod
    def draw(self, prompt: np.ndarray) -> Draw:
        """Return what to sample after a prompt. Raises `RequestError`."""

    @abstractmethod
    def choice(self, index: int, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence) -> Choice:
        """Return a choice of a whole answer."""

    @abstractmethod
    def piece(self, index: int, text: str, report: Progress) -> Choice:
        """Return a piece of a choice in a stream: new text and its tokens."""

    @abstractmethod
    def last(
        self, index: int, text: str, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence
    ) -> Choice:
        """Return the last piece of a choice. `text` is what is left of the text."""

    def nodes(self) -> list[Node]:
        """Return the answers as a captured session has them."""
        assert self.call is not None and self.outputs is not None
        plan, sequences = self.call.plan, self.outputs[0].sequences
        return [plan.node(self.spoken(one), one.tokens, one.logprobs, one.fingerprint) for one in sequences]

    def spoken(self, sequence: GeneratedSequence) -> Message | None:
        """Return a complete answer as a message of its chat. None: it is in none."""
        return None

    def first(self, index: int) -> Choice | None:
        """Return the first piece of a choice, before all text. None: there is none."""
        return None

    @property
    def in_pieces(self) -> bool:
        """True if a choice is streamed before it is complete. The most likely tokens are known at its end only."""
        return True

    def counted(self, sequence: GeneratedSequence) -> int:
        """Return the number of tokens that the usage has for a sequence."""
        return len(sequence.tokens)

    def text(self) -> SampledText:
        """Return the empty text of a choice."""
        request = self.request
        params = request.sampling(None)
        return SampledText(self.tokenizer, params, request.stop_token_ids or (), request.skip_special_tokens)

    def said(self, sequence: GeneratedSequence) -> str:
        """Return the text of a complete sequence."""
        text = self.text()
        return text.push(sequence.tokens) + text.end(sequence.stop_reason == "stop")

    def whole(self, outputs: list[SampleOutput]) -> dict[str, Any]:
        """Return the answer to a request without a stream."""
        choices: list[Choice] = []
        for prompt, output in zip(self.prompts, outputs, strict=True):
            for sequence in output.sequences:
                choices.append(self.choice(len(choices), prompt, output, sequence))
        facts = {"usage": self.usage(outputs), "system_fingerprint": self.fingerprint(outputs)}
        return self._head | {"object": self.OBJECTS[0], "choices": choices} | facts

    def usage(self, outputs: list[SampleOutput]) -> dict[str, Any]:
        """Return the numbers of tokens."""
        read = sum(map(len, self.prompts))
        drawn = sum(self.counted(sequence) for output in outputs for sequence in output.sequences)
        cached = sum(output.prompt_cache_hit_tokens for output in outputs)
        return {
            "prompt_tokens": read,
            "completion_tokens": drawn,
            "total_tokens": read + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def fingerprint(self, outputs: list[SampleOutput]) -> str:
        """Return the hash of the weights that drew the samples."""
        return outputs[0].sequences[0].fingerprint

    async def events(self, reports: Reports) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream: pieces of choices, and the usage if it is wanted."""
        outputs: list[SampleOutput | None] = [None] * len(self.prompts)
        begun: set[int] = set()
        async for number, report in reports:
            sequences = range(len(report.sequences)) if isinstance(report, SampleOutput) else [report.number]
            for index in (number * self.count + place for place in sequences):
                if index not in begun and (first := self.first(index)) is not None:
                    yield self._event([first])
                begun.add(index)
            if isinstance(report, SampleOutput):
                outputs[number] = report
                if None not in outputs:
                    self.outputs = [output for output in outputs if output is not None]
                for choice in self._ends(number, report):
                    yield self._event([choice]) | {"system_fingerprint": self.fingerprint([report])}
            elif self.in_pieces:
                index = number * self.count + report.number
                yield self._event([self.piece(index, self._texts[index].push(report.tokens), report)])
        if self.request.usage_in_stream():
            yield self._event([]) | {"usage": self.usage([output for output in outputs if output is not None])}

    def _ends(self, number: int, output: SampleOutput) -> list[Choice]:
        """Return the last pieces of a prompt's choices."""
        ends = []
        for place, sequence in enumerate(output.sequences):
            index = number * self.count + place
            left = self._texts[index].end(sequence.stop_reason == "stop") if self.in_pieces else self.said(sequence)
            ends.append(self.last(index, left, self.prompts[number], output, sequence))
        return ends

    def _event(self, choices: list[Choice]) -> dict[str, Any]:
        return self._head | {"object": self.OBJECTS[1], "choices": choices}


@dataclass(frozen=True)
class Incoming:
    """A request for samples, with what serves it."""

    http: Request
    server: TinkerServer
    caller: Caller
    body: Body

    def call(self) -> Call | None:
        """Return the call of the session that the request names; None if it names none."""
        name = session_name(self.http)
        return None if name is None else Call(self.server.captures, self.caller.name, name)

    def asked(self) -> Asked:
        """Return the request as its retries are recognized."""
        headers = self.http.headers
        again = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        where = f"{session_name(self.http)} {self.http.url.path}"
        return Asked(self.caller.name, where, self.body.data, headers.get("idempotency-key"), again)


async def _incoming(http: Request, caller: CallerDependency, body: BodyDependency) -> Incoming:
    return Incoming(http, http.app.state.server, caller, body)


IncomingDependency = Annotated[Incoming, Depends(_incoming)]


async def respond(
    incoming: Incoming, request: SampledRequest, make: Callable[[NamedModel, Tokenizer, int, Call | None], Answer]
) -> Response:
    """Sample what a request asks for, and answer it.

    `make` returns the request's `Answer`, given the model, its tokenizer, the length of its context, and the request's
    call in a captured session. It runs in a thread, and sets the plan of the call.
    """
    http, retries, asked, call = incoming.http, incoming.server.retries, incoming.asked(), incoming.call()

    async def events() -> AsyncGenerator[Any, None]:
        async with AsyncExitStack() as stack:
            if call is not None:
                await stack.enter_async_context(call)
            answer, drawings = await _begin(stack, incoming, request, make, call)
            stack.callback(_refund_unless_answered, incoming, answer, drawings)
            if not request.stream:
                event = await _whole(answer, drawings)
                await _commit(incoming, asked, answer, drawings, [event], call)
                yield event
                return
            gone: list[Any] = []
            last: list[Any] = []
            async with aclosing(together(drawings)) as reports, aclosing(answer.events(reports)) as pieces:
                async for event in pieces:
                    if answer.outputs is not None:
                        last.append(event)
                        continue
                    if call is not None:
                        call.sent = True
                    if asked.key is not None:
                        gone.append(event)
                    yield event
            await _commit(incoming, asked, answer, drawings, gone + last, call)
            for event in last:
                yield event

    try:
        produced = await retries.events(asked, events)
        if request.stream:
            return await stream(http, produced)
        async with aclosing(produced):
            event = await unless_gone(http, anext(produced))
    except BaseException:
        retries.broke(asked)
        raise
    return _Sent(event, http, retries, asked)


def plan_tokens(call: Call | None, prompts: list[np.ndarray]) -> None:
    """Plan a request that is made of tokens, if it is one of a captured session. Raises RequestError."""
    if call is not None:
        if len(prompts) > 1:
            raise RequestError(f"prompt: has {len(prompts)} prompts; send one at a time in a captured session")
        call.plan = call.session.plan_tokens(prompts[0])


class _Sent(JSONResponse):
    """A whole answer that a retry gets again, unless it was sent."""

    def __init__(self, event: Any, http: Request, retries: Retries, asked: Asked):
        super().__init__(event)
        self._http = http
        self._retries = retries
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer in pieces, each after the client has read most of those before."""
        crash_point("api: answer stored, not sent")
        body, gone = memoryview(self.body), True
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for first in range(0, len(body), PIECE_BYTES):
                piece, last = bytes(body[first : first + PIECE_BYTES]), first + PIECE_BYTES >= len(body)
                gone = await self._http.is_disconnected()
                await send({"type": "http.response.body", "body": piece, "more_body": not last})
        finally:
            (self._retries.broke if gone else self._retries.sent)(self._asked)


async def _begin(
    stack: AsyncExitStack,
    incoming: Incoming,
    request: SampledRequest,
    make: Callable[[NamedModel, Tokenizer, int, Call | None], Answer],
    call: Call | None,
) -> tuple[Answer, list[Drawing]]:
    """Queue the samples of a request, until `stack` is closed."""
    server, caller, body = incoming.server, incoming.caller, incoming.body
    service = server.service
    request.usage_in_stream()
    info = await service.wait_until_ready()
    model = await find_model(service, caller, request.model)
    tokenizer = await service.tokenizer()
    answer = await service.decode_pool.run(
        caller.sharer, len(body.data), lambda: make(model, tokenizer, info.max_context_length, call)
    )
    wanted = [replace(answer.draw(prompt), reports_progress=bool(request.stream)) for prompt in answer.prompts]
    counted = body if len(wanted) == 1 else Body(b"")  # of several, each counts for its own prompt
    if call is not None:
        await call.open()
    drawings = [server.draws.draw(caller, model, draw, counted) for draw in wanted]
    return answer, [await stack.enter_async_context(drawing) for drawing in drawings]


async def _whole(answer: Answer, drawings: list[Drawing]) -> dict[str, Any]:
    outputs = answer.outputs = list(await asyncio.gather(*(drawing.result() for drawing in drawings)))
    if sum(output.nbytes for output in outputs) < LARGE_BYTES:
        return answer.whole(outputs)
    return await asyncio.to_thread(answer.whole, outputs)


async def _commit(
    incoming: Incoming, asked: Asked, answer: Answer, drawings: list[Drawing], events: list[Any], call: Call | None
) -> None:
    """Store an answer before its client gets the end of it, in one transaction: for retries, for its captured session,
    and as one whose charge is final. Goes on if the client goes."""
    server = incoming.server
    keep = server.retries.job(asked, events, bool(answer.request.stream))
    charged = [drawing.request_id for drawing in drawings]
    nodes = [] if call is None else await asyncio.to_thread(answer.nodes)
    answer.is_stored = True  # from here on, the next function decides about the charge

    async def commit(capture: Callable[[Session], None] | None = None) -> None:
        def store(session: Session) -> None:
            for job in (keep, capture):
                if job is not None:
                    job(session)
            settle(session, charged)

        try:
            await server.service.database.write(store)
        except (DatabaseFull, *PASSING) as error:
            if call is not None or asked.key is not None:
                server.answering.start(_refund(incoming, charged))
                raise
            log.warning("an answer is sent, though a retry will not get it again: %s", error)
        else:
            server.retries.stored(asked)
        for request_id in charged:
            server.queue.handed_out(request_id)

    await server.answering.unbroken(commit() if call is None else call.answer(nodes, commit))


def _refund_unless_answered(incoming: Incoming, answer: Answer, drawings: list[Drawing]) -> None:
    """Refund complete samples whose answer will not be stored, because their client has gone or another failed."""
    charged = [drawing.request_id for drawing in drawings if drawing.is_complete]
    if charged and not answer.is_stored:
        incoming.server.answering.start(_refund(incoming, charged))


async def _refund(incoming: Incoming, charged: list[str]) -> None:
    for request_id in charged:
        await incoming.server.queue.samples.charges.refund(request_id, incoming.caller)


async def together(drawings: list[Drawing]) -> AsyncGenerator[tuple[int, Progress | SampleOutput], None]:
    """Yield the reports of several drawings as they come, each with the drawing's number. Raises the first error."""
    reports: asyncio.Queue[tuple[int, Progress | SampleOutput | Exception]] = asyncio.Queue()

    async def follow(number: int, drawing: Drawing) -> None:
        try:
            async for report in drawing.reports():
                reports.put_nowait((number, report))
        except Exception as error:
            reports.put_nowait((number, error))

    tasks = [asyncio.create_task(follow(number, drawing)) for number, drawing in enumerate(drawings)]
    try:
        left = len(drawings)
        while left:
            number, report = await reports.get()
            if isinstance(report, Exception):
                raise report
            left -= isinstance(report, SampleOutput)
            yield number, report
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
