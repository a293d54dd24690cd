"""Synchronous environments in the style of skyrl-gym, run in threads.

    class Multiply(BaseTextEnv):
        def __init__(self, env_config, extras): ...
        def step(self, action): return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

    MultiplyEnv = adapted(Multiply)     # environment.env_class=my_package.my_module:MultiplyEnv

The class need not inherit from `BaseTextEnv`; any class with these methods works, such as one written for skyrl-gym.
Calls run in up to `environment.skyrl_gym.max_env_workers` threads, one call at a time per episode. A thread cannot be
stopped: a step that never returns occupies its thread until the process ends. When the caller gives up, the thread no
longer counts towards the limit. Code that may hang belongs in an async `Env`.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from numbers import Real
from typing import Any, Protocol

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.env import Env, Message, NoSettings, StepResult
from skyrl.envs.tools import ToolGroup
from skyrl.errors import ConfigError

RESULT_KEYS = {"observations", "reward", "done", "metadata"}


class TextEnv(Protocol):
    """Interface of environments for `adapted`."""

    def init(self, prompt: list[Message]) -> tuple[list[Message], Mapping[str, Any]]: ...
    def step(self, action: str) -> Mapping[str, Any]: ...
    def close(self) -> None: ...
    def get_metrics(self) -> Mapping[str, Any]: ...


class BaseTextEnv:
    """Base class of synchronous environments. Subclasses define `step`; other methods have defaults."""

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[ToolGroup] = []

    def init_tool_groups(self, tool_groups: list[ToolGroup]) -> None:
        """Set the tool groups for `_execute_tool`."""
        self.tool_groups = tool_groups

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: list[Any] | tuple[Any, ...]) -> Any:
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        known = ", ".join(group.name for group in self.tool_groups)
        raise ValueError(f"no tool group named {tool_group_name!r}; known: {known}")

    def init(self, prompt: list[Message]) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the initial conversation and metadata. The metadata is ignored."""
        return prompt, {}

    def step(self, action: str) -> Mapping[str, Any]:
        """Return `{"observations": [messages], "reward": number, "done": bool, "metadata": {...}}`."""
        raise NotImplementedError(f"{type(self).__name__} has no step; write one")

    def close(self) -> None:
        """Release all resources."""

    def get_metrics(self) -> Mapping[str, Any]:
        """Return metrics of the whole episode."""
        return {}


class ThreadedEnv(Env[BaseConfig]):
    """An episode of the synchronous environment `wrapped`, created as `wrapped(env_config=..., extras=...)`."""

    wrapped: Any

    def __init__(self, config: BaseConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self._env: TextEnv = self.wrapped(env_config=config, extras=dict(extras))
        self._call: Future[Any] | None = None

    async def init(self, prompt: list[Message]) -> list[Message]:
        messages, _ = await self._run(partial(self._env.init, prompt))
        return messages

    async def step(self, action: str) -> StepResult:
        result = await self._run(partial(self._env.step, action))
        return _step_result(type(self._env).__name__, result)

    async def close(self) -> None:
        """Close the environment.

        If an abandoned step is still running, the environment is closed when the step ends.
        """
        if self._call is None or self._call.done():
            await self._run(self._env.close)
        else:
            self._call.add_done_callback(lambda _: self._env.close())

    def metrics(self) -> dict[str, float]:
        return _numbers(self._env.get_metrics())

    async def _run(self, call: Any) -> Any:
        self._call = self.workers.submit(call)
        return await asyncio.wrap_future(self._call)


def adapted(cls: type, config: type[BaseConfig] = NoSettings) -> type[Env[Any]]:
    """Return an `Env` class that runs episodes of the synchronous environment `cls` in threads.

    Args:
        cls: Class with the methods of `TextEnv`, created as `cls(env_config=..., extras=...)`.
        config: Class of the environment's settings.
    """
    return type(cls.__name__, (ThreadedEnv,), {"wrapped": cls, "Config": config, "__doc__": cls.__doc__})


def _step_result(name: str, result: Any) -> StepResult:
    """Convert the result of a step. Numbers in the metadata become metrics; other metadata is ignored."""
    if not isinstance(result, Mapping) or not {"observations", "reward", "done"} <= set(result):
        raise ConfigError(f"{name}.step returned {result!r}; return a dict with observations, reward and done")
    unknown = sorted(key for key in set(result) - RESULT_KEYS if result[key] is not None)
    if unknown:
        raise ConfigError(
            f"{name}.step returned {', '.join(unknown)}, which would train the model on "
            "something that it did not generate; end its turns with stop strings instead"
        )
    metrics = _numbers(result.get("metadata") or {})
    return StepResult(list(result["observations"]), float(result["reward"]), bool(result["done"]), metrics)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, Real)}
