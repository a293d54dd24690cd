"""Environments with tools that are Python functions."""

import asyncio
import json

import pytest
from transformers.utils import get_json_schema

from skyrl.envs import EnvError, ToolEnv, make_env, tool
from skyrl.errors import ConfigError
from skyrl.utils.answer_formats import FORMATS

QWEN, LLAMA = (next(one for one in FORMATS if one.name == name) for name in ("qwen", "llama3"))


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Calculator(ToolEnv):
    """Tools that work, and tools that do not."""

    @tool
    def add(self, a: int, b: int = 2) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    @tool
    async def echo(self, text: str) -> str:
        """Say it again.

        Args:
            text: What to say.
        """
        return text

    @tool
    def look(self, call: str) -> dict:
        """Look up a call.

        Args:
            call: Its name.
        """
        return {call: 1} if call else {(1, 2): 3}

    @tool
    def fail(self) -> None:
        """Fail."""
        raise KeyError("no")

    @tool
    def break_down(self) -> None:
        """Break down."""
        raise EnvError("the server has stopped")

    async def reward(self, answer: str) -> float:
        return float(len(answer))


def step(action: str, form=QWEN, **attributes):
    env = make_env(f"{__name__}:Calculator", None, {})
    env.answer_format = form
    for name, value in attributes.items():
        setattr(env, name, value)
    return asyncio.run(env.step(action))


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_are_shown_as_transformers_describes_functions():
    (first, *_), expected = Calculator.tool_schemas(), get_json_schema(add)
    del expected["function"]["return"]
    assert first == expected
    assert Calculator.tool_names() == ["add", "echo", "look", "fail", "break_down"]


def test_a_turn_with_calls_gets_the_results():
    result = step(f"<think>hm</think>{call('add', a=1)}\n{call('echo', text='é')}")
    assert [(one["role"], one["name"], one["content"]) for one in result.observations] == [
        ("tool", "add", "3"),
        ("tool", "echo", "é"),
    ]
    assert (result.reward, result.done) == (0.0, False)
    assert result.metrics == {"tool_calls": 2, "failed_tool_calls": 0}


def test_results_are_json():
    (message,) = step(call("look", call="é")).observations
    assert message["content"] == '{"é": 1}'


def test_calls_are_read_in_the_form_of_the_models_family():
    (message,) = step('{"name": "add", "parameters": {"a": 1, "b": 1}}', LLAMA).observations
    assert message["content"] == "2"


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (call("subtract", a=1), "error: there is no tool 'subtract'; there are: add, echo, look, fail, break_down"),
        (call("reward", answer="x"), "error: there is no tool 'reward'"),
        (call("add", a="one"), "error: a: Input should be a valid integer"),
        (call("add", b=1), "error: a: Missing required argument"),
        (call("add", a=1, c=1), "error: c: Unexpected keyword argument"),
        (call("fail"), "error: KeyError: 'no'"),
        (call("look", call=""), "error: TypeError: keys must be str"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model(action, said):
    result = step(action)
    assert result.observations[0]["content"].startswith(said)
    assert result.metrics == {"tool_calls": 1, "failed_tool_calls": 1}


def test_a_failure_that_is_not_the_models_fails_the_episode():
    with pytest.raises(EnvError, match="has stopped"):
        step(call("break_down"))


@pytest.mark.parametrize(
    ("action", "reasons", "answer"),
    [
        ("four", False, "four"),
        ("<think>2 + 2</think>\n\nfour", False, "four"),
        ("2 + 2</think>four", True, "four"),
        ('<tool_call>{"name": "add"', False, '<tool_call>{"name": "add"'),
    ],
)
def test_a_turn_without_calls_is_the_answer(action, reasons, answer):
    result = step(action, answer_reasons=reasons)
    assert (result.reward, result.done, result.observations) == (len(answer), True, [])


def test_a_tool_without_a_description_is_refused():
    class Bare(ToolEnv):
        @tool
        def look(self, at):
            """Look."""

    with pytest.raises(ConfigError, match=r"tool Bare.look: .*; give each parameter a type"):
        Bare.tool_schemas()
