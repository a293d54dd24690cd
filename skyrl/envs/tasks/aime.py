"""Competition mathematics: a final line `Answer: ...` or a box, compared after normalization.

Differences from skyrl-gym 0.4.0: the gold answer may be a number, and may be in `reward_spec` as for other
environments; `\\boxed{42}` alone is an answer; emphasis marks and a final period are not part of an answer; numbers are
compared by value (`025` is 25, `4,2` is not 42); `41=42` is not an answer; an empty gold answer never matches.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.env import ENVS, Env, StepResult
from skyrl.envs.tasks.answers import last_boxed, same_answer

SEARCHED = 300
"""Number of characters at the end of a solution in which the answer is searched."""
_ANSWER = re.compile(r"answer[\s*_]*:(?:[\s*_`]|(?:\$\$|\\\[)\s*(?=\n))*([^\n<]+)", re.IGNORECASE)

_AFTER = re.compile(r"[*_`.]+(?=\s*\Z)")
"""Marks that may follow an answer on its line."""


@dataclass
class AIMEConfig(BaseConfig):
    """Settings of `aime`."""

    wrong_reward: float = -1.0
    """Reward of a wrong answer. With 0, the mean reward equals the accuracy, which is also a metric."""


def extract_answer(solution: str) -> str | None:
    """Return the answer near the end of the solution: the text after the last `Answer:` or in the last box.

    If both exist, the later one counts. None if neither exists.
    """
    end = solution[-SEARCHED:]
    lines, box = list(_ANSWER.finditer(end)), last_boxed(end)
    if box and (not lines or box[0] > lines[-1].start()):
        return box[1]
    return _AFTER.sub("", lines[-1][1].lstrip(" \t*_`")) if lines else None


def is_correct(solution: str, ground_truth: object) -> bool:
    """Return True if the answer of the solution equals the gold answer."""
    answer = extract_answer(solution)
    return answer is not None and same_answer(ground_truth, answer)


@ENVS.register("aime")
class AIMEEnv(Env[AIMEConfig]):
    """One turn; reward 1 for the correct answer, else `wrong_reward`. The metric `acc` is the accuracy.

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
