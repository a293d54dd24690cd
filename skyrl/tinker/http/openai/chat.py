"""The chat route: messages in; text, reasoning and tool calls out."""

from typing import Annotated, Any
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from jinja2 import TemplateError

from skyrl.backends.operations import Progress
from skyrl.errors import ConfigError, RequestError
from skyrl.tinker.http.openai.answers import Answer, Choice, respond
from skyrl.tinker.http.openai.dialect import OpenAIRoute
from skyrl.tinker.http.openai.schemas import ChatRequest
from skyrl.tinker.http.routes.dependencies import (
    BodyDependency,
    CallerDependency,
    DrawsDependency,
    ServiceDependency,
    json_body,
)
from skyrl.tinker.sampling.drawing import Draw
from skyrl.tinker.sampling.models import NamedModel
from skyrl.tinker.sampling.text import SampledText, token_text
from skyrl.types import GeneratedSequence, SampleOutput, TokenTable
from skyrl.utils.answer_formats import THINK, AnswerFormat, AnswerReader, Kind, ToolCall, format_of
from skyrl.utils.chats import read_chat, read_tools
from skyrl.utils.template_form import TemplateForm
from skyrl.utils.tokenizer import Tokenizer

router = APIRouter(route_class=OpenAIRoute)

REASONING = "reasoning_content"
"""Field of an answer with the model's reasoning, as vLLM and DeepSeek name it."""


class Chat(Answer):
    """A request for an answer in a chat, and its answers."""

    PREFIX = "chatcmpl"
    OBJECTS = "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, request: ChatRequest, model: NamedModel, tokenizer: Tokenizer, longest: int):
        request.check_form()
        self.form, text = _rendered(tokenizer, request)
        self._reasons = text.rstrip().endswith(THINK)
        prompt = np.asarray(tokenizer.encode(text), np.int32)
        super().__init__(request, model, tokenizer, [prompt], longest)
        self._readers = [self._reader() for _ in range(self.count)]
        """Readers of a stream's choices."""

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
        reader = self._reader()
        parts = reader.push(self.said(sequence))
        more, calls = reader.end()
        texts: dict[Kind, str] = {}
        for kind, text in parts + more:
            texts[kind] = texts.get(kind, "") + text
        message: dict[str, Any] = {"role": "assistant", "content": texts.get("content", None if calls else "")}
        if "reasoning" in texts:
            message[REASONING] = texts["reasoning"]
        if calls := self._shown(calls):
            message["tool_calls"] = calls
        choice: Choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs),
            "finish_reason": _finish(sequence, calls),
        }
        if self.request.return_token_ids:
            choice |= {"prompt_token_ids": prompt.tolist(), "token_ids": sequence.tokens.tolist()}
        return choice

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


def _rendered(tokenizer: Tokenizer, request: ChatRequest) -> tuple[AnswerFormat, str]:
    """Return the format of the model's answers, and the text of the chat. Raises `RequestError`."""
    try:
        template = tokenizer.chat_template
    except TemplateError as error:
        raise RequestError(f"messages: the model's chat template is invalid ({error}); use /v1/completions") from error
    if template is None:
        raise RequestError("messages: this model has no chat template; use /v1/completions")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        if "reasoning_effort" not in template.source:
            raise RequestError(
                f"reasoning_effort={request.reasoning_effort!r}: the chat template does not read it; leave it out"
            )
        variables["reasoning_effort"] = request.reasoning_effort
    given = [_accepted(message) for message in request.messages]
    try:
        tools = read_tools(request.given_tools, "tools")
        messages = read_chat(given, "messages")
        fitted = TemplateForm(lambda chat, known: template.render(chat, known, **variables)).fit(
            messages, "messages", tools
        )
    except ConfigError as error:
        raise RequestError(str(error)) from error
    try:
        return format_of(template.source), template.render(fitted, tools, **variables)
    except Exception as error:  # templates are programs and may raise any exception
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
    http: Request,
    service: ServiceDependency,
    draws: DrawsDependency,
    caller: CallerDependency,
    body: BodyDependency,
    request: Annotated[ChatRequest, json_body(ChatRequest)],
) -> Response:
    """Answer a chat."""

    def make(model: NamedModel, tokenizer: Tokenizer, longest: int) -> Chat:
        return Chat(request, model, tokenizer, longest)

    return await respond(http, service, draws, caller, body, request, make)
