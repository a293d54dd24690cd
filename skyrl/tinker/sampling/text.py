"""Text of sampled tokens: stop tokens and stop strings are cut off, and special tokens are left out."""

import codecs
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from skyrl.types import SamplingParams
from skyrl.utils.tokenizer import Tokenizer


class SampledText:
    """Text of one sequence, as its tokens arrive.

    Args:
        tokenizer: The model's tokenizer.
        params: Parameters of the request.
        stop_token_ids: Further tokens that end the sequence.
        skip_special: True to leave special tokens out.
        kept: Special tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stop_token_ids: Iterable[int] = (),
        skip_special: bool = True,
        kept: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(kept) if skip_special else frozenset[int]()
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        self._stops = [item.encode() for item in stop if isinstance(item, str)]
        self._ends = frozenset(stop_token_ids) | (frozenset() if params.stop == [] else tokenizer.eos_ids)
        self._held = max((len(one) for one in self._stops), default=1) - 1
        """Bytes at the end that may be the beginning of a stop string, and are not in the text yet."""
        self._bytes = b""
        """Text that is held back."""
        self._last = 0
        """Number of bytes at its end that are of the last token. A stop string ends in it, or it ended no sequence."""
        self.stop: str | None = None
        """Stop string that has ended the text, once `end` was called."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text that these tokens add for certain."""
        pieces = [b"" if token in self._ends else self.bytes_of(token) for token in map(int, tokens)]
        self._bytes += b"".join(pieces)
        self._last = len(pieces[-1]) if pieces else self._last
        at = self._first_stop()
        cut = max(0, len(self._bytes) - max(self._held, 0))
        cut = cut if at is None else min(cut, at)
        text, self._bytes = self._bytes[:cut], self._bytes[cut:]
        return self._decoder.decode(text)

    def end(self, stopped: bool) -> str:
        """Return the rest of the text. `stopped`: a stop token or string has ended the sequence."""
        at = self._first_stop() if stopped else None
        if at is not None:
            self.stop = next(stop for stop in self._stops if self._bytes.startswith(stop, at)).decode()
        return self._decoder.decode(self._bytes if at is None else self._bytes[:at], final=True)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in the text."""
        return b"" if token in self._skipped else self._tokenizer.token_bytes(token)

    def _first_stop(self) -> int | None:
        """Return where the first stop string begins that ends in the last token; None if there is none."""
        least = len(self._bytes) - self._last
        found = [at for stop in self._stops if (at := self._bytes.find(stop, max(0, least - len(stop) + 1))) >= 0]
        return min(found, default=None) if self._last else None


def token_text(tokenizer: Tokenizer, token: int, as_id: bool = False) -> str:
    """Return the text of one token. Bytes that are no text by themselves are spelled as OpenAI does, bytes:\\xNN.

    Tokens without text, and all tokens with `as_id`, are spelled token_id:N, as vLLM does.
    """
    spelled = tokenizer.token_bytes(token)
    if as_id or not spelled:
        return f"token_id:{token}"
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
