"""The routes of Anthropic's Messages API: the chat route in another form."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from skyrl.errors import RequestError
from skyrl.tinker.http.openai.answers import IncomingDependency, Reports, respond
from skyrl.tinker.http.openai.chat import REASONING, Chat, Conversation
from skyrl.tinker.http.openai.dialect import OpenAIRoute
from skyrl.tinker.http.openai.schemas import ChatRequest, chat_request
from skyrl.tinker.http.routes.dependencies import (
    BodyDependency,
    CallerDependency,
    ServiceDependency,
    json_body,
)
from skyrl.tinker.sampling.capture_store import Call
from skyrl.tinker.sampling.models import NamedModel, find_model
from skyrl.types import GeneratedSequence, SampleOutput
from skyrl.utils.answer_formats import Kind
from skyrl.utils.tokenizer import Tokenizer

router = APIRouter(route_class=OpenAIRoute)

Block = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CountRequest(BaseModel):
    """Request of /v1/messages/count_tokens. Unknown parameters are rejected."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Nothing depends on it: prefixes are cached in any case."""

    MAX_TOKENS: ClassVar[int | None] = 1

    def chat(self) -> ChatRequest:
        """Return the same request in OpenAI's form. Raises `RequestError` for what is not served."""
        system = self.system if isinstance(self.system, str) else "".join(_texts(self.system or [], "system"))
        messages = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{number}]")
        if messages[-1]["role"] == "assistant":
            raise RequestError(
                f"messages[{len(self.messages) - 1}].role='assistant': an answer that was begun is not continued here; "
                "end with a message of the user"
            )
        choice = self.tool_choice or {"type": "auto"}
        if choice.get("type") not in ("auto", "none"):
            raise RequestError(
                f"tool_choice={self.tool_choice!r}: only auto and none are served, as nothing here forces a model to "
                "call; leave it out"
            )
        given: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.MAX_TOKENS,
            "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or [])] or None,
            "tool_choice": choice["type"],
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        }
        if self.thinking is not None and self.thinking.get("type") != "adaptive":
            if self.thinking.get("type") != "disabled":
                raise RequestError(
                    f"thinking={self.thinking!r}: a budget is not served; leave it out, and the model thinks as its "
                    "chat template has it"
                )
            given["chat_template_kwargs"] = {"enable_thinking": False}
        return chat_request(given | self._sampling())

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    """Request of /v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    """Facts about the client's own user. Nothing here depends on them, nor on the next one."""
    service_tier: Literal["auto", "standard_only"] | None = None

    def _sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        return given | {"stop": self.stop_sequences or None}


def _messages(message: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form; results of tools are messages of their own. Raises `RequestError`."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{at}.role={role!r}: known: user, assistant; a system message is the parameter system")
    if not isinstance(content, str | list):
        raise RequestError(f"{at}.content: give text, or a list of blocks")
    if role == "user" and not content:
        raise RequestError(f"{at}.content is empty; send text")
    blocks: list[Block] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where, kind = f"{at}.content[{number}]", block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts += _texts([block], where)
        elif kind == "tool_result" and role == "user":
            given = "" if block.get("content") is None else block["content"]
            text = given if isinstance(given, str) else "".join(_texts(given, f"{where}.content"))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            raise RequestError(f"{where}.type={kind!r}: is not served in a message of the {role}; send text")
    if texts or role == "assistant":
        said: dict[str, Any] = {"role": role, "content": "".join(texts) or (None if calls else "")}
        if calls:
            said["tool_calls"] = calls
        if any(thoughts):
            said[REASONING] = "".join(thoughts)
        yield said


