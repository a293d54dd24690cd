"""The route of OpenAI's Responses API: the chat route in another form. Nothing is stored."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from skyrl.errors import RequestError
from skyrl.tinker.http.openai.answers import IncomingDependency, Reports, respond
from skyrl.tinker.http.openai.chat import REASONING, Chat
from skyrl.tinker.http.openai.dialect import OpenAIRoute
from skyrl.tinker.http.openai.schemas import ChatRequest, StreamOptions, chat_request
from skyrl.tinker.http.routes.dependencies import json_body
from skyrl.tinker.sampling.capture_store import Call
from skyrl.tinker.sampling.models import NamedModel
from skyrl.types import GeneratedSequence, SampleOutput
from skyrl.utils.answer_formats import Kind
from skyrl.utils.tokenizer import Tokenizer

router = APIRouter(route_class=OpenAIRoute)

Item = dict[str, Any]
PARTS = ("input_text", "output_text", "text", "reasoning_text")
"""Types of parts of a message that contain text."""
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "text": ({"format": {"type": "text"}}, {}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Parameters that are not served, with values that ask for nothing."""


class ResponsesRequest(BaseModel):
    """Request of /v1/responses. Unknown parameters are rejected."""

    model_config = ConfigDict(extra="forbid")

    model: str
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    """Facts about the client's own user. Nothing here depends on them, nor on the next two."""
    user: str | None = None
    safety_identifier: str | None = None
    background: Any = None
    conversation: Any = None
    context_management: Any = None
    include: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    service_tier: Any = None
    store: Any = None
    text: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    def chat(self) -> ChatRequest:
        """Return the same request as one for a chat. Raises `RequestError` for what is not served."""
        for name, harmless in NOT_SERVED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise RequestError(f"{name}={value!r}: is not served, and nothing is stored; leave it out")
        if unknown := (self.reasoning or {}).keys() - {"effort", "summary", "generate_summary"}:
            raise RequestError(f"reasoning.{min(unknown)}: is not served; leave it out")
        try:
            json.dumps([self.metadata, self.tools, self.tool_choice], allow_nan=False)  # as the answer has them
        except ValueError as error:
            raise RequestError("metadata, tools and tool_choice: must be JSON, without NaN and infinity") from error
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += _messages(self.input)
        return chat_request(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or [])] or None,
                "tool_choice": self.tool_choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": (self.reasoning or {}).get("effort"),
                "stream": self.stream,
                "prompt_cache_key": self.prompt_cache_key,
            }
        )


def _messages(items: list[Item]) -> list[dict[str, Any]]:
    """Return items as messages of a chat. Calls and reasoning belong to one answer. Raises `RequestError`."""
    messages: list[dict[str, Any]] = []

    def answer() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for number, item in enumerate(items):
        at, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message":
            text, role = _text(item.get("content"), f"{at}.content"), item.get("role")
            if role == "assistant" and messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
                messages[-1]["content"] = text  # after its reasoning
            else:
                messages.append({"role": role, "content": text})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = _text(item.get("output"), f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "reasoning":
            text = _text(item.get("content") or [], f"{at}.content")
            messages.append({"role": "assistant", "content": None} | ({REASONING: text} if text else {}))
        else:
            raise RequestError(
                f"{at}.type={kind!r}: is not served; send messages, function_call or function_call_output"
            )
    return messages


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{at}: give text, or a list of parts of text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in PARTS or not isinstance(part.get("text"), str):
            raise RequestError(f"{at}: only parts of text are served; models here read text")
    return "".join(part["text"] for part in content)


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"{at}.type={tool.get('type')!r}: is not served here; send functions")
    kept = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": kept}


