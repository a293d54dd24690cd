"""Sums and differences of two integers: the smallest environment in which a model can learn.

The prompt is "17+25=" and the answer is exactly "42", so a tokenizer of digits and signs is sufficient.
`arithmetic_data.py` writes the rows.
"""

from collections.abc import Mapping
from typing import Any

from skyrl.envs.env import ENVS, Env, NoSettings, StepResult


@ENVS.register("arithmetic")
class ArithmeticEnv(Env[NoSettings]):
    """One turn; reward 1 if it is exactly the gold answer, else 0. Needs a nonempty `reward_spec.ground_truth`."""

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.answer = str(self.column("reward_spec.ground_truth"))

    async def step(self, action: str) -> StepResult:
        return StepResult([], float(bool(self.answer) and action.strip() == self.answer), done=True)
