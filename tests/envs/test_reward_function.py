"""Reward functions: what they are called with, what they may return, and what errors say."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl.envs import EnvError, EnvWorkers, StepResult, make_env
from skyrl.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "add-an-environment.md").read_text()
CHAT = [{"role": "user", "content": "2 + 3?"}]
NAN, INF = float("nan"), float("inf")
ROW = {
    "data_source": "sums",
    "reward_model": {"ground_truth": "5"},
    "ground_truth": "5",
    "score": 0.5,
    "extra_info": {"index": 3},
    "max_turns": 1,
}


def exact(prompt, response, ground_truth, tolerance=0, **columns):
    assert prompt == CHAT and "max_turns" not in columns and tolerance == 0
    return response.strip() == ground_truth


def given(response, score):
    return score


async def waited(response):
    await asyncio.sleep(0)
    return len(response)


class Object:
    async def __call__(self, response):
        return 7


an_object = Object()


def returned(response, value):
    return value


def without_response(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def episode(function: str, response: str = " 5", **columns) -> StepResult:
    async def play() -> StepResult:
        env = make_env(f"{__name__}:{function}", None, {**ROW, **columns}, EnvWorkers(2))
        await env.init(CHAT)
        try:
            return await env.step(response)
        finally:
            await env.close()

    return asyncio.run(play())


def test_a_function_is_called_with_the_prompt_the_response_and_columns():
    assert episode("exact") == StepResult([], 1.0, done=True)
    assert episode("exact", "6").reward == 0.0


def test_a_function_gets_the_columns_that_it_names_and_no_others():
    assert episode("given").reward == 0.5


def test_a_function_may_be_a_coroutine():
    assert episode("waited", "abc").reward == 3.0


def test_a_function_may_be_an_object_that_is_awaited():
    assert episode("an_object").reward == 7.0


@pytest.mark.parametrize("value", [np.float32(0.25), np.array(0.25), True, 2])
def test_a_reward_may_be_a_number_of_any_library(value):
    assert episode("returned", value=value).reward == float(value)


def test_an_array_of_one_number_is_the_reward_of_a_response_of_any_length():
    for value in (np.array([0.25]), torch.tensor([0.25])):
        env = make_env(f"{__name__}:returned", None, {**ROW, "value": value})
        asyncio.run(env.init(CHAT))
        for tokens, each in (([1, 2], None), ([1], [0.25])):
            env.token_ids = tokens
            result = asyncio.run(env.step("5"))
            assert (result.reward, result.token_rewards) == (0.25, each)


def test_further_numbers_of_a_result_are_metrics():
    step = episode("returned", value={"score": -1, "acc": False, "pred": "six"})
    assert (step.reward, step.metrics) == (-1.0, {"acc": 0.0})


@pytest.mark.parametrize("value", ["1.0", [1.0, "2.0"], {"acc": 1.0}, {"score": "high"}])
def test_what_is_no_number_is_refused_by_the_functions_name(value):
    with pytest.raises(ConfigError, match=rf"reward function {__name__}:returned returned .*{type(value).__name__}"):
        episode("returned", value=value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (NAN, "nan"),
        (None, "None"),
        ({"score": None}, r"\{'score': None\}"),
        ([INF, -INF], r"\[inf, -inf\]"),
        ([0.5, NAN], r"\[0.5, nan\]"),
        ([0.5, None], r"\[0.5, None\]"),
    ],
)
def test_a_reward_that_is_not_finite_says_what_it_was_of(value, said):
    with pytest.raises(EnvError, match=rf"returned returned {said} for the response ' 5'"):
        episode("returned", value=value)


def test_a_parameter_that_is_no_column_is_named():
    with pytest.raises(ConfigError, match=r":returned'.* takes value, which the row has no column of \(it has data_so"):
        episode("returned")


def test_a_function_that_takes_no_response_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"takes data_source, solution_str, .* not `response`.*add-an-environment"):
        episode("without_response")


def test_the_pages_function_rewards(tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n# my_rewards.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("my_rewards:exact", None, ROW)
    asyncio.run(env.init(CHAT))
    assert asyncio.run(env.step("5\n")).reward == 1.0


def test_functions_of_verl_and_trl_are_wrapped_as_the_page_says():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": float((data_source, solution_str, ground_truth, extra_info["index"]) == ("sums", "5", "5", 3))}

    def of_lists(prompts, completions, ground_truth, **columns):
        pairs = zip(prompts, completions, ground_truth, strict=True)
        return [float(prompt == CHAT and said[-1]["content"] == truth) for prompt, said, truth in pairs]

    wrappers = re.findall(r"^\| (?:verl|TRL), .*\| `(def [^`]*)` `([^`]*)` \|$", PAGE, re.MULTILINE)
    assert len(wrappers) == 2
    for head, body in wrappers:
        names = {"compute_score": compute_score, "f": of_lists}
        exec(f"{head}\n    {body}", names)
        monkeypatched = pytest.MonkeyPatch()
        monkeypatched.setitem(globals(), "wrapped", names["reward"])
        assert episode("wrapped", "5").reward == 1.0, head
        monkeypatched.undo()


# -- several functions, and rewards of tokens --------------------------------------------------------------------------


def each(response, token_ids, upto=None):
    return [float(token) for token in token_ids[:upto]]


def scored(response):
    return {"score": 0.5, "length": len(response)}


def step(function: str, response: str = " 5", token_ids=(3, 1, 4)) -> StepResult:
    async def play() -> StepResult:
        env = make_env(function, None, ROW, EnvWorkers(2))
        env.token_ids = token_ids
        await env.init(CHAT)
        return await env.step(response)

    return asyncio.run(play())


def test_a_sum_of_functions_is_weighted_and_tells_each_reward_by_its_name():
    result = step(f"{__name__}:exact + short=-0.25*{__name__}:waited + half=2 * {__name__}:scored")
    assert result.reward == pytest.approx(1.0 - 0.25 * 2 + 2 * 0.5) and result.token_rewards is None
    assert result.metrics == {"reward/exact": 1.0, "reward/short": 2.0, "reward/half": 0.5, "half/length": 2.0}


def test_a_function_may_reward_each_token():
    result = step(f"{__name__}:each")
    assert result.token_rewards == [3.0, 1.0, 4.0] and result.reward == 8.0


def test_rewards_of_tokens_and_of_the_whole_add_up_where_they_belong():
    result = step(f"0.5*{__name__}:each + {__name__}:exact")
    assert result.token_rewards == pytest.approx([1.5, 0.5, 2.0 + 1.0]) and result.reward == pytest.approx(5.0)
    assert result.metrics == {"reward/each": 8.0, "reward/exact": 1.0}


def test_a_response_without_tokens_has_the_reward_of_the_whole():
    result = step(f"{__name__}:each + {__name__}:exact", token_ids=())
    assert (result.reward, result.token_rewards) == (1.0, None)


def too_few(response, token_ids):
    return np.asarray(token_ids[1:], np.float32)


def test_rewards_of_other_tokens_than_there_are_end_the_run():
    with pytest.raises(
        ConfigError, match=r"too_few returned 2 numbers for a response of 3 tokens; return one for each"
    ):
        step(f"{__name__}:too_few")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{__name__}:exact + {__name__}:exact", "duplicate reward name exact; give each a name of its own"),
        (f"{__name__}:exact + 0.2", "'0.2': a function is named as module:function"),
        (f"--*{__name__}:exact", "is named as module:function"),
        ("a=skyrl.envs.tasks.arithmetic:ArithmeticEnv", "is an environment, which is no term of a sum"),
    ],
)
def test_what_is_no_sum_is_refused(name, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_env(name, None, ROW)