class Answered(Chat):
    """A request for a response, and the response."""

    PREFIX = "resp"
    asked: ResponsesRequest

    def whole(self, outputs: list[SampleOutput]) -> dict[str, Any]:
        (sequence,) = outputs[0].sequences
        message, calls = self._message(sequence)
        items: list[Item] = []
        if REASONING in message:
            items.append(_reasoning(message[REASONING]))
        if message["content"] or not (items or calls):  # an empty answer is a part of the conversation, too
            items.append(_message(message["content"] or ""))
        return self._response(items + [_called(call) for call in calls], outputs)

    async def events(self, reports: Reports) -> AsyncGenerator[dict[str, Any], None]:
        text, reader, items, number = self.text(), self._reader(), _Items(), 0

        def numbered(event: dict[str, Any]) -> dict[str, Any]:
            nonlocal number
            number += 1
            return event | {"sequence_number": number - 1}

        async for _, report in reports:
            if not number:
                begun = self._response([], None)
                for kind in ("response.created", "response.in_progress"):
                    yield numbered({"type": kind, "response": begun})
            if not isinstance(report, SampleOutput):
                for event in items.add(reader.push(text.push(report.tokens))):
                    yield numbered(event)
                continue
            self.outputs = [report]
            (sequence,) = report.sequences
            parts = reader.push(text.end(sequence.stop_reason == "stop"))
            more, calls = reader.end()
            for event in items.add(parts + more):
                yield numbered(event)
            if not (items.begun or calls):
                for event in items.add([("content", "")]):
                    yield numbered(event)
            for event in [*items.close(), *items.called(self._shown(calls))]:
                yield numbered(event)
            response = self._response(items.done, [report])
            yield numbered({"type": f"response.{response['status']}", "response": response})

    def _response(self, items: list[Item], outputs: list[SampleOutput] | None) -> dict[str, Any]:
        """Return the response: with its end if `outputs` are given, else as it begins."""
        cut = outputs is not None and outputs[0].sequences[0].stop_reason == "length"
        asked = self.asked
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self.model.name,
            "status": "in_progress" if outputs is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "output": items,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if outputs is None else self._usage(outputs),
            "system_fingerprint": None if outputs is None else self.fingerprint(outputs),
        }

    def _usage(self, outputs: list[SampleOutput]) -> dict[str, Any]:
        usage, sequence = self.usage(outputs), outputs[0].sequences[0]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(sequence)},
            "total_tokens": usage["total_tokens"],
        }

    def _reasoning_tokens(self, sequence: GeneratedSequence) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        text, reader = self.text(), self._reader()
        reasoning = 0
        for place, token in enumerate(sequence.tokens.tolist(), 1):
            if any(kind == "reasoning" for kind, _ in reader.push(text.push([token]))):
                reasoning = place
        return reasoning


class _Items:
    """Items of a stream, one after the other."""

    def __init__(self) -> None:
        self.done: list[Item] = []
        self._kind: Kind | None = None
        self._item: Item = {}
        self._said = ""

    def add(self, parts: list[tuple[Kind, str]]) -> Iterator[dict[str, Any]]:
        """Yield the events of new text."""
        for kind, text in parts:
            if kind != self._kind:
                yield from self.close()
                self._kind, self._said = kind, ""
                self._item = _reasoning("") if kind == "reasoning" else _message("")
                part = self._item["content"][0]
                yield self._of_item("added", self._item | {"content": [], "status": "in_progress"})
                yield self._event("response.content_part.added", content_index=0, part=part)
            self._said += text
            yield self._event(f"response.{self._name}.delta", content_index=0, delta=text, **self._scored)

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the open item, if there is one."""
        if self._kind is None:
            return
        yield self._event(f"response.{self._name}.done", content_index=0, text=self._said, **self._scored)
        part = self._item["content"][0] | {"text": self._said}
        self._item = self._item | {"content": [part]}
        yield self._event("response.content_part.done", content_index=0, part=part)
        yield self._of_item("done", self._item)
        self.done.append(self._item)
        self._kind = None

    def called(self, calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events of calls of tools."""
        for call in calls:
            self._item = item = _called(call)
            arguments = item["arguments"]
            yield self._of_item("added", item | {"arguments": "", "status": "in_progress"})
            yield self._event("response.function_call_arguments.delta", delta=arguments)
            yield self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"])
            yield self._of_item("done", item)
            self.done.append(item)

    @property
    def begun(self) -> bool:
        """True if there is an item, complete or not."""
        return bool(self.done) or self._kind is not None

    @property
    def _name(self) -> str:
        return "reasoning_text" if self._kind == "reasoning" else "output_text"

    @property
    def _scored(self) -> dict[str, Any]:
        return {} if self._kind == "reasoning" else {"logprobs": []}

    def _of_item(self, what: str, item: Item) -> dict[str, Any]:
        return {"type": f"response.output_item.{what}", "output_index": len(self.done), "item": item}

    def _event(self, kind: str, **facts: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.done), **facts}


def _reasoning(text: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _message(text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "status": "completed"}
    return head | {"content": content}


def _called(call: dict[str, Any]) -> Item:
    head = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": call["id"], "status": "completed"}
    return head | call["function"]


@router.post("/responses", response_model=None)
async def create_response(
    incoming: IncomingDependency, request: Annotated[ResponsesRequest, json_body(ResponsesRequest)]
) -> Response:
    """Answer a conversation."""
    chat = request.chat()

    def make(model: NamedModel, tokenizer: Tokenizer, longest: int, call: Call | None) -> Answered:
        answer = Answered(chat, model, tokenizer, longest, call)
        answer.asked = request
        return answer

    return await respond(incoming, chat, make)