def _texts(blocks: Any, at: str) -> list[str]:
    if not isinstance(blocks, list):
        raise RequestError(f"{at}: give text, or a list of blocks of text")
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RequestError(f"{at}: only blocks of text are served; models here read text")
    return [block["text"] for block in blocks]


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or "input_schema" not in tool:
        raise RequestError(
            f"{at}: is a tool of Anthropic's servers; send tools with name, description and input_schema"
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


class Message(Chat):
    """A request for an answer in a chat, and its answer as Anthropic has it."""

    PREFIX = "msg"

    def whole(self, outputs: list[SampleOutput]) -> dict[str, Any]:
        (sequence,) = outputs[0].sequences
        message, calls = self._message(sequence)
        content: list[Block] = []
        if REASONING in message:
            content.append({"type": "thinking", "thinking": message[REASONING], "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        content += [_use(call) for call in calls]
        drawn = {"system_fingerprint": self.fingerprint(outputs)}
        return self._shell(content, self._usage(outputs)) | self._end(sequence, calls) | drawn

    async def events(self, reports: Reports) -> AsyncGenerator[dict[str, Any], None]:
        text, reader, blocks = self.text(), self._reader(), _Blocks()
        begun = False
        async for _, report in reports:
            if not begun:
                begun = True
                read = {"input_tokens": len(self.prompts[0]), "output_tokens": 0}
                yield {"type": "message_start", "message": self._shell([], read) | NOT_ENDED}
            if not isinstance(report, SampleOutput):
                for event in blocks.add(reader.push(text.push(report.tokens))):
                    yield event
                continue
            self.outputs = [report]
            (sequence,) = report.sequences
            parts = reader.push(text.end(sequence.stop_reason == "stop"))
            more, found = reader.end()
            for event in [*blocks.add(parts + more), *blocks.close()]:
                yield event
            calls = self._shown(found)
            for call in calls:
                for event in blocks.whole(call):
                    yield event
            ended = self._end(sequence, calls, text.stop)
            drawn = {"system_fingerprint": self.fingerprint([report])}
            yield {"type": "message_delta", "delta": ended, "usage": self._usage([report])} | drawn
        yield {"type": "message_stop"}

    def _shell(self, content: list[Block], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self.model.name}
        return head | {"content": content, "usage": usage}

    def _end(self, sequence: GeneratedSequence, calls: list[Any], stop: str | None = None) -> dict[str, Any]:
        if stop is None and sequence.stop_reason == "stop":
            text = self.text()
            text.push(sequence.tokens)
            text.end(True)
            stop = text.stop
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reason = "tool_calls" if calls and sequence.stop_reason == "stop" else sequence.stop_reason
        return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}

    def _usage(self, outputs: list[SampleOutput]) -> dict[str, Any]:
        usage = self.usage(outputs)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


NOT_ENDED = {"stop_reason": None, "stop_sequence": None}


class _Blocks:
    """Blocks of a stream, one after the other."""

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._index = -1

    def add(self, parts: list[tuple[Kind, str]]) -> Iterator[dict[str, Any]]:
        """Yield the events of new text."""
        for kind, text in parts:
            if kind != self._kind:
                yield from self.close()
                empty = {"thinking": "", "signature": ""} if kind == "reasoning" else {"text": ""}
                yield self._start({"type": "thinking" if kind == "reasoning" else "text"} | empty)
                self._kind = kind
            delta = {"type": "thinking_delta", "thinking": text} if kind == "reasoning" else None
            yield self._delta(delta or {"type": "text_delta", "text": text})

    def whole(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a call of a tool."""
        yield self._start(_use(call) | {"input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
        yield {"type": "content_block_stop", "index": self._index}

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the open block, if there is one."""
        if self._kind is not None:
            self._kind = None
            yield {"type": "content_block_stop", "index": self._index}

    def _start(self, block: Block) -> dict[str, Any]:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _use(call: dict[str, Any]) -> Block:
    function = call["function"]
    name = f"toolu_{call['id'].removeprefix('call_')}"
    return {"type": "tool_use", "id": name, "name": function["name"], "input": json.loads(function["arguments"])}


@router.post("/messages", response_model=None)
async def create_message(
    incoming: IncomingDependency, request: Annotated[MessagesRequest, json_body(MessagesRequest)]
) -> Response:
    """Answer a chat."""
    chat = request.chat()

    def make(model: NamedModel, tokenizer: Tokenizer, longest: int, call: Call | None) -> Message:
        return Message(chat, model, tokenizer, longest, call)

    return await respond(incoming, chat, make)


@router.post("/messages/count_tokens")
async def count_tokens(
    service: ServiceDependency,
    caller: CallerDependency,
    body: BodyDependency,
    request: Annotated[CountRequest, json_body(CountRequest)],
) -> JSONResponse:
    """Return the number of tokens of a chat."""
    chat = request.chat()
    await service.wait_until_ready()
    await find_model(service, caller, chat.model)
    tokenizer = await service.tokenizer()

    def count() -> int:
        return len(tokenizer.encode(Conversation.of(tokenizer, chat).render()))

    number = await service.decode_pool.run(caller.sharer, len(body.data), count)
    return JSONResponse({"input_tokens": number})
