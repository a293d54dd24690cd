"""Grade-school arithmetic in words: one answer, scored by the number after `####`.

Differences from skyrl-gym 0.4.0: the gold answer may be a number, and may hold thousands separators.
"""

import re
from collections.abc import Mapping
from typing import Any

from skyrl.envs.env import ENVS, Env, NoSettings, StepResult

ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def extract_answer(text: str) -> str | None:
    """The number after the *first* `#### `, without thousands separators; None if there is none.

    That the first one counts keeps a model from trying several.
    """
    found = ANSWER.search(text)
    return found.group(1).replace(",", "") if found else None


def is_correct(text: str, ground_truth: object) -> bool:
    """Whether the answer in `text` is, character by character, the gold one."""
    answer = extract_answer(text)
    return answer is not None and answer == str(ground_truth).replace(",", "").strip()


@ENVS.register("gsm8k")
class GSM8kEnv(Env[NoSettings]):
    """One turn; 1 for the right number after `####`, else 0. Needs `reward_spec.ground_truth`."""

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.ground_truth = self.column("reward_spec.ground_truth")

    async def step(self, action: str) -> StepResult:
        return StepResult([], float(is_correct(action, self.ground_truth)), done=True)
