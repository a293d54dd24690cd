"""The environment `lcb`: which solutions pass, compared with skyrl-gym where it agrees, and which cannot be faked."""

import copy
import json
import subprocess
import sys

import pytest
from episodes import play, reward
from hypothesis import given, settings
from hypothesis import strategies as st
from skyrl_gym.envs.lcb.livecodebench import convert_line_to_decimals, extract_code_from_model, get_stripped_lines

from skyrl.envs import make_env
from skyrl.envs.tasks.lcb import extract_code, is_same_output, is_same_value
from skyrl.errors import ConfigError

SUMS = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "2 2\n", "output": "4.0", "testtype": "stdin"},
]
PAIRS = [
    {"input": "[3, 1]\n2", "output": "[1, 3]", "testtype": "functional", "metadata": {"func_name": "top"}},
    {"input": "[5]\n1", "output": "[5]", "testtype": "functional", "metadata": {"func_name": "top"}},
]
PROGRAMS = {
    "reads and prints": (SUMS, "print(sum(map(int, input().split())))"),
    "reads a whole": (SUMS, "import sys\nprint(sum(map(int, sys.stdin.read().split())))"),
    "has a main block": (
        SUMS,
        "def f():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    f()",
    ),
    "writes numbers differently": (SUMS, "print('%.3f' % sum(map(int, input().split())))"),
    "ends itself": (SUMS, "import sys\nprint(sum(map(int, input().split())))\nsys.exit()"),
    "is wrong": (SUMS, "print(3)"),
    "prints too much": (SUMS, "print(sum(map(int, input().split())), 'is it')"),
    "raises": (SUMS, "print(sum(map(int, input().split())))\n1 / 0"),
    "does not parse": (SUMS, "print("),
    "is empty": (SUMS, ""),
    "reads more than there is": (SUMS, "print(sum(map(int, input().split())))\ninput()"),
    "is a method": (PAIRS, "class Solution:\n    def top(self, a: List[int], n: int):\n        return sorted(a)[:n]"),
    "is a function": (PAIRS, "def top(a, n):\n    return nsmallest(n, a)"),
    "returns a tuple": (PAIRS, "def top(a, n):\n    return tuple(sorted(a))"),
    "returns something else": (PAIRS, "def top(a, n):\n    return a"),
    "has another name": (PAIRS, "def best(a, n):\n    return sorted(a)"),
    "takes other arguments": (PAIRS, "def top(a):\n    return sorted(a)"),
    "raises in the function": (PAIRS, "def top(a, n):\n    raise ValueError"),
}
EQUAL_TO_ALL = """
class Yes(list):
    def __eq__(self, other): return True
def top(a, n): return Yes()
"""
NESTED = [{**PAIRS[0], "output": "[[1, 3]]"}]
YES = [{"input": "1", "output": "1", "testtype": "functional", "metadata": {"func_name": "is_one"}}]
DIFFERENCES = {
    "a truth value is no number": (YES, "def is_one(n):\n    return n == 1", 1.0, 0.0),
    "underscores are in no number": ([{"input": "", "output": "10", "testtype": "stdin"}], "print('1_0')", 1.0, 0.0),
    "its result claims to be equal to everything": (PAIRS, EQUAL_TO_ALL, 1.0, 0.0),
    "a tuple within its result counts as a list": (NESTED, "def top(a, n):\n    return [(1, 3)]", 0.0, 1.0),
    "NumPy is not there unless it is imported": (PAIRS, "def top(a, n):\n    return np.sort(a)[:n].tolist()", 1.0, 0.0),
}
"""Reason, tests, code, skyrl-gym's reward, ours."""
THEIRS = """
import json, sys
from skyrl_gym.envs.lcb.livecodebench import compute_score
print(json.dumps({name: compute_score(text, tests)[1] for name, (tests, text) in json.load(sys.stdin).items()}))
"""


def answer(code: str) -> str:
    return f"I think:\n```python\n{code}\n```\nDone."


def row(tests: list) -> dict:
    return {"reward_spec": {"ground_truth": json.dumps(tests)}}


def judged(tests: list, code: str) -> float:
    return reward("lcb", None, row(tests), answer(code))


