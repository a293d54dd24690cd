"""Models, and the completions route: texts or tokens in, texts and tokens out."""

import codecs
from collections import defaultdict
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from skyrl.backends.operations import Progress
from skyrl.errors import RequestError
from skyrl.tinker.http.openai.answers import Answer, Choice, IncomingDependency, plan_tokens, respond
from skyrl.tinker.http.openai.dialect import OpenAIRoute
from skyrl.tinker.http.openai.schemas import CompletionRequest
from skyrl.tinker.http.routes.dependencies import CallerDependency, ServiceDependency, json_body
from skyrl.tinker.sampling.capture_store import Call
from skyrl.tinker.sampling.drawing import Draw
from skyrl.tinker.sampling.models import NamedModel, find_model
from skyrl.tinker.sampling.text import SampledText, token_text
from skyrl.types import GeneratedSequence, SampleOutput, TokenTable
from skyrl.utils.tokenizer import Tokenizer

router = APIRouter(route_class=OpenAIRoute)

MAX_TOKENS = 16
"""Maximum tokens of a completion that names no `max_tokens`, as OpenAI documents it."""


@router.get("/models")
async def list_models(service: ServiceDependency, _: CallerDependency) -> JSONResponse:
    """The base model and its aliases. Checkpoints are models, too, by their paths."""
    info = await service.wait_until_ready()
    data = [_card(name, info.max_context_length, service.started_at) for name in service.served_names()]
    return JSONResponse({"object": "list", "data": data})


