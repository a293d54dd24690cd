"""The chat route: messages in; text, reasoning and tool calls out."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any, NamedTuple
from uuid import uuid4

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response
from jinja2 import TemplateError

from skyrl.backends.operations import Progress
from skyrl.errors import ConfigError, RequestError
from skyrl.tinker.http.openai.answers import Answer, Choice, IncomingDependency, respond
from skyrl.tinker.http.openai.dialect import OpenAIRoute
from skyrl.tinker.http.openai.schemas import ChatRequest
from skyrl.tinker.http.routes.dependencies import json_body
from skyrl.tinker.sampling.capture_store import Call
from skyrl.tinker.sampling.drawing import Draw
from skyrl.tinker.sampling.models import NamedModel
from skyrl.tinker.sampling.text import SampledText, token_text
from skyrl.types import GeneratedSequence, SampleOutput, TokenTable
from skyrl.utils.answer_formats import THINK, AnswerReader, Kind, ToolCall, format_of
from skyrl.utils.chat_template import ChatTemplate
from skyrl.utils.chats import Message, read_chat, read_tools
from skyrl.utils.template_form import TemplateForm
from skyrl.utils.tokenizer import Tokenizer

router = APIRouter(route_class=OpenAIRoute)

REASONING = "reasoning_content"
"""Field of an answer with the model's reasoning, as vLLM and DeepSeek name it."""
REASONING_TOKENS = 16
"""Tokens at the end of a prompt in which the start of reasoning is searched."""


