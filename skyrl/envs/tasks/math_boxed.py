"""Mathematics with the answer in a box: the last `\\boxed{...}`, compared with the gold answer.

Two answers are equal if they are equal as normalized texts or as numbers (`answers.py`). With `comparison=math-verify`,
answers that are not equal in this way are compared by the math-verify library, so `2^{10}` equals 1024. Its algebra may
take seconds or forever (`9^{9^{9^9}}`), so it runs in a process with limits, like model-written code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.env import ENVS, Env, EnvError, StepResult
from skyrl.envs.tasks.answers import LONGEST, exact_number, last_boxed, normalize, same_answer
from skyrl.errors import ConfigError
from skyrl.utils.sandbox.run import Isolation, Limits, run_code

_VERIFY = """
from math_verify import parse, verify

def same(gold, said):
    gold, said = (parse(text, parsing_timeout=None) for text in (gold, said))
    return verify(gold, said, timeout_seconds=None)
"""


@dataclass
class MathConfig(BaseConfig):
    """Settings of `math`."""

    comparison: Literal["text", "math-verify"] = "text"
    """Comparison of two answers. "math-verify" needs `pip install 'skyrl[math]'`."""

    timeout: PositiveFloat = 5.0
    """CPU time limit of math-verify, in seconds. An answer that exceeds it is wrong."""

    memory_mb: PositiveInt = 2048
    """Address space limit of math-verify, in MiB."""

    isolation: Isolation = "full"
    """Isolation of math-verify; see `skyrl/utils/sandbox/run.py` before setting "limited"."""


@ENVS.register("math")
class MathEnv(Env[MathConfig]):
    """One turn; reward 1 for the correct answer in the last box, else 0. The metric `boxed` is 1 if there is a box.

    Needs `reward_spec.ground_truth` or `reward_model.ground_truth`. Raises EnvError if math-verify cannot be run.
    """

    Config = MathConfig

    def __init__(self, config: MathConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.ground_truth = str(self.column("reward_spec.ground_truth", "reward_model.ground_truth"))
        if config.comparison == "math-verify" and find_spec("math_verify") is None:
            raise ConfigError(
                "comparison=math-verify: it is not installed; pip install 'skyrl[math]', or set comparison=text"
            )

    async def step(self, action: str) -> StepResult:
        box = last_boxed(action)
        right = box is not None and await self._is_correct(box[1])
        return StepResult([], float(right), done=True, metrics={"boxed": float(box is not None)})

    async def _is_correct(self, said: str) -> bool:
        if same_answer(self.ground_truth, said):
            return True
        if self.config.comparison == "text" or len(said) > LONGEST or not normalize(self.ground_truth):
            return False
        numbers = [exact_number(normalize(text)) for text in (self.ground_truth, said)]
        return None in numbers and await self._verified(said)

    async def _verified(self, said: str) -> bool:
        case = {"arguments": [f"\\boxed{{{text}}}" for text in (self.ground_truth, said)]}
        limits = Limits(cpu_s=self.config.timeout, memory_mb=self.config.memory_mb)
        async with self.workers.process():
            (outcome,) = await run_code(
                _VERIFY, [case], function="same", limits=limits, isolation=self.config.isolation
            )
        if outcome.status == "error":
            raise EnvError(f"math-verify cannot be run: {outcome.stderr[-500:]}")
        return outcome.value == "true"
