"""Environments: finding them, making them and their settings."""

import asyncio
from dataclasses import dataclass

import pytest
from pydantic import PositiveInt

from skyrl.config.environment import SearchEnvConfig, SkyRLGymConfig
from skyrl.config.machinery.base import BaseConfig
from skyrl.envs import ENVS, Env, EnvWorkers, StepResult, check_settings, make_env, settings_of
from skyrl.errors import ConfigError
from skyrl.train.config import SkyRLTrainConfig

ROW = {"reward_spec": {"method": "rule", "ground_truth": "42"}}


@dataclass
class EchoConfig(BaseConfig):
    times: PositiveInt = 2


class Echo(Env[EchoConfig]):
    """Says what the model said."""

    Config = EchoConfig

    async def step(self, action: str) -> StepResult:
        return StepResult([{"role": "user", "content": action * self.config.times}], 0.0, done=True)


class NotAnEnv:
    pass


ECHO = f"{__name__}:Echo"


def test_an_environment_is_made_from_its_id():
    assert asyncio.run(make_env("gsm8k", None, ROW).step("#### 42")).reward == 1.0


def test_an_environment_is_made_from_a_module_and_class():
    step = asyncio.run(make_env(ECHO, None, {}).step("ab"))
    assert step.observations == [{"role": "user", "content": "abab"}]


def test_settings_are_those_given_over_the_defaults():
    assert make_env(ECHO, {"times": 3}, {}).config == EchoConfig(times=3)


def test_settings_may_be_an_instance_of_the_environments_class():
    assert make_env(ECHO, EchoConfig(times=4), {}).config.times == 4


def test_settings_of_another_environment_are_refused():
    with pytest.raises(ConfigError, match="settings are a EchoConfig, not a SearchEnvConfig"):
        make_env(ECHO, SearchEnvConfig(), {})


def test_a_wrong_setting_is_refused_with_the_environments_id():
    with pytest.raises(ConfigError, match=r"environment '.*:Echo': times=0: "):
        make_env(ECHO, {"times": 0}, {})


def test_an_unknown_id_gives_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"no environment named 'gsm8'.*known: .*did you mean 'gsm8k'"):
        make_env("gsm8", None, ROW)


def test_a_class_that_is_no_environment_is_refused():
    with pytest.raises(ConfigError, match=r"NotAnEnv.*adapted\(Class\)"):
        make_env(f"{__name__}:NotAnEnv", None, {})


@pytest.mark.parametrize("env_id", ["gsm8k", "gsm8k_multi_turn", "arithmetic", "lcb", "llm_as_a_judge", "searchcode"])
def test_a_missing_column_is_named(env_id):
    with pytest.raises(ConfigError, match=rf"'{env_id}': the row has no reward_spec.ground_truth \(it has answer\)"):
        make_env(env_id, None, {"answer": "42"})


@pytest.mark.parametrize("turns", [0, -1, "three", 2.5])
def test_a_turn_limit_that_is_no_positive_whole_number_is_refused(turns):
    with pytest.raises(ConfigError, match="max_turns="):
        make_env("gsm8k_multi_turn", None, {**ROW, "max_turns": turns})


def test_the_prompt_stays_as_it_is_by_default():
    prompt = [{"role": "user", "content": "?"}]
    assert asyncio.run(make_env("gsm8k", None, ROW).init(prompt)) == prompt


def test_an_override_reaches_an_environment_of_ones_own():
    config = SkyRLTrainConfig.from_cli_overrides(["environment.skyrl_gym.Echo.times=5"])
    options = config.environment.skyrl_gym
    check_settings(options, (ECHO,))
    assert make_env(ECHO, settings_of(options, ECHO), {}).config.times == 5


def test_overrides_of_environments_keep_those_beside_them():
    options = SkyRLGymConfig.from_cli_overrides(["one.a=1", "two.b=2"]).with_overrides({"one": {"c": 3}})
    assert options.others == {"one": {"a": 1, "c": 3}, "two": {"b": 2}}


def test_an_override_reaches_an_environment_with_a_field():
    options = SkyRLGymConfig.from_cli_overrides(["search.topk=7"])
    assert settings_of(options, "search") == SearchEnvConfig(topk=7) and not options.others


def test_an_option_that_is_no_section_is_still_refused():
    with pytest.raises(ConfigError, match="max_workers: SkyRLGymConfig has no field"):
        SkyRLGymConfig.from_cli_overrides(["max_workers=3"])


def test_settings_of_an_environment_that_there_is_not_are_refused():
    with pytest.raises(ConfigError, match=r"environment.skyrl_gym.gsm8: .*did you mean 'gsm8k'"):
        check_settings(SkyRLGymConfig.from_cli_overrides(["gsm8.level=3"]))


def test_unknown_settings_of_an_environment_are_refused_before_any_row():
    with pytest.raises(ConfigError, match=r"environment.skyrl_gym.gsm8k: level: .* has no field"):
        check_settings(SkyRLGymConfig.from_cli_overrides(["gsm8k.level=3"]))


def test_every_environment_is_registered():
    assert list(ENVS) == [
        "aime",
        "arithmetic",
        "gsm8k",
        "gsm8k_multi_turn",
        "lcb",
        "llm_as_a_judge",
        "math",
        "no_reward",
        "search",
        "searchcode",
        "text2sql",
    ]


def test_processes_are_no_more_at_a_time_than_allowed():
    workers = EnvWorkers(1)
    inside = []

    async def one() -> None:
        async with workers.process():
            inside.append(+1)
            await asyncio.sleep(0)
            inside.append(-1)

    async def several() -> None:
        await asyncio.gather(*(one() for _ in range(4)))

    asyncio.run(several())
    asyncio.run(several())  # another event loop
    assert inside == [+1, -1] * 8
