"""Environments whose turns may call tools: Python functions that the chat template shows to the model.

class Weather(ToolEnv):
    @tool
    def forecast(self, city: str) -> str:
        '''Look up the weather.

        Args:
            city: Name of the city.
        '''
        return FORECASTS[city]

    async def reward(self, answer):
        return float("rain" in answer)
"""

import inspect
import json
from abc import abstractmethod
from functools import cache, partial
from types import MethodType
from typing import Any, TypeVar

from pydantic import ValidationError, validate_call

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.env import Env, EnvError, StepResult
from skyrl.errors import ConfigError
from skyrl.utils.answer_formats import PLAIN, AnswerFormat, AnswerReader, ToolCall

C = TypeVar("C", bound=BaseConfig)


class ToolEnv(Env[C]):
    """Episode in which the model calls methods that are marked with `skyrl.envs.tools.tool`.

    Calls are read in the format of the chat template's family. A turn with calls is answered with a message of the role
    `tool` for each. A turn without calls is the answer: it ends the episode, with the reward of `reward`. A malformed
    call is a part of the answer.
    """

    answer_format: AnswerFormat = PLAIN
    """Format of reasoning and calls. Rollouts set that of the model's chat template."""

    answer_reasons: bool = False
    """True if the chat template begins each answer with reasoning."""

    @abstractmethod
    async def reward(self, answer: str) -> float:
        """Return the reward of the last turn's text, without its reasoning."""

    @classmethod
    def tool_schemas(cls) -> list[dict[str, Any]]:
        """Return the tools as chat templates read them.

        Names, types and texts are those of the methods' signatures and docstrings. Raises ConfigError for a method
        without a type or a description of each parameter.
        """
        return _schemas(cls)

    @classmethod
    def tool_names(cls) -> list[str]:
        """Return the names of the tools, in the order of their definition."""
        members = {name: member for one in reversed(cls.__mro__) for name, member in vars(one).items()}
        return [name for name, member in members.items() if getattr(member, "is_tool", False)]

    async def step(self, action: str) -> StepResult:
        reader = AnswerReader(self.answer_format, reasons=self.answer_reasons)
        parts = reader.push(action)
        more, calls = reader.end()
        if not calls:
            answer = "".join(text for kind, text in parts + more if kind == "content")
            return StepResult([], await self.reward(answer), done=True)
        results = [await self._result_of(call) for call in calls]
        messages = [
            {"role": "tool", "name": call.name, "tool_call_id": f"{number:09}", "content": text}
            for number, (call, (text, _)) in enumerate(zip(calls, results, strict=True))
        ]
        failed = sum(not fits for _, fits in results)
        return StepResult(messages, 0.0, done=False, metrics={"tool_calls": len(calls), "failed_tool_calls": failed})

    async def _result_of(self, call: ToolCall) -> tuple[str, bool]:
        """Return the text of a tool's result, or an error for the model, and True if it is a result."""
        names = self.tool_names()
        if call.name not in names:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(names)}", False
        method, arguments = getattr(self, call.name), json.loads(call.arguments)
        try:
            if inspect.iscoroutinefunction(method):
                result = await validate_call(method)(**arguments)
            else:
                result = await self.workers.run(partial(validate_call(method), **arguments))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except EnvError:
            raise
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            return f"error: {'; '.join(faults)}", False
        except Exception as error:  # the model may have asked for something impossible
            return f"error: {type(error).__name__}: {error}", False
        return text, True


@cache
def _schemas(cls: type[ToolEnv[Any]]) -> list[dict[str, Any]]:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    schemas = []
    for name in cls.tool_names():
        try:
            schema = get_json_schema(MethodType(getattr(cls, name), object()))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(
                f"tool {cls.__name__}.{name}: {error}; give each parameter a type, and a line below 'Args:' in the "
                "docstring"
            ) from error
        schema["function"].pop("return", None)
        schemas.append(schema)
    return schemas
