"""One answer, worth nothing: for on-policy distillation, where all there is to learn is what a teacher would say."""

from skyrl.envs.env import ENVS, Env, NoSettings, StepResult


@ENVS.register("no_reward")
class NoRewardEnv(Env[NoSettings]):
    """One turn; 0 for any answer. Needs no columns."""

    async def step(self, action: str) -> StepResult:
        return StepResult([], 0.0, done=True)
