"""Synchronous environments, written against skyrl-gym or like it, run by the async protocol."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv as TheirBaseTextEnv

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs import EnvWorkers, StepResult, make_env
from skyrl.envs.gym import BaseTextEnv, adapted
from skyrl.envs.tools import ToolGroup, Tools, tool
from skyrl.errors import ConfigError


@dataclass
class MultiplyConfig(BaseConfig):
    factor: int = 2


def multiply(base: Any) -> Any:
    """An environment on either base class: the model says the number, multiplied by `factor`."""

    class Multiply(base):
        def __init__(self, env_config: MultiplyConfig, extras: dict[str, Any]):
            super().__init__()
            self.factor, self.number, self.max_turns = env_config.factor, extras["number"], 2
            self.closed = 0

        def init(self, prompt):
            return [{"role": "system", "content": "Multiply."}, *prompt], {}

        def step(self, action):
            self.turns += 1
            right = action == str(self.factor * self.number)
            done = right or self.turns >= self.max_turns
            observations = [] if done else [{"role": "user", "content": "No."}]
            metadata = {"right": right, "thread": threading.current_thread().name, "length": len(action)}
            return {"observations": observations, "reward": float(right), "done": done, "metadata": metadata}

        def close(self):
            self.closed += 1

        def get_metrics(self):
            return {"turns": self.turns, "name": "multiply"}

    return Multiply


Ours = adapted(multiply(BaseTextEnv), MultiplyConfig)
Theirs = adapted(multiply(TheirBaseTextEnv), MultiplyConfig)
BOTH = pytest.mark.parametrize("env_id", [f"{__name__}:Ours", f"{__name__}:Theirs"])


@BOTH
@pytest.mark.parametrize("limit", [0, 2])
def test_an_episode_runs_through(env_id, limit):
    async def episode():
        env = make_env(env_id, {"factor": 3}, {"number": 7}, EnvWorkers(limit))
        prompt = await env.init([{"role": "user", "content": "7?"}])
        steps = [await env.step("20"), await env.step("21")]
        await env.close()
        return env, prompt, steps

    env, prompt, (wrong, right) = asyncio.run(episode())
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert (wrong.reward, wrong.done, wrong.observations) == (0.0, False, [{"role": "user", "content": "No."}])
    assert (right.reward, right.done, right.observations) == (1.0, True, [])
    assert right.metrics == {"right": 1.0, "length": 2.0}
    assert env.metrics() == {"turns": 2.0} and env._env.closed == 1


class Blocking(BaseTextEnv):
    """Counts how many steps run at once, and waits until it is let go."""

    running, most, go, lock = 0, 0, threading.Event(), threading.Lock()

    def __init__(self, env_config, extras):
        super().__init__()
        self.closed = threading.Event()

    def step(self, action):
        with self.lock:
            type(self).running += 1
            type(self).most = max(self.most, self.running)
        self.go.wait()
        with self.lock:
            type(self).running -= 1
        return {"observations": [], "reward": 0.0, "done": True}

    def close(self):
        self.closed.set()


BlockingEnv = adapted(Blocking)


def test_steps_run_in_no_more_threads_than_allowed():
    async def steps():
        workers = EnvWorkers(3)
        envs = [make_env(f"{__name__}:BlockingEnv", None, {}, workers) for _ in range(9)]
        running = [asyncio.ensure_future(env.step("")) for env in envs]
        while Blocking.running < 3:
            await asyncio.sleep(0.001)
        Blocking.go.set()
        await asyncio.gather(*running)

    Blocking.go.clear()
    Blocking.most = 0
    asyncio.run(steps())
    assert Blocking.most == 3


def test_an_environment_whose_step_was_given_up_is_closed_when_it_ends():
    async def give_up():
        env = make_env(f"{__name__}:BlockingEnv", None, {}, EnvWorkers(1))
        step = asyncio.ensure_future(env.step(""))
        while not Blocking.running:
            await asyncio.sleep(0.001)
        step.cancel()
        await env.close()
        before = env._env.closed.is_set()
        Blocking.go.set()
        return before, await asyncio.to_thread(env._env.closed.wait, 60)

    Blocking.go.clear()
    assert asyncio.run(give_up()) == (False, True)


def test_a_step_that_is_given_up_leaves_its_place_to_another():
    async def give_up() -> StepResult:
        workers = EnvWorkers(1)
        hanging = make_env(f"{__name__}:BlockingEnv", None, {}, workers)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hanging.step(""), 0.05)
        other = make_env(f"{__name__}:Ours", None, {"number": 1}, workers)
        return await asyncio.wait_for(other.step("2"), 60)

    Blocking.go.clear()
    try:
        assert asyncio.run(give_up()).reward == 1.0
    finally:
        Blocking.go.set()


def test_a_step_that_is_given_up_before_it_began_never_does():
    def call(number: int) -> None:
        begun.append(number)
        go.wait()

    begun: list[int] = []
    go, workers = threading.Event(), EnvWorkers(1)
    first, second, third = (workers.submit(call, number) for number in range(3))
    assert (first.cancel(), third.cancel()) == (False, True)
    go.set()
    first.result(60)
    second.result(60)
    assert sorted(begun) == [0, 1]


def returning(result: Any) -> Any:
    class Returning(BaseTextEnv):
        def __init__(self, env_config, extras):
            super().__init__()

        def step(self, action):
            return result

    return adapted(Returning)({}, {})


@pytest.mark.parametrize("result", [(None, 1.0, True), {"reward": 1.0}])
def test_a_result_of_another_form_is_refused(result):
    with pytest.raises(ConfigError, match=r"Returning.step returned .*observations, reward and done"):
        asyncio.run(returning(result).step(""))


def test_an_action_that_is_changed_afterwards_is_refused():
    step = {"observations": [], "reward": 0.0, "done": True, "postprocessed_action": "other words"}
    with pytest.raises(ConfigError, match=r"postprocessed_action.*stop strings"):
        asyncio.run(returning(step).step(""))


class Clock(ToolGroup):
    def __init__(self):
        super().__init__("clock")

    @tool
    def hour(self, zone: str) -> str:
        return f"noon in {zone}"

    @tool
    async def minute(self) -> str:
        await asyncio.sleep(0)
        return "zero"

    def wind(self) -> None: ...


def test_marked_methods_are_tools():
    assert Clock().get_tool_to_group_mapping() == {"hour": "clock", "minute": "clock"}


def test_tools_are_called_whether_coroutines_or_not():
    tools = Tools([Clock()])
    assert asyncio.run(tools.call("hour", "Rome")) == "noon in Rome"
    assert asyncio.run(tools.call("minute")) == "zero"


def test_an_unknown_tool_lists_the_known_ones():
    with pytest.raises(ValueError, match="no tool named 'wind'; known: hour, minute"):
        asyncio.run(Tools([Clock()]).call("wind"))
    with pytest.raises(ValueError, match="no tool named 'wind' in the group 'clock'; known: hour, minute"):
        Clock().execute_tool("wind")


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="both have 'hour'"):
        Tools([Clock(), Clock()])


def test_a_synchronous_environment_finds_its_tools_by_group_and_name():
    env = BaseTextEnv()
    env.init_tool_groups([Clock()])
    assert env._execute_tool("clock", "hour", ["Rome"]) == "noon in Rome"
    with pytest.raises(ValueError, match="no tool group named 'watch'; known: clock"):
        env._execute_tool("watch", "hour", ["Rome"])
