"""Single-turn environments whose reward is a function of the prompt, the response and the row's columns.

    def reward(prompt, response, ground_truth, **columns):
        return float(response.strip() == ground_truth)

Set a function as `environment.reward=module:function`, or name it as the `env_class` of a row. Several functions
form a weighted sum, `right=module:function + 0.2*module:other`. A function is called with keyword arguments for its
parameters: `prompt` (messages), `response` (text), `token_ids` (of the response), and the columns of the row. It
returns one number, or one number per token.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar

from skyrl.config.environment import RewardTerm
from skyrl.envs.env import Env, EnvError, Message, NoSettings, StepResult, number_of
from skyrl.errors import ConfigError

GIVEN = ("prompt", "response", "token_ids")
"""Arguments of a function, besides the columns of the row."""
SCORES = ("score", "reward")
"""Keys under which a result dictionary may contain the reward; verl's functions use the first."""


class Vector(list[float]):
    """Numbers of a one-dimensional array or tensor."""


class RewardFunctionEnv(Env[NoSettings]):
    """Single-turn episode whose reward is computed by a function. `rewarding` creates a class for each function."""

    name: ClassVar[str]
    function: ClassVar[Callable[..., Any]]
    parameters: ClassVar[tuple[str, ...] | None]
    """Names of the function's parameters. None: it accepts any keyword."""
    required: ClassVar[tuple[str, ...]]

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self._columns = {name: value for name, value in extras.items() if name != "max_turns"}  # not a column
        for name in self.required:
            if name not in self._columns:
                raise ConfigError(
                    f"the function takes {name}, which the row has no column of (it has "
                    f"{', '.join(sorted(self._columns)) or 'none besides the prompt'}); add the column, or give the "
                    "parameter a default"
                )

    async def init(self, prompt: list[Message]) -> list[Message]:
        self._prompt = prompt
        return prompt

    async def step(self, action: str) -> StepResult:
        given = {**self._columns, "prompt": self._prompt, "response": action, "token_ids": list(self.token_ids)}
        if self.parameters is not None:
            given = {name: value for name, value in given.items() if name in self.parameters}
        call = partial(type(self).function, **given)
        result = await call() if inspect.iscoroutinefunction(call) else await self.workers.run(call)
        if inspect.isawaitable(result):  # an object with an async __call__, or a decorated coroutine function
            result = await result
        score, metrics = self._read(result)
        if isinstance(score, Vector) and len(score) == 1 != len(self.token_ids):  # a single number of an array library
            (score,) = score
        if not all(map(math.isfinite, score if isinstance(score, list) else [score])):
            raise EnvError(f"reward function {self.name} returned {_short(result)} for the response {_short(action)}")
        if not isinstance(score, list):
            reward, token_rewards = score, None
        elif len(score) == len(self.token_ids):
            reward, token_rewards = math.fsum(score), score
        else:
            raise ConfigError(
                f"reward function {self.name} returned {len(score)} numbers for a response of {len(self.token_ids)} "
                "tokens; return one for each of `token_ids`, or a single number"
            )
        return StepResult([], reward, done=True, metrics=metrics, token_rewards=token_rewards)

    def _read(self, result: Any) -> tuple[float | list[float], dict[str, float]]:
        """Return the reward (one number, or one per token) and further metrics from the function's result."""
        if isinstance(result, Mapping):
            key = next((name for name in SCORES if name in result), None)
            if key is not None and (score := _score(result[key])) is not None:
                others = {str(name): number_of(value) for name, value in result.items() if name != key}
                return score, {name: value for name, value in others.items() if value is not None}
        elif (score := _score(result)) is not None:
            return score, {}
        raise ConfigError(
            f"reward function {self.name} returned {_short(result)} ({type(result).__name__}); return a number, one "
            "for each token, or a dict with either as `score` and further numbers, which become metrics"
        )


class RewardSumEnv(Env[NoSettings]):
    """Single-turn episode with a weighted sum of rewards. `summing` creates a class for each sum."""

    terms: ClassVar[tuple[tuple[RewardTerm, type[RewardFunctionEnv]], ...]]

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self._parts = [(term, part(config, extras)) for term, part in self.terms]

    async def init(self, prompt: list[Message]) -> list[Message]:
        for _, part in self._parts:
            await part.init(prompt)
        return prompt

    async def step(self, action: str) -> StepResult:
        """Return the weighted sum. Metrics of a function get the prefix `NAME/`."""
        metrics, reward, token_rewards = {}, 0.0, None
        for term, part in self._parts:
            part.workers, part.token_ids = self.workers, self.token_ids
            result = await part.step(action)
            metrics[f"reward/{term.name}"] = result.reward
            metrics |= {f"{term.name}/{name}": value for name, value in result.metrics.items()}
            reward += term.weight * result.reward
            if result.token_rewards is not None:
                token_rewards = token_rewards or [0.0] * len(self.token_ids)
                added = zip(token_rewards, result.token_rewards, strict=True)
                token_rewards = [total + term.weight * value for total, value in added]
        if token_rewards:
            token_rewards[-1] += reward - math.fsum(token_rewards)  # of the whole response
        return StepResult([], reward, done=True, metrics=metrics, token_rewards=token_rewards or None)


@cache
def rewarding(name: str, function: Callable[..., Any]) -> type[RewardFunctionEnv]:
    """Return the environment class of a reward function. Errors call the function `name`.

    Raises ConfigError for a function that has no keyword argument `response`.
    """
    kinds = inspect.signature(function).parameters
    keywords = {
        key: parameter
        for key, parameter in kinds.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in kinds.values())
    if "response" not in keywords and not takes_any:
        raise ConfigError(
            f"reward function {name} takes {', '.join(kinds) or 'nothing'}, and not `response`, the text that it "
            "rewards; write one that does around it, as docs/add-an-environment.md shows for functions of verl and TRL"
        )
    needed = [key for key, parameter in keywords.items() if parameter.default is parameter.empty]
    members = {
        "name": name,
        "function": staticmethod(function),
        "parameters": None if takes_any else tuple(keywords),
        "required": tuple(key for key in needed if key not in GIVEN),
    }
    return type(getattr(function, "__name__", "reward"), (RewardFunctionEnv,), members)


@cache
def summing(terms: tuple[tuple[RewardTerm, type[RewardFunctionEnv]], ...]) -> type[RewardSumEnv]:
    """Return the environment class of a weighted sum of reward functions."""
    return type("RewardSum", (RewardSumEnv,), {"terms": terms})


def _score(value: Any) -> float | list[float] | None:
    """Convert a value to a reward: one number, or a list with one number per token for a one-dimensional array.

    None, as from a judge that gave no verdict, becomes NaN. Returns None for any other value.
    """
    if value is None:
        return math.nan
    if (is_array := getattr(value, "ndim", 0) == 1) or isinstance(value, list | tuple):
        numbers = [math.nan if one is None else number_of(one) for one in value]
        return None if None in numbers else (Vector if is_array else list)(one for one in numbers if one is not None)
    return number_of(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
