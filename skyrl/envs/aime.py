"""Competition mathematics: a final line `Answer: ...`, compared after a normalisation of how it is written.

Differences from skyrl-gym 0.4.0: the gold answer may be a number, and may be in `reward_spec` as everywhere else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl.envs.env import ENVS, Env, StepResult
from skyrl.train.config.base import BaseConfig

SEARCHED = 300
"""Characters at the end of a solution in which the answer is looked for."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n<]+)", re.IGNORECASE)
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", "")),
    *(("mbox", "text"), (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
"""Spellings, in this order, and what stands for them."""
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_DROPPED = (
    *_UNITS.split(),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITTEN = (
    (r"(.*?)\$(.*?)\$(.*)", r"$\2$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
    (r"\$", ""),
)


@dataclass
class AIMEConfig(BaseConfig):
    """Settings of `aime`."""

    wrong_reward: float = -1.0
    """Reward of a wrong answer. 0 makes the average reward the accuracy, which is a metric in any case."""


def normalize(answer: str) -> str:
    """The answer without units, articles and spaces, with one spelling for LaTeX.

    Source: Lewkowycz et al. 2022, https://arxiv.org/abs/2206.14858, appendix G (listing 1).
    """
    answer = answer.split("=")[-1]
    for text, spelling in _REPLACED:
        answer = answer.replace(text, spelling)
    for text in _DROPPED:
        answer = answer.replace(text, "")
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def is_correct(solution: str, ground_truth: object) -> bool:
    """Whether the last `Answer:` near the end of the solution is the gold one, both normalised."""
    answers = _ANSWER.findall(solution[-SEARCHED:])
    return bool(answers) and normalize(answers[-1]) == normalize(str(ground_truth))


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
