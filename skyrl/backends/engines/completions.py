"""Parser of a sample from vLLM's completions endpoint, as one response or as a stream of pieces."""

from typing import Any

import numpy as np

from skyrl.backends.engines.continuation import together
from skyrl.backends.engines.protocol import Draw, Drawn, EngineDown, EngineFailed
from skyrl.types import Origin, TokenTable

TOKEN = "token_id:"
"""Prefix of token ids used as keys."""


class SampleStream:
    """A sample while it is being received.

    Args:
        draw: The request.
        origin: Weights and engine of the request. In the origins of tokens, the model named by the response replaces
            the requested one.
        pieces: List to which received pieces are appended.
    """

    def __init__(self, draw: Draw, origin: Origin, pieces: list[Drawn]):
        self.origin = origin
        self._draw, self._pieces = draw, pieces
        self._reason: str | None = None
        self._cached = 0

    def read(self, chunk: Any, base: str) -> None:
        """Parse a response or a chunk of one. `base` is the base model's name on the engine.

        Raises `EngineFailed` if the engine reports an error or an abort, or omits requested fields.
        """
        name = self.origin.engine
        if "error" in chunk:
            error = chunk["error"]
            raise EngineFailed(f"{name} has failed at a sample: {error.get('message', error)}")
        details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
        self._cached = details.get("cached_tokens") or self._cached
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        self._reason = choice["finish_reason"]
        if self._reason not in (None, "stop", "length"):
            raise EngineFailed(f"{name} has given a sample up ({self._reason})")
        tokens, told = choice.get("token_ids"), choice.get("logprobs")
        if not tokens and self._reason is not None and self._pieces:
            return
        if tokens is None or told is None or len(told["token_logprobs"]) != len(tokens):
            raise EngineFailed(
                f"{name} answers without token ids and their log-probabilities; vLLM 0.20 and later has them"
            )
        model = chunk.get("model")
        self._pieces.append(
            Drawn(
                np.asarray(tokens, np.int32),
                np.asarray(told["token_logprobs"], np.float32),
                False,
                _top(told["top_logprobs"], self._draw.top) if self._draw.top else None,
                origins=(Origin(0, None if model == base else model, self.origin.base, name),),
            )
        )

    def drawn(self) -> Drawn:
        """The whole sample. Raises `EngineDown` if the stream ended early."""
        if self._reason is None or not self._pieces:
            raise EngineDown(f"{self.origin.engine} has ended a stream in the middle of a sample")
        whole = together(self._pieces)
        return Drawn(whole.tokens, whole.logprobs, self._reason == "stop", whole.top, self._cached, whole.origins)


def _top(places: list[dict[str, float]], count: int) -> TokenTable:
    """The `count` most likely tokens at each position, and their log-probabilities, `[positions, count]`.

    vLLM may report the sampled token in addition; it is left out unless it is one of the most likely tokens.
    """
    ids, logprobs = np.zeros((len(places), count), np.int32), np.zeros((len(places), count), np.float32)
    for row, place in enumerate(places):
        told = sorted((-logprob, int(token.removeprefix(TOKEN))) for token, logprob in place.items())[:count]
        ids[row], logprobs[row] = [token for _, token in told], [-logprob for logprob, _ in told]
    return ids, logprobs