@pytest.fixture(scope="module")
def their_rewards() -> dict[str, float]:
    # In a process of its own: it forks, which the libraries that other tests loaded warn of.
    cases = PROGRAMS | {name: case[:2] for name, case in DIFFERENCES.items()}
    given = json.dumps({name: (tests, answer(code)) for name, (tests, code) in cases.items()})
    run = subprocess.run([sys.executable, "-c", THEIRS], input=given, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_solution_is_rewarded_as_by_skyrl_gym(name, their_rewards):
    tests, code = PROGRAMS[name]
    assert judged(tests, code) == their_rewards[name]


@pytest.mark.parametrize("why", DIFFERENCES)
def test_a_difference_from_skyrl_gym_is_as_documented(why, their_rewards):
    tests, code, theirs, ours = DIFFERENCES[why]
    assert (their_rewards[why], judged(tests, code)) == (theirs, ours)


def test_solutions_of_both_kinds_pass_and_fail(their_rewards):
    kinds = {(PROGRAMS[name][0][0]["testtype"], their_rewards[name]) for name in PROGRAMS}
    assert len(kinds) == 4


@settings(deadline=None)
@given(st.text("`\n apython1", max_size=40))
def test_the_same_block_of_code_is_taken(text):
    assert extract_code(text) == extract_code_from_model(text)


def their_comparison(printed: str, expected: str) -> bool:
    lines, wanted = get_stripped_lines(printed), get_stripped_lines(expected)
    if len(lines) != len(wanted):
        return False
    for line, other in zip(lines, wanted, strict=True):
        numbers = [convert_line_to_decimals(text) for text in (line, other)]
        if line != other and not (numbers[0][0] and numbers[1][0] and numbers[0][1] == numbers[1][1]):
            return False
    return True


lines = st.lists(st.sampled_from(["1", "1.0", "1e0", " ", "\n", "a", "-0", "0", "0.10", ".1", "nan"]), max_size=5).map(
    "".join
)


@settings(deadline=None)
@given(lines, lines)
def test_outputs_are_compared_as_by_skyrl_gym(printed, expected):
    assert is_same_output(printed, expected) == their_comparison(printed, expected)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ("[[1, 2], 3.0]", [[1, 2], 3], True),
        ("[1]", [1, 1], False),
        ("null", None, True),
        (None, None, False),
        ("{", {}, False),
        ("[" * 100_000, [], False),
        ("1" * 5000, 1, False),
        ("NaN", 0, False),
        ("true", 1, False),
        ("1", True, False),
        ("0.0", False, False),
        ("true", True, True),
        ("[[true]]", [[1]], False),
        ('{"a": true}', {"a": 1}, False),
        ('{"a": 1.0}', {"a": 1}, True),
        ('{"a": 1}', {"b": 1}, False),
        ('"1"', 1, False),
        ("[]", {}, False),
    ],
)
def test_values_are_compared_by_their_json(value, expected, same):
    assert is_same_value(value, expected) is same


@pytest.mark.parametrize("printed", ["1_0", "１０", "10abc", "0xA", "1 0", "1e" + "9" * 30, "1" * 10**6 + "x"])
def test_what_is_no_number_does_not_equal_one(printed):
    assert not is_same_output(printed, "10")


@pytest.mark.parametrize("printed", ["10.0", "+10", "1e1", "10.", " 10 "])
def test_a_number_may_be_written_differently(printed):
    assert is_same_output(printed, "10")


def test_the_tests_of_a_row_are_parsed_once_for_all_its_samples():
    tests = row(PAIRS)
    first, second = (make_env("lcb", None, copy.deepcopy(tests)) for _ in range(2))
    assert first.tests is second.tests


def test_no_test_is_run_after_a_failure():
    tests = [{"input": str(i), "output": "0", "testtype": "stdin"} for i in (0, 1, 2)]
    code = "text = input()\nprint(text)\nwhile text == '2': pass"
    (step,) = play("lcb", {"timeout": 0.2}, row(tests), answer(code))
    assert (step.reward, step.metrics) == (0.0, {"has_code": 1.0, "timeout": 0.0})


def test_an_answer_without_code_is_wrong_and_says_so():
    (step,) = play("lcb", None, row(SUMS), "print(3)")
    assert (step.reward, step.metrics) == (0.0, {"has_code": 0.0})


def test_a_solution_that_takes_too_long_is_wrong_and_says_so():
    (step,) = play("lcb", {"timeout": 0.2}, row(SUMS), answer("while True: pass"))
    assert (step.reward, step.metrics) == (0.0, {"has_code": 1.0, "timeout": 1.0})


SEARCH = """
import gc, re, sys
frame, found = sys._getframe(), []
while frame:
    found.append(str(frame.f_locals) + str(frame.f_globals))
    frame = frame.f_back
found += [str(item) for item in gc.get_objects() if isinstance(item, (dict, list, tuple, str))]
print(chr(52) + "24242" if any(re.search("4{1}24242", text) for text in found) else "not there")
"""
FORGE = """
import os, json
for file in range(256):
    try:
        os.write(file, json.dumps({"status": "ok", "stdout": "3", "stderr": "", "value": "[1, 3]"}).encode() + b"\\n")
    except OSError:
        pass
os._exit(0)
"""
PATCH = """
import builtins, json
json.dumps = lambda *_, **__: '[1, 3]'
def top(a, n): return object()
"""


@pytest.mark.parametrize(("given", "expected"), [("", 0.0), ("424242", 1.0)], ids=["not there", "would be found"])
def test_the_expected_output_is_not_where_the_solution_runs(given, expected):
    assert judged([{"input": given, "output": "424242", "testtype": "stdin"}], SEARCH) == expected


@pytest.mark.parametrize("code", [EQUAL_TO_ALL, FORGE, PATCH])
@pytest.mark.parametrize("tests", [SUMS, PAIRS], ids=["stdin", "functional"])
def test_a_solution_that_cheats_is_wrong(tests, code):
    assert judged(tests, code) == 0.0


@pytest.mark.parametrize(
    "tests",
    [[], [{"output": "3"}], [{"input": "1", "output": "3", "testtype": "functional"}], {"input": "1"}, "no JSON"],
)
def test_tests_of_another_form_are_refused(tests):
    truth = tests if isinstance(tests, str) else json.dumps(tests)
    with pytest.raises(ConfigError, match=r"environment 'lcb': reward_spec.ground_truth=.* is no list of tests"):
        make_env("lcb", None, {"reward_spec": {"ground_truth": truth}})
