"""Sums and differences of two whole numbers: the smallest environment that a model can learn something in.

The prompt is "17+25=" and the answer "42", nothing else, so a tokenizer of digits and signs is enough. The rows come
from `arithmetic_data.py`.
"""

from collections.abc import Mapping
from typing import Any

from skyrl.envs.env import ENVS, Env, NoSettings, StepResult


@ENVS.register("arithmetic")
class ArithmeticEnv(Env[NoSettings]):
    """One turn; 1 if it is the gold answer and nothing else, else 0. Needs `reward_spec.ground_truth`, not empty."""

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.answer = str(self.column("reward_spec.ground_truth"))

    async def step(self, action: str) -> StepResult:
        return StepResult([], float(bool(self.answer) and action.strip() == self.answer), done=True)
