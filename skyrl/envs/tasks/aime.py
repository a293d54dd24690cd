"""Competition mathematics: a final line `Answer: ...` or a box, compared after a normalisation of how it is written.

Differences from skyrl-gym 0.4.0: the gold answer may be a number, and may be in `reward_spec` as everywhere else;
`\\boxed{42}` alone is an answer; marks of emphasis and a final point are no part of one; numbers are compared as such
(`025` is 25, `4,2` is not 42); of `41=42` nothing is taken; an empty gold answer is never matched.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl.envs.env import ENVS, Env, StepResult
from skyrl.envs.tasks.answers import last_boxed, same_answer
from skyrl.train.config.machinery.base import BaseConfig

SEARCHED = 300
"""Characters at the end of a solution in which the answer is looked for."""
_ANSWER = re.compile(r"answer[\s*_]*:(?:[\s*_`]|(?:\$\$|\\\[)\s*(?=\n))*([^\n<]+)", re.IGNORECASE)

_AFTER = re.compile(r"[*_`.]+(?=\s*\Z)")
"""Marks that may follow an answer on its line."""


@dataclass
class AIMEConfig(BaseConfig):
    """Settings of `aime`."""

    wrong_reward: float = -1.0
    """Reward of a wrong answer. 0 makes the average reward the accuracy, which is a metric in any case."""


def extract_answer(solution: str) -> str | None:
    """Text after the last `Answer:` near the end of the solution, or in the last box there if that comes later."""
    end = solution[-SEARCHED:]
    lines, box = list(_ANSWER.finditer(end)), last_boxed(end)
    if box and (not lines or box[0] > lines[-1].start()):
        return box[1]
    return _AFTER.sub("", lines[-1][1].lstrip(" \t*_`")) if lines else None


def is_correct(solution: str, ground_truth: object) -> bool:
    """Return True if the answer of the solution is the gold one."""
    answer = extract_answer(solution)
    return answer is not None and same_answer(ground_truth, answer)


@ENVS.register("aime")
class AIMEEnv(Env[AIMEConfig]):
    """One turn; 1 for the right answer, else `wrong_reward`, with the accuracy as the metric `acc`.

    Needs `reward_spec.ground_truth` or `reward_model.ground_truth`.
    """

    Config = AIMEConfig

    def __init__(self, config: AIMEConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.ground_truth = self.column("reward_spec.ground_truth", "reward_model.ground_truth")
        self.correct = False

    async def step(self, action: str) -> StepResult:
        self.correct = is_correct(action, self.ground_truth)
        reward = 1.0 if self.correct else self.config.wrong_reward
        return StepResult([], reward, done=True, metrics={"acc": float(self.correct)})

    def metrics(self) -> dict[str, float]:
        return {"acc": float(self.correct)}
