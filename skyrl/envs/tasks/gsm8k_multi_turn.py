"""Grade-school math word problems over several turns, with a small reward for wrong answers in the right format."""

from collections.abc import Mapping
from typing import Any

from skyrl.envs.env import ENVS, Env, NoSettings, StepResult
from skyrl.envs.tasks.gsm8k import extract_answer, is_correct

FORMAT_REWARD = 0.2
"""Maximum reward of an episode for the format alone. It is split equally over the allowed turns."""

ONCE_MORE = "Reason step by step, and end with a tentative numeric answer in the exact form '#### ANSWER'."
LAST_TURN = "Give nothing but your final numeric answer now, in the exact form '#### ANSWER'."


@ENVS.register("gsm8k_multi_turn")
class GSM8kMultiTurnEnv(Env[NoSettings]):
    """Up to `max_turns` turns (default 5), until the answer is correct. Needs `reward_spec.ground_truth`."""

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.ground_truth = self.column("reward_spec.ground_truth")
        self.max_turns = self.turn_limit(5)
        self.turns = 0

    async def step(self, action: str) -> StepResult:
        self.turns += 1
        left = self.max_turns - self.turns
        if is_correct(action, self.ground_truth):
            return StepResult([], 1.0, done=True)
        reward = FORMAT_REWARD / self.max_turns if extract_answer(action) is not None else 0.0
        if left <= 0:
            return StepResult([], reward, done=True)
        return StepResult([{"role": "user", "content": ONCE_MORE if left > 1 else LAST_TURN}], reward, done=False)

    def metrics(self) -> dict[str, float]:
        return {"steps": float(self.turns)}
