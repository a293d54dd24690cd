"""Answers to requests for samples, whole or as streams, whatever the form of their choices."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, aclosing, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from skyrl.algorithms.checks.requests import MAX_NUM_SAMPLES
from skyrl.backends.operations import Progress
from skyrl.errors import RequestError
from skyrl.tinker.context import Service
from skyrl.tinker.http.openai.dialect import stream, unless_gone
from skyrl.tinker.http.openai.retries import Retries
from skyrl.tinker.http.openai.schemas import SampledRequest
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.sampling.drawing import Draw, Drawing, Draws
from skyrl.tinker.sampling.models import NamedModel, find_model
from skyrl.tinker.sampling.text import SampledText
from skyrl.tinker.wire.parsing import Body
from skyrl.types import GeneratedSequence, SampleOutput
from skyrl.utils.tokenizer import Tokenizer

Choice = dict[str, Any]
NOTHING = nullcontext()
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
    ):
        self.request = request
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.longest = longest
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

    def submitting(self) -> None:  # noqa: B027
        """Note that samples are about to be queued."""

    def sent(self) -> None:  # noqa: B027
        """Note that the client has got a part of the answer."""

    def complete(self, outputs: list[SampleOutput]) -> None:  # noqa: B027
        """Note that all choices are complete. Called before the client gets the end of the answer."""

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
        bases = [origin.base for output in outputs for sequence in output.sequences for origin in sequence.origins]
        return self.model.fingerprint(bases[0] if bases else "")

    async def events(self, stack: AsyncExitStack, drawings: list[Drawing]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream: pieces of choices, and the usage if it is wanted. Closes `stack`."""
        outputs: list[SampleOutput | None] = [None] * len(drawings)
        begun: set[int] = set()
        async with stack:
            async for number, report in together(drawings):
                sequences = range(len(report.sequences)) if isinstance(report, SampleOutput) else [report.number]
                for index in (number * self.count + place for place in sequences):
                    if index not in begun and (first := self.first(index)) is not None:
                        yield self._event([first])
                    begun.add(index)
                self.sent()
                if isinstance(report, SampleOutput):
                    outputs[number] = report
                    if None not in outputs:
                        self.complete([output for output in outputs if output is not None])
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


async def respond(
    http: Request,
    service: Service,
    draws: Draws,
    caller: Caller,
    body: Body,
    request: SampledRequest,
    make: Callable[[NamedModel, Tokenizer, int], Answer],
    call: AbstractContextManager[object] = NOTHING,
) -> Response:
    """Sample what a request asks for, and answer it.

    `make` returns the request's `Answer`, given the model, its tokenizer and the length of its context. It runs in a
    thread. `call` is a context that ends with the answer, or with its error.
    """
    retries: Retries = http.app.state.retries
    key = http.headers.get("idempotency-key")

    async def begin(stack: AsyncExitStack) -> tuple[Answer, list[Drawing]]:
        stack.enter_context(call)
        request.usage_in_stream()
        info = await service.wait_until_ready()
        model = await find_model(service, caller, request.model)
        tokenizer = await service.tokenizer()
        answer = await service.decode_pool.run(
            caller.sharer, len(body.data), lambda: make(model, tokenizer, info.max_context_length)
        )
        wanted = [replace(answer.draw(prompt), reports_progress=bool(request.stream)) for prompt in answer.prompts]
        counted = body if len(wanted) == 1 else Body(b"")  # of several, each counts for its own prompt
        answer.submitting()
        return answer, [await stack.enter_async_context(draws.draw(caller, model, draw, counted)) for draw in wanted]

    async def events() -> AsyncGenerator[Any, None]:
        async with AsyncExitStack() as stack:
            answer, drawings = await begin(stack)
            if request.stream:
                async with aclosing(answer.events(stack.pop_all(), drawings)) as pieces:
                    async for event in pieces:
                        yield event
            else:
                yield await _whole(answer, drawings)

    if key is None:
        produced = events()
    else:
        with ExitStack() as refused:
            refused.enter_context(call)  # of a retry, and of a key that is refused, it ends here
            kept, is_new = retries.answer(caller.name, caller.sharer, http.url.path, key, body.data, events)
            if is_new:
                refused.pop_all()
        produced = kept.read()
    if request.stream:
        return await stream(http, produced)
    async with aclosing(produced):
        return JSONResponse(await unless_gone(http, anext(produced)))


async def _whole(answer: Answer, drawings: list[Drawing]) -> dict[str, Any]:
    outputs = await _results(drawings)
    answer.complete(outputs)
    if sum(output.nbytes for output in outputs) < LARGE_BYTES:
        return answer.whole(outputs)
    return await asyncio.to_thread(answer.whole, outputs)


async def _results(drawings: list[Drawing]) -> list[SampleOutput]:
    return list(await asyncio.gather(*(drawing.result() for drawing in drawings)))


async def together(drawings: list[Drawing]) -> AsyncIterator[tuple[int, Progress | SampleOutput]]:
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
