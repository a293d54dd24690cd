"""Published data sets of mathematics. Each has a function that reads question and answer, and an environment.

To add one, write a function that converts a row to a `Problem`, and add a line to `PUBLISHED`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from skyrl.envs.tasks.answers import last_boxed, number_at, same_answer
from skyrl.errors import ConfigError
from skyrl.utils.chats import read_chat, short

_UNBRACED = re.compile(r"\\boxed +([^\s{$][^$\n]*?) *(?=\$|$)", re.MULTILINE)
"""`\\boxed` without braces. Its content extends to the end of the formula. A few rows of MATH have it."""


class Problem(NamedTuple):
    """Question and answer of a row."""

    messages: list[dict[str, Any]]
    ground_truth: str
    """Gold answer, in the format of the environment."""
    data_source: str
    extra: Mapping[str, Any]
    """Additional values for `extra_info`."""


@dataclass(frozen=True)
class Published:
    """A published data set."""

    hub_id: str
    """Id on the Hugging Face hub, also shown in messages and help."""
    env_class: str
    """Environment that scores answers to its questions."""
    problem: Callable[[Mapping[str, Any], str], Problem]
    """Converts a row. The second argument names the row in messages. Raises ConfigError if the row is unusable."""
    instruction: str = ""
    """Default text after each question. It asks for the answer format that the environment reads."""


def gsm8k(row: Mapping[str, Any], where: str) -> Problem:
    """Convert a row with `question` and `answer`. The answer ends in a number after `####`, such as `#### 42`."""
    question, answer = (_text(row, name, where) for name in ("question", "answer"))
    _, mark, end = answer.rpartition("####")
    if not mark:
        raise ConfigError(f"{where}: answer={_end(answer)} has no ####, after which the number stands; correct the row")
    if number_at(end.strip(), 0) is None:
        raise ConfigError(f"{where}: answer={_end(answer)} has no number after ####; correct the row")
    return Problem(_asked(question), end.strip().replace(",", ""), "openai/gsm8k", {})


def math(row: Mapping[str, Any], where: str) -> Problem:
    """Convert a row with `problem` and `solution`. The last box of the solution has the answer.

    `level`, `type` and `subject` are optional.
    """
    question, solution = (_text(row, name, where) for name in ("problem", "solution"))
    braced = _UNBRACED.sub(lambda box: f"\\boxed{{{box[1]}}}", solution)
    box = last_boxed(braced) or last_boxed(braced.replace("\\fbox", "\\boxed"))
    if box is None:
        raise ConfigError(f"{where}: solution={_end(solution)} has no \\boxed{{...}} that ends; correct the row")
    answer = _matched(box[1].strip(), "the box of solution", where)
    extra = {name: row[name] for name in ("level", "type", "subject") if row.get(name) is not None}
    return Problem(_asked(question), answer, "math", extra)


def dapo_math(row: Mapping[str, Any], where: str) -> Problem:
    """Convert a row with `prompt` (messages that ask for a line `Answer:`) and `reward_model.ground_truth`.

    `data_source` and `extra_info` are optional.
    """
    try:
        messages = read_chat(_column(row, "prompt", where), "prompt")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(messages[-1]["content"], str):
        raise ConfigError(f"{where}: prompt ends in {short(messages[-1])}, whose content is no text; correct the row")
    model = _column(row, "reward_model", where)
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise ConfigError(f"{where}: reward_model={short(model)} has no ground_truth; write the answer there")
    answer = _matched(str(model["ground_truth"]).strip(), "reward_model.ground_truth", where)
    extra = row.get("extra_info")
    return Problem(
        messages, answer, str(row.get("data_source") or "math_dapo"), extra if isinstance(extra, Mapping) else {}
    )


PUBLISHED: dict[str, Published] = {
    "gsm8k": Published(
        "openai/gsm8k", "gsm8k", gsm8k, 'Reason step by step, and end with the final answer in the form "#### ANSWER".'
    ),
    "math": Published(
        "DigitalLearningGmbH/MATH-lighteval",
        "math",
        math,
        "Reason step by step, and put the final answer within \\boxed{}.",
    ),
    "dapo-math": Published("BytedTsinghua-SIA/DAPO-Math-17k", "aime", dapo_math),
}
"""Data sets, by their names in `skyrl data prepare`."""


def _asked(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question.strip()}]


def _column(row: Mapping[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise ConfigError(f"{where}: has no column {name}, but {', '.join(row)}; rename the column that has it")
    return row[name]


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = _column(row, name, where)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {name}={short(value)} is not a text; correct the row")
    return value


@cache
def _equals_itself(answer: str) -> bool:
    """Return True if the answer equals itself. An answer that cannot be parsed does not.

    Cached: DAPO-Math repeats each answer many times.
    """
    return same_answer(answer, answer)


def _matched(answer: str, name: str, where: str) -> str:
    """Return the answer. Raises ConfigError if not even an identical answer would be scored as correct."""
    if not _equals_itself(answer):
        raise ConfigError(f"{where}: {name} has the answer {short(answer)}, which no answer equals; correct the row")
    return answer


def _end(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"...{text[-57:]!r}"
