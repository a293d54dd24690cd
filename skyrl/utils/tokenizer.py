"""Text of a model's tokens: end-of-sequence ids, decoding, and detection of stop strings.

Every token is a fixed byte string, independent of its neighbors: byte-level BPE spells bytes as printable characters,
SentencePiece spells spaces as U+2581 and single bytes as `<0xNN>`. Stop strings are therefore searched in bytes.
Characters split over several tokens need no special handling, and a token costs time in proportion to its bytes.
"""

import json
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from skyrl.errors import StorageError
from skyrl.utils.chat_template import ChatTemplate, text_after_answer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Tokenizer of a model folder (`tokenizer.json`), with the ids that end sequences.

    Raises `StorageError` if the folder has no readable `tokenizer.json`.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StorageError(f"{path}: no readable tokenizer ({error})") from error
        decoder = self._tokenizer.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, added in self._added.items() if added.special)
        """Ids of special tokens, such as those around turns, which are no part of a text."""
        self._bytes: dict[int, bytes] = {}
        config = _json(folder / "tokenizer_config.json")
        self._folder, self._config = folder, config
        self._named_ids = _named_ids(folder, _id_of(self._tokenizer, config.get("eos_token")))
        self.end_of_turn = self._first_added(text_after_answer(folder, config))
        """Special token that the chat template puts after an answer; None if there is no template or no such token."""
        self.eos_ids = frozenset().union(*self._named_ids.values(), self._of_template)
        """Ids that end a sequence: those named by files of the folder, and `end_of_turn`. May be empty."""

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The folder's chat template; None if it has none. Raises `TemplateError` for one that is invalid."""
        return ChatTemplate.of(self._folder, self._config)

    @property
    def disagreement(self) -> str | None:
        """One-line warning if the file with end-of-sequence ids lacks the template's end-of-turn token, or None."""
        name, ids = next(iter(self._named_ids.items()), ("", self._of_template))
        if self._of_template <= ids:
            return None
        return (
            f"the chat template ends a turn with {self._spelled(self._of_template)}, but {name} names "
            f"{self._spelled(ids)} as the end; sampling stops at both, and other programs may not: list both as "
            "eos_token_id in generation_config.json"
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`. Special tokens spelled in `text` are recognised.

        `add_special_tokens`: add those that the tokenizer puts around a text, such as a beginning-of-sequence token.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` with special tokens spelled out. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for an unknown id."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    @property
    def _of_template(self) -> frozenset[int]:
        return frozenset() if self.end_of_turn is None else frozenset([self.end_of_turn])

    def _first_added(self, text: str | None) -> int | None:
        """Return the first token of a text if it is an added token, or None."""
        first = self.encode(text)[:1] if text else []
        return first[0] if first and first[0] in self._added else None

    def _spelled(self, ids: Iterable[int]) -> str:
        return " and ".join(f"{self.decode([token])!r} ({token})" for token in sorted(ids))

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()


class StopStrings:
    """Detects any of `strings` in the text of tokens that are pushed one by one."""

    def __init__(self, tokenizer: Tokenizer, strings: Iterable[str]):
        self._tokenizer = tokenizer
        self._stops = [string.encode() for string in strings]
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""

    def push(self, token: int) -> bool:
        """Return True if this token completes a stop string."""
        text = self._tail + self._tokenizer.token_bytes(token)
        self._tail = text[-self._keep :] if self._keep else b""
        return any(stop in text for stop in self._stops)


def named_ends(model: str) -> frozenset[int]:
    """Return the end-of-sequence ids in generation_config.json or, if it has none, in config.json.

    `model` is a folder, or the id of a hub model. Of a hub model, only files in the hub's local cache are read.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not model:
        return frozenset()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        try:
            found = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return frozenset()
        folder = Path(found).parent if isinstance(found, str) else folder
    return frozenset().union(*_named_ids(folder, None).values())


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return the inverse of GPT-2's byte-level spelling: printable bytes map to themselves, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _named_ids(folder: Path, token: int | None) -> dict[str, frozenset[int]]:
    """Return end-of-sequence ids by file name.

    They come from generation_config.json or, if it has none, from config.json. `token` is tokenizer_config.json's.
    """
    named: dict[str, frozenset[int]] = {}
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        if ids is not None:
            named[name] = frozenset([ids] if isinstance(ids, int) else ids)
            break
    return named if token is None else named | {"tokenizer_config.json": frozenset([token])}


def _id_of(tokenizer: tokenizers.Tokenizer, token: Any) -> int | None:
    """Return the id of a token from tokenizer_config.json: text, or a mapping with `content`. None if unknown."""
    token = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"{path}: not valid JSON ({error})") from error
