"""A task that a tiny model with random weights learns in seconds, and only by reading what it is told.

A word is three characters of one kind: small letters, capitals or signs. The model is to answer in characters of the
word's kind. An answer that does not depend on the word is right for a third of them.
"""

import json
import math
import random
import string
from pathlib import Path
from typing import Any

from skyrl.envs.env import Env, Message, NoSettings, StepResult
from skyrl.tx.synthetic.make_model import make_model

KINDS = {"small": string.ascii_lowercase, "capital": string.ascii_uppercase, "sign": string.punctuation}
WORTH = {"small": 1.0, "capital": 0.75, "sign": 0.5}
LESSONS = {"small": "0123", "capital": "4567", "sign": "wxyz"}
ENTROPY = math.log(4) / 2
"""Nats per token of an answer of `lesson_rows`: one of four characters, as likely each, and the end."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if m.role == 'assistant' else '=' }}{% endfor %}"


def make_pupil(folder: Path, seed: int, head_dim: int = 16) -> Path:
    """A random model of 40 thousand weights, whose template renders a word and its answer as "abc=x<|im_end|>"."""
    sizes: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate": 64, "vocab": 300}
    make_model(folder, **sizes, head_dim=head_dim, seed=seed)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def words(count: int, seed: int) -> list[tuple[str, str]]:
    """Different words with their kinds, which come in turn."""
    drawn = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        kind = [*KINDS][len(found) % len(KINDS)]
        found["".join(drawn.choices(KINDS[kind][:8], k=3))] = kind
    return [*found.items()]


def task_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of one word."""
    return [{"prompt": [{"role": "user", "content": word}], "word": word} for word, _ in words(count, seed)]


def lesson_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations: a word, and one of the four answers to words of its kind."""
    drawn = random.Random(seed)
    return [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": drawn.choice(LESSONS[kind])}]}
        for word, kind in words(count, seed)
    ]


def share(text: str, word: str) -> float:
    """Of the characters of a text that are of a word's kind."""
    return sum(letter in KINDS[kind_of(word)] for letter in text) / max(len(text), 1)


def kind_of(word: str) -> str:
    return next(kind for kind, letters in KINDS.items() if word[0] in letters)


class InKind(Env[NoSettings]):
    """The reward is the share of the answer that is of the word's kind."""

    async def step(self, action: str) -> StepResult:
        return StepResult([], share(action, self.column("word")), done=True)


class Graded(Env[NoSettings]):
    """The same, times what the kind is worth: what can be won follows from the word."""

    async def step(self, action: str) -> StepResult:
        word = self.column("word")
        return StepResult([], WORTH[kind_of(word)] * share(action, word), done=True)


class Ended(Env[NoSettings]):
    """An answer ends with the first character of any kind; 1 if that is of the word's. Some answers do not end."""

    stop = tuple("".join(KINDS.values()))

    async def step(self, action: str) -> StepResult:
        return StepResult([], share(action[-1:], self.column("word")), done=True)


class Told(Env[NoSettings]):
    """Two turns, the second as `InKind`: the model learns the word only after its first, which can say anything."""

    told = False

    async def init(self, prompt: list[Message]) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    async def step(self, action: str) -> StepResult:
        word = self.column("word")
        if self.told:
            return StepResult([], share(action, word), done=True)
        self.told = True
        return StepResult([{"role": "user", "content": word}], 0.0, done=False)
