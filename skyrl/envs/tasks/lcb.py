"""Programming problems (LiveCodeBench): reward 1 if the solution passes all tests, else 0.

The last code block of the answer is run once per test, in a process that receives only the test's input. The output is
compared outside of that process. A test either calls a function with JSON arguments or gives a program its standard
input.

Differences from skyrl-gym 0.4.0: a program's process has no network, no access to other processes, and limited memory;
NumPy and pandas are not pre-imported; tuples count as lists at any depth; results are compared as JSON, so an object
that claims to equal everything does not pass; `true` is not 1, and `1_0` is not 10.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from skyrl.config.machinery.base import BaseConfig
from skyrl.envs.env import ENVS, Env, StepResult
from skyrl.errors import ConfigError
from skyrl.utils.sandbox.run import Isolation, Limits, Outcome, run_code

_NUMBER = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,9})?")


@dataclass
class LCBConfig(BaseConfig):
    """Settings of `lcb`."""

    timeout: PositiveFloat = 6.0
    """CPU time limit per test, in seconds. A test that waits is stopped after three times this limit plus 5 s."""

    memory_mb: PositiveInt = 2048
    """Address space limit per test, in MiB."""

    isolation: Isolation = "full"
    """Isolation of the process: "full" or "limited".

    "full" uses separate namespaces. "limited" is for systems that do not allow namespaces (many containers): there is
    no writable folder, and all files are readable if the kernel has no Landlock.
    """


def extract_code(text: str) -> str | None:
    """Return the last code block between triple backticks; None if there is none."""
    blocks = re.findall(r"```(?:\w+)?\n(.*?)```", text, re.DOTALL)
    return blocks[-1].strip() if blocks else None


def is_same_output(printed: str, expected: str) -> bool:
    """Return True if two texts have equal lines, without surrounding spaces. Numbers may be written differently."""
    lines, wanted = printed.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(wanted) and all(
        line.strip() == other.strip() or _numbers(line) == _numbers(other) is not None
        for line, other in zip(lines, wanted, strict=True)
    )


def is_same_value(value: str | None, expected: object) -> bool:
    """Return True if the JSON that a function returned equals the expected value."""
    try:
        return value is not None and _same(json.loads(value), expected)
    except (ValueError, RecursionError):
        return False


class Tests(NamedTuple):
    """Tests of a solution, shared by all samples of a prompt."""

    function: str | None
    """Name of the function to call; None for a program."""

    cases: list[dict[str, Any]]
    expected: list[Any]


def read_tests(given: Any) -> Tests:
    """Convert tests for the sandbox. Raises one of several built-in errors for invalid tests, such as KeyError."""
    function = given[0]["metadata"]["func_name"] if given[0].get("testtype") == "functional" else None
    cases = [_case(test["input"], function is not None) for test in given]
    return Tests(function, cases, [json.loads(test["output"]) if function else str(test["output"]) for test in given])


@functools.lru_cache(maxsize=16)
def _read_once(text: str) -> Tests:
    # Cached: tests may be megabytes, and each sample of a prompt has its own environment.
    return read_tests(json.loads(text))


@ENVS.register("lcb")
class LCBEnv(Env[LCBConfig]):
    """One turn; reward 1 if the last code block passes all tests, else 0.

    Needs `reward_spec.ground_truth`, a list (or its JSON text) of `{input, output, testtype, metadata.func_name}`,
    where `testtype` is "functional" or "stdin".
    """

    Config = LCBConfig

    def __init__(self, config: LCBConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        given = self.column("reward_spec.ground_truth")
        try:
            self.tests = _read_once(given) if isinstance(given, str) else read_tests(given)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"reward_spec.ground_truth={str(given)[:100]!r} is no list of tests ({type(error).__name__}: {error}); "
                "each has input and output, and functional ones metadata.func_name"
            ) from error

    async def step(self, action: str) -> StepResult:
        code = extract_code(action)
        if code is None:
            return StepResult([], 0.0, done=True, metrics={"has_code": 0.0})
        limits = Limits(cpu_s=self.config.timeout, memory_mb=self.config.memory_mb)
        async with self.workers.process():
            outcomes = await run_code(
                code,
                self.tests.cases,
                function=self.tests.function,
                prelude=True,
                limits=limits,
                isolation=self.config.isolation,
                go_on=self._passes,
            )
        passed = len(outcomes) == len(self.tests.cases) and self._passes(len(outcomes) - 1, outcomes[-1])
        late = outcomes[-1].status == "timeout"
        return StepResult([], float(passed), done=True, metrics={"has_code": 1.0, "timeout": float(late)})

    def _passes(self, index: int, outcome: Outcome) -> bool:
        if outcome.status != "ok":
            return False
        if self.tests.function is not None:
            return is_same_value(outcome.value, self.tests.expected[index])
        return is_same_output(outcome.stdout, self.tests.expected[index])


def _case(given: Any, functional: bool) -> dict[str, Any]:
    """Convert the input of a test to a case of the sandbox. Each line is one argument of the function, as JSON."""
    return {"arguments": [json.loads(line) for line in given.split("\n")]} if functional else {"stdin": str(given)}


def _numbers(line: str) -> list[Decimal] | None:
    """Return the numbers of a line; None if any word is not a number."""
    words = line.split()
    return [Decimal(word) for word in words] if all(map(_NUMBER.fullmatch, words)) else None


def _same(value: Any, expected: Any) -> bool:
    """Compare JSON values. Unlike in Python, booleans do not equal numbers."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in value)
    return value == expected