class Chat(Answer):
    """A request for an answer in a chat, and its answers."""

    PREFIX = "chatcmpl"
    OBJECTS = "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(
        self, request: ChatRequest, model: NamedModel, tokenizer: Tokenizer, longest: int, call: Call | None = None
    ):
        request.check_form()
        read = Conversation.of(tokenizer, request)
        self.form = format_of(read.template.source)
        if call is None:
            prompt = np.asarray(tokenizer.encode(read.render()), np.int32)
        else:
            with _template_errors():
                call.plan = call.session.plan(tokenizer, *read)
            prompt = call.plan.prompt
        self._reasons = tokenizer.decode(prompt[-REASONING_TOKENS:].tolist()).rstrip().endswith(THINK)
        super().__init__(request, model, tokenizer, [prompt], longest, call)

    @cached_property
    def _readers(self) -> list[AnswerReader]:
        """Readers of a stream's choices."""
        return [self._reader() for _ in range(self.count)]

    def spoken(self, sequence: GeneratedSequence) -> Message | None:
        message, _ = self._message(sequence)
        (answer,) = read_chat([{name: value for name, value in message.items() if name != REASONING}], "answer")
        return answer

    def draw(self, prompt: np.ndarray) -> Draw:
        request = self.request
        return Draw(
            prompt,
            request.sampling(request.most_tokens),
            request.options(),
            self.count,
            request.top_logprobs or 0,
            request.prompt_cache_key,
        )

    def text(self) -> SampledText:
        request, tokenizer = self.request, self.tokenizer
        kept = [token for token in tokenizer.special_ids if self._marks(tokenizer.token_bytes(token).decode())]
        params = request.sampling(None)
        return SampledText(tokenizer, params, request.stop_token_ids or (), request.skip_special_tokens, kept)

    def choice(self, index: int, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence) -> Choice:
        message, calls = self._message(sequence)
        choice: Choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs),
            "finish_reason": _finish(sequence, calls),
        }
        if self.request.return_token_ids:
            choice |= {"prompt_token_ids": prompt.tolist(), "token_ids": sequence.tokens.tolist()}
        return choice

    def _message(self, sequence: GeneratedSequence) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message of a complete answer, and its calls of tools."""
        reader = self._reader()
        parts = reader.push(self.said(sequence))
        more, calls = reader.end()
        texts: dict[Kind, str] = {}
        for kind, text in parts + more:
            texts[kind] = texts.get(kind, "") + text
        shown = self._shown(calls)
        message: dict[str, Any] = {"role": "assistant", "content": texts.get("content", None if shown else "")}
        if "reasoning" in texts:
            message[REASONING] = texts["reasoning"]
        if shown:
            message["tool_calls"] = shown
        return message, shown

    def first(self, index: int) -> Choice | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, text: str, report: Progress) -> Choice:
        choice: Choice = {"index": index, "delta": _delta(self._readers[index].push(text))}
        choice |= {"logprobs": self._logprobs(report.tokens, report.logprobs, None), "finish_reason": None}
        if self.request.return_token_ids:
            choice["token_ids"] = report.tokens.tolist()
        return choice

    def last(
        self, index: int, text: str, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence
    ) -> Choice:
        reader = self._readers[index]
        parts = reader.push(text)
        more, calls = reader.end()
        shown = self._shown(calls)
        delta = _delta(parts + more)
        if shown:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(shown)]
        choice: Choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": _finish(sequence, shown)}
        if not self.in_pieces:
            choice["logprobs"] = self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs)
        if self.request.return_token_ids:
            tokens = [] if self.in_pieces else sequence.tokens.tolist()
            choice |= {"prompt_token_ids": prompt.tolist(), "token_ids": tokens}
        return choice

    @property
    def in_pieces(self) -> bool:
        return not self.request.top_logprobs

    def _marks(self, text: str) -> bool:
        """Return True if a special token is a part of the answer's form."""
        return self.form.opening is not None and ("tool" in text.lower() or text in (self.form.opening, "[ARGS]"))

    def _reader(self) -> AnswerReader:
        return AnswerReader(self.form, self._reasons, bool(self.request.given_tools))

    def _shown(self, calls: list[ToolCall]) -> list[dict[str, Any]]:
        if self.request.parallel_tool_calls is False:
            calls = calls[:1]
        return [
            {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _logprobs(self, tokens: np.ndarray, logprobs: np.ndarray, likely: TokenTable | None) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens; None unless they are wanted."""
        if not self.request.logprobs:
            return None
        content = []
        for place, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            top = [] if likely is None else zip(likely[0][place].tolist(), likely[1][place].tolist(), strict=True)
            content.append(self._entry(token, logprob) | {"top_logprobs": [self._entry(*one) for one in top]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = token_text(self.tokenizer, token, self.request.return_tokens_as_token_ids)
        return {"token": text, "logprob": logprob, "bytes": list(self.tokenizer.token_bytes(token))}


def _delta(parts: list[tuple[Kind, str]]) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    for kind, text in parts:
        name = REASONING if kind == "reasoning" else "content"
        delta[name] = delta.get(name, "") + text
    return delta


def _finish(sequence: GeneratedSequence, calls: list[Any]) -> str:
    return "tool_calls" if calls and sequence.stop_reason == "stop" else sequence.stop_reason


class Conversation(NamedTuple):
    """A chat as the model's template reads it."""

    template: ChatTemplate
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: ChatRequest) -> "Conversation":
        """Read the chat of a request. Raises `RequestError`."""
        try:
            template = tokenizer.chat_template
        except TemplateError as error:
            raise RequestError(
                f"messages: the model's chat template is invalid ({error}); use /v1/completions"
            ) from error
        if template is None:
            raise RequestError("messages: this model has no chat template; use /v1/completions")
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            if "reasoning_effort" not in template.source:
                raise RequestError(
                    f"reasoning_effort={request.reasoning_effort!r}: the chat template does not read it; leave it out"
                )
            variables["reasoning_effort"] = request.reasoning_effort

        def render(chat: list[Message], known: Any) -> str:
            return template.render(chat, known, **variables)

        given = [_accepted(message) for message in request.messages]
        try:
            tools, messages = read_tools(request.given_tools, "tools"), read_chat(given, "messages")
            fitted = TemplateForm(render).fit(messages, "messages", tools)
            if tools and render(fitted, tools) == render(fitted, None):
                raise RequestError("tools: the model's chat template does not render them; leave them out")
            for role in sorted({message["role"] for message in fitted} & {"system", "tool"}):
                if not template.renders(role):
                    raise RequestError(
                        f"messages: the model's chat template does not render messages of the role {role}; put their "
                        "text into one of the user"
                    )
            return cls(template, fitted, tools, variables)
        except RequestError:
            raise
        except ConfigError as error:
            raise RequestError(str(error)) from error
        except Exception as error:  # templates are programs and may raise any exception
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error

    def render(self) -> str:
        """Return the text of the chat, up to the start of the answer. Raises `RequestError`."""
        with _template_errors():
            return self.template.render(self.messages, self.tools, **self.variables)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Context in which an exception is a `RequestError`: templates are programs and may raise any."""
    try:
        yield
    except Exception as error:
        raise RequestError(f"messages: the model's chat template refuses them: {error}") from error


def _accepted(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chats have it: OpenAI's developer is a system, and an answer may have no content."""
    if message.get("role") == "developer":
        return message | {"role": "system"}
    if message.get("role") == "assistant" and message.get("content") is None and not message.get("tool_calls"):
        return message | {"content": ""}
    return message


@router.post("/chat/completions", response_model=None)
async def create_chat_completion(
    incoming: IncomingDependency, request: Annotated[ChatRequest, json_body(ChatRequest)]
) -> Response:
    """Answer a chat."""

    def make(model: NamedModel, tokenizer: Tokenizer, longest: int, call: Call | None) -> Chat:
        return Chat(request, model, tokenizer, longest, call)

    return await respond(incoming, request, make)
