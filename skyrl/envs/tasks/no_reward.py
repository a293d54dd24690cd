"""Environment without rewards, for on-policy distillation, where the only signal comes from a teacher."""

from skyrl.envs.env import ENVS, Env, NoSettings, StepResult


@ENVS.register("no_reward")
class NoRewardEnv(Env[NoSettings]):
    """One turn; reward 0 for any answer. Needs no columns."""

    async def step(self, action: str) -> StepResult:
        return StepResult([], 0.0, done=True)