@router.get("/models/{name:path}")
async def get_model(name: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """A model by its name."""
    info = await service.wait_until_ready()
    model = await find_model(service, caller, name)
    created = service.started_at if model.checkpoint is None else model.checkpoint.created_at
    return JSONResponse(_card(name, info.max_context_length, created))


def _card(name: str, longest: int, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "skyrl", "max_model_len": longest}


class Completion(Answer):
    """A request for completions and its answers."""

    PREFIX = "cmpl"
    OBJECTS = "text_completion", "text_completion"
    request: CompletionRequest

    def draw(self, prompt: np.ndarray) -> Draw:
        request = self.request
        if request.best_of not in (None, self.count):
            raise RequestError(f"best_of={request.best_of}: only n={self.count} is served; leave it out")
        if request.max_tokens == 0 and self.call is not None:
            raise RequestError("max_tokens=0: scores a prompt, which no captured session keeps; leave the session out")
        if request.max_tokens == 0 and not request.echo:
            raise RequestError("max_tokens=0: only with echo=true, to score a prompt; send 1 or more")
        most = min(MAX_TOKENS, self.longest - len(prompt)) if request.max_tokens is None else request.max_tokens
        params = request.sampling(max(1, most))  # one token is sampled even if none is wanted
        scored = request.logprobs if request.echo else None
        return Draw(
            prompt,
            params,
            request.options(),
            self.count,
            request.logprobs or 0,
            request.prompt_cache_key,
            prompt_alternatives=scored,
        )

    def choice(self, index: int, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence) -> Choice:
        request = self.request
        kept = slice(None if request.max_tokens != 0 else 0)
        text = self.said(sequence) if request.max_tokens != 0 else ""
        choice: Choice = {
            "index": index,
            "text": self._echoed(prompt) + text,
            "logprobs": self._logprobs(prompt, output, sequence, kept),
            "finish_reason": sequence.stop_reason if request.max_tokens != 0 else "length",
        }
        if request.return_token_ids:
            choice |= {"prompt_token_ids": prompt.tolist(), "token_ids": sequence.tokens[kept].tolist()}
        return choice

    def piece(self, index: int, text: str, report: Progress) -> Choice:
        choice: Choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self.request.logprobs is not None:
            choice["logprobs"] = self._listed((report.tokens, report.logprobs, None), place=self._places[index])
        if self.request.return_token_ids:
            choice["token_ids"] = report.tokens.tolist()
        return choice

    def last(
        self, index: int, text: str, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence
    ) -> Choice:
        if not self.in_pieces:
            return self.choice(index, prompt, output, sequence)
        choice: Choice = {"index": index, "text": text, "logprobs": None, "finish_reason": sequence.stop_reason}
        if self.request.return_token_ids:
            choice |= {"prompt_token_ids": prompt.tolist(), "token_ids": []}
        return choice

    @property
    def in_pieces(self) -> bool:
        return not (self.request.logprobs or self.request.echo)

    def counted(self, sequence: GeneratedSequence) -> int:
        return 0 if self.request.max_tokens == 0 else len(sequence.tokens)

    def _echoed(self, prompt: np.ndarray) -> str:
        if not self.request.echo:
            return ""
        skipped = self.tokenizer.special_ids if self.request.skip_special_tokens else ()
        return self.tokenizer.decode(token for token in prompt.tolist() if token not in skipped)

    def _logprobs(
        self, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence, kept: slice
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice; None unless they are wanted."""
        if self.request.logprobs is None:
            return None
        likely = sequence.topk_logprobs
        top = None if likely is None else (likely[0][kept], likely[1][kept])
        parts = [(sequence.tokens[kept], sequence.logprobs[kept], top)]
        if self.request.echo:
            assert output.prompt_logprobs is not None
            parts.insert(0, (prompt, output.prompt_logprobs, output.topk_prompt_logprobs))
        return self._listed(*parts)

    def _listed(
        self, *parts: tuple[np.ndarray, np.ndarray, TokenTable | None], place: "_Place | None" = None
    ) -> dict[str, Any]:
        """Return lists of tokens, log-probabilities (None for NaN), most likely tokens and places in the text."""
        texts: list[str] = []
        values: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        place_in_text = place or _Place()
        for tokens, logprobs, likely in parts:
            for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
                known = logprob == logprob
                texts.append(self._text(token))
                values.append(logprob if known else None)
                offsets.append(place_in_text.after(self._shown.bytes_of(token)))
                top.append(None if likely is None or not known else self._likely(likely, row) | {texts[-1]: logprob})
        wanted = top if self.request.logprobs else None
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": wanted, "text_offset": offsets}

    @cached_property
    def _shown(self) -> SampledText:
        return self.text()

    @cached_property
    def _places(self) -> defaultdict[int, "_Place"]:
        """Places of the next tokens in the texts of a stream's choices."""
        return defaultdict(_Place)

    def _likely(self, table: TokenTable, place: int) -> dict[str, float]:
        return dict(zip(map(self._text, table[0][place].tolist()), table[1][place].tolist(), strict=True))

    def _text(self, token: int) -> str:
        return token_text(self.tokenizer, token, self.request.return_tokens_as_token_ids)


class _Place:
    """Place in a text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def after(self, token: bytes) -> int:
        """Return where a token begins, and go to its end."""
        begin = self._characters
        self._characters += len(self._decoder.decode(token))
        return begin


@router.post("/completions", response_model=None)
async def create_completion(
    incoming: IncomingDependency, request: Annotated[CompletionRequest, json_body(CompletionRequest)]
) -> Response:
    """Continue texts or tokens."""

    def make(model: NamedModel, tokenizer: Tokenizer, longest: int, call: Call | None) -> Completion:
        prompts = _encoded(tokenizer, request)
        plan_tokens(call, prompts)
        return Completion(request, model, tokenizer, prompts, longest, call)

    return await respond(incoming, request, make)


def _encoded(tokenizer: Tokenizer, request: CompletionRequest) -> list[np.ndarray]:
    def tokens(prompt: str | np.ndarray) -> np.ndarray:
        if isinstance(prompt, np.ndarray):
            return prompt
        return np.asarray(tokenizer.encode(prompt, request.add_special_tokens), np.int32)

    return [tokens(prompt) for prompt in request.prompts()]
