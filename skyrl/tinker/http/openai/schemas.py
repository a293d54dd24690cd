"""Requests in OpenAI's form. Parameters that OpenAI does not have carry vLLM's names."""

from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skyrl.algorithms.checks.requests import MAX_NUM_SAMPLES
from skyrl.errors import RequestError
from skyrl.tinker.wire.parsing import describe_faults
from skyrl.types import SamplingOptions, SamplingParams

MOST_PROMPTS = 1024
MOST_ALTERNATIVES = 20
Token = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    """Send the usage in a last event without choices."""


class SampledRequest(BaseModel):
    """Parameters that all requests for samples have. Unknown ones are rejected."""

    model_config = ConfigDict(extra="forbid")
    UNSERVED: ClassVar[dict[str, str]] = {
        "logit_bias": "is not served; leave it out",
        "service_tier": "is not served, as all requests share this server fairly; leave it out",
    }
    """Parameters that are known but not served, with the reason."""
    HARMLESS: ClassVar[tuple[Any, ...]] = (None, {}, [], False, "auto", "default")
    """Values of these parameters that ask for nothing."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=MAX_NUM_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Name of the client's own user. Nothing here depends on it, nor on the next two."""
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    """Requests with equal keys go to the same engine, if there are several, as its cache may have their prefix."""
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, value: Any) -> Any:
        for name, reason in cls.UNSERVED.items():
            if isinstance(value, dict) and value.get(name) not in cls.HARMLESS:
                raise RequestError(f"{name}={value[name]!r}: {reason}")
        if isinstance(value, dict):
            return {name: child for name, child in value.items() if name not in cls.UNSERVED}
        return value

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """Return the parameters that the Tinker API has, too. None as `max_tokens`: to the end of the context."""
        stop: str | list[str] | None = self.stop or None
        if self.ignore_eos:
            if stop is not None:
                raise RequestError(
                    "ignore_eos=true with stop: a text with stop strings ends at EOS, too; leave one of them out"
                )
            stop = []
        return SamplingParams(
            max_tokens=max_tokens,
            seed=None if self.seed is None else self.seed % 2**63,
            stop=stop,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
        )

    def options(self) -> SamplingOptions:
        """Return the other sampling options."""
        given = {name: getattr(self, name, None) for name in SamplingOptions.__dataclass_fields__}
        given["stop_token_ids"] = tuple(self.stop_token_ids) if self.stop_token_ids else None
        return SamplingOptions(**{name: value for name, value in given.items() if value is not None})

    def usage_in_stream(self) -> bool:
        """Return True if a stream ends with the usage."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                f"stream_options={self.stream_options.model_dump()} is for streams; send stream=true, or leave it out"
            )
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SampledRequest):
    """Request of /v1/completions."""

    UNSERVED = SampledRequest.UNSERVED | {
        "suffix": "is not served, as models here continue a text and fill no gaps; leave it out",
    }

    prompt: str | list[str] | list[Token] | list[list[Token]] = Field(union_mode="left_to_right")
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    add_special_tokens: bool = True

    def prompts(self) -> list[str | np.ndarray]:
        """Return the prompts, as texts or int32 tokens. Raises `RequestError` for none, or too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt is empty; send a text or tokens")
        if isinstance(prompt[0], int):
            return [np.asarray(prompt, np.int32)]
        if len(prompt) > MOST_PROMPTS:
            raise RequestError(f"prompt has {len(prompt)} texts; send at most {MOST_PROMPTS} in one request")
        return [one if isinstance(one, str) else np.asarray(one, np.int32) for one in prompt]


class ChatRequest(SampledRequest):
    """Request of /v1/chat/completions."""

    UNSERVED = SampledRequest.UNSERVED | {
        "functions": "is OpenAI's old name; send tools",
        "function_call": "is OpenAI's old name; send tool_choice",
        "audio": "is not served: models here write text; leave it out",
        "prediction": "is not served; leave it out",
        "web_search_options": "is not served; leave it out",
        "store": "is not served: answers are not stored; leave it out",
        "verbosity": "is not served; leave it out",
        "guided_json": "is not served; leave it out",
        "guided_regex": "is not served; leave it out",
        "guided_choice": "is not served; leave it out",
        "guided_grammar": "is not served; leave it out",
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens; None: up to the end of the context. Raises `RequestError` for two numbers."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise RequestError(
                f"max_tokens={self.max_tokens} is another number than max_completion_tokens="
                f"{self.max_completion_tokens}; send one of them"
            )
        if 0 in given:
            raise RequestError("max_tokens=0: an answer has at least one token; send 1 or more")
        return next(iter(given), None)

    @property
    def given_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call. Raises `RequestError` for a choice that is not served."""
        choice = self.tool_choice
        if choice not in (None, "auto", "none"):
            raise RequestError(
                f"tool_choice={choice!r}: only auto and none are served, as nothing here forces a model to call; leave "
                "it out"
            )
        return [] if choice == "none" else self.tools or []

    def check_form(self) -> None:
        """Raise `RequestError` for a form of the answer that is not served."""
        if self.response_format is not None and self.response_format != {"type": "text"}:
            raise RequestError(
                f"response_format={self.response_format!r}: only {{'type': 'text'}} is served; leave it out"
            )
        if self.modalities not in (None, ["text"]):
            raise RequestError(f"modalities={self.modalities!r}: only ['text'] is served; leave it out")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(f"top_logprobs={self.top_logprobs} needs logprobs=true; send both")


def chat_request(given: dict[str, Any]) -> ChatRequest:
    """Return a request of another API as one of the chat route. Raises `RequestError`."""
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise RequestError(describe_faults(error)) from error


class GenerateRequest(SampledRequest):
    """Request of /inference/v1/generate. Parameters of sampling are in `sampling_params`."""

    UNSERVED = SampledRequest.UNSERVED | {
        "features": "is not served: models here read text; leave it out",
        "content_parts": "is not served; send token_ids",
    }

    token_ids: list[Token]
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    cache_salt: str | None = None
    """Nothing depends on it: a cached prefix is never used for another tenant or other weights."""
    priority: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(given := value.get("sampling_params"), dict):
            rest = {name: child for name, child in value.items() if name != "sampling_params"}
            if twice := rest.keys() & given.keys():
                raise RequestError(f"sampling_params.{min(twice)}: is given beside sampling_params, too; send it once")
            return rest | given
        return value
