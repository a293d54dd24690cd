"""Grade-school math word problems: one answer, scored by the number after `####`.

Differences from skyrl-gym 0.4.0: numbers are compared by value, ignoring marks around them, so `#### $42.00.` is 42 and
`#### 42abc` is not; the gold answer may be a number; a gold answer that is not a number never matches.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.env import ENVS, Env, StepResult
from skyrl.envs.tasks.answers import begins_number, last_number, number_at

_MARK = re.compile(r"####[ \t]++")


@dataclass
class GSM8kConfig(BaseConfig):
    """Settings of `gsm8k`."""

    method: Literal["strict", "flexible"] = "strict"
    """Number that counts as the answer: the one after the first `####` ("strict"), or the text's last one
    ("flexible")."""


def extract_answer(text: str) -> Fraction | None:
    """Return the number after the *first* `#### ` that is followed by a number; None if there is none.

    The first one counts, so a model cannot try several answers.
    """
    for mark in _MARK.finditer(text):
        if begins_number(text, mark.end()):
            return number_at(text, mark.end())
    return None


def is_correct(text: str, ground_truth: object, method: Literal["strict", "flexible"] = "strict") -> bool:
    """Return True if the answer in `text` equals the gold number."""
    answer = extract_answer(text) if method == "strict" else last_number(text)
    return answer is not None and answer == number_at(str(ground_truth), 0)


@ENVS.register("gsm8k")
class GSM8kEnv(Env[GSM8kConfig]):
    """One turn; reward 1 for the correct number after `####`, else 0. Needs `reward_spec.ground_truth`."""

    Config = GSM8kConfig

    def __init__(self, config: GSM8kConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.ground_truth = self.column("reward_spec.ground_truth")

    async def step(self, action: str) -> StepResult:
        return StepResult([], float(is_correct(action, self.ground_truth, self.config.method)), done=True)
