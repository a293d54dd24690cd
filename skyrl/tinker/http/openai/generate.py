"""The generate route of vLLM, at the server's root: tokens in, tokens out."""

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from skyrl.backends.operations import Progress
from skyrl.errors import RequestError
from skyrl.tinker.http.openai.answers import Answer, Choice, IncomingDependency, plan_tokens, respond
from skyrl.tinker.http.openai.dialect import OpenAIRoute
from skyrl.tinker.http.openai.schemas import GenerateRequest
from skyrl.tinker.http.routes.dependencies import json_body
from skyrl.tinker.sampling.capture_store import Call
from skyrl.tinker.sampling.drawing import Draw
from skyrl.tinker.sampling.models import NamedModel
from skyrl.types import GeneratedSequence, SampleOutput
from skyrl.utils.tokenizer import Tokenizer

router = APIRouter(route_class=OpenAIRoute)

PATH = "/inference/v1/generate"
MAX_TOKENS = 16
"""Maximum tokens of a request that names no `max_tokens`, as in vLLM."""


class Generation(Answer):
    """A request for tokens and its answer."""

    PREFIX = "generate"
    OBJECTS = "generate", "generate"
    request: GenerateRequest

    def draw(self, prompt: np.ndarray) -> Draw:
        request = self.request
        if request.stream:
            raise RequestError("stream=True is not served by this route; leave it out, or use /v1/completions")
        if request.priority:
            raise RequestError(f"priority={request.priority}: requests share this server fairly; leave it out")
        if request.max_tokens == 0:
            raise RequestError("max_tokens=0: send 1 or more")
        params = request.sampling(request.max_tokens or MAX_TOKENS)
        return Draw(prompt, params, request.options(), self.count, request.logprobs or 0, request.prompt_cache_key)

    def whole(self, outputs: list[SampleOutput]) -> dict[str, Any]:
        answer = super().whole(outputs)
        return {"request_id": answer["id"], **answer}

    def choice(self, index: int, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence) -> Choice:
        choice: Choice = {
            "index": index,
            "token_ids": sequence.tokens.tolist(),
            "finish_reason": sequence.stop_reason,
            "logprobs": None,
        }
        if self.request.logprobs is not None:
            content = _entries(sequence.tokens, sequence.logprobs)
            if (top := sequence.topk_logprobs) is not None:
                for place, entry in enumerate(content):
                    entry["top_logprobs"] = _entries(top[0][place], top[1][place])
            choice["logprobs"] = {"content": content}
        return choice

    def piece(self, index: int, text: str, report: Progress) -> Choice:
        raise AssertionError("there are no streams")

    def last(
        self, index: int, text: str, prompt: np.ndarray, output: SampleOutput, sequence: GeneratedSequence
    ) -> Choice:
        raise AssertionError("there are no streams")


def _entries(tokens: np.ndarray, logprobs: np.ndarray) -> list[dict[str, Any]]:
    pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]


@router.post(PATH, response_model=None)
async def generate(
    incoming: IncomingDependency, request: Annotated[GenerateRequest, json_body(GenerateRequest)]
) -> Response:
    """Continue tokens."""
    prompt = np.asarray(request.token_ids, np.int32)

    def make(model: NamedModel, tokenizer: Tokenizer, longest: int, call: Call | None) -> Generation:
        plan_tokens(call, [prompt])
        return Generation(request, model, tokenizer, [prompt], longest, call)

    return await respond(incoming, request, make)
