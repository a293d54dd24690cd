"""Rewards compared with those of skyrl-gym 0.4.0, on random inputs; where they differ on purpose, by one table.

Numbers are written plainly in the random inputs, since answers.py is the judge of how else they may be written. Those
of `lcb` are in test_lcb.py, with a table of their own. That `aime` reads another column, and needs a text there, is in
test_single_turn_maths.py.
"""

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import skyrl_gym
from episodes import play
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from skyrl_gym.envs.sql.utils import verify_format_and_extract

from skyrl.envs import EnvError
from skyrl.envs.tasks.answers import normalize as normalize_answer
from skyrl.envs.tasks.search import normalize
from skyrl.envs.tasks.text2sql import extract_solution

few = settings(max_examples=200, deadline=None)
quick = settings(max_examples=30, deadline=None)


def theirs(env_id: str, config: Any, extras: dict, *turns: str) -> list[tuple[float, bool, int]]:
    """(reward, done, new messages) of each step of an episode of skyrl-gym."""
    env = skyrl_gym.make(env_id, env_config=config, extras=extras)
    env.init([{"role": "user", "content": "?"}])
    steps = [env.step(turn) for turn in turns]
    env.close()
    return [(float(step["reward"]), step["done"], len(step["observations"])) for step in steps]


def ours(env_id: str, config: Any, extras: dict, *turns: str) -> list[tuple[float, bool, int]]:
    """The same of an episode of ours."""
    plain = OmegaConf.to_container(config) if isinstance(config, DictConfig) else None
    return [(step.reward, step.done, len(step.observations)) for step in play(env_id, plain, extras, *turns)]


def texts(*pieces: str, without: str = "") -> st.SearchStrategy[str]:
    """Texts of these pieces and of arbitrary ones that have none of the characters `without`, in any order."""
    any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=without), max_size=3)
    return st.lists(st.one_of(st.sampled_from(pieces), any_text), max_size=8).map("".join)


PLAIN = (
    "#### 42\n",
    "#### -42\n",
    "#### 1,000\n",
    "#### 4.2\n",
    "#### 42 so\n",
    "#### \n",
    "#### so ",
    "####42\n",
    "####",
)
solutions = texts(*PLAIN, "42", "-42", "4", "2", "$", "\n", "so ", without="# \t")


def spec(truth: object) -> dict:
    return {"reward_spec": {"ground_truth": truth}}


def aime_row(truth: str) -> dict:
    return {"reward_model": {"ground_truth": truth}}


@pytest.mark.parametrize("env_id", ["gsm8k", "searchcode"])
@few
@given(text=solutions, truth=st.sampled_from(["42", "-42", "1000", "4.2"]))
def test_the_number_after_the_mark_is_rewarded_the_same(env_id, text, truth):
    extras = {**spec(truth), "max_turns": 1}
    assert ours(env_id, None, extras, text) == theirs(env_id, None, extras, text)


@few
@given(st.lists(solutions, min_size=1, max_size=4), st.integers(1, 4))
def test_gsm8k_multi_turn_takes_the_same_course(turns, most):
    extras = {**spec("42"), "max_turns": most, "extra_info": {}}
    course = theirs("gsm8k_multi_turn", None, extras, *turns)
    end = next((i + 1 for i, (_, done, _) in enumerate(course) if done), len(turns))
    assert ours("gsm8k_multi_turn", None, extras, *turns[:end]) == course[:end]


MATHS = texts(
    *(
        "Answer:",
        "answer : ",
        "\n",
        "<",
        "x=",
        " ",
        "$",
        "\\frac12",
        "\\frac{1}{2}",
        "\\sqrt3",
        "7",
        "1,000",
    ),
    *(
        "\\text{and}",
        ",\\text{and}",
        "\\text{s}",
        "\\text{m}",
        "mbox{x}",
        "\\$",
        ".$",
        "a ",
        "an ",
        "square units",
        "dollars",
    ),
    *(
        "\\textbf{8}",
        "\\overline{AB}",
        "^\\circ",
        "^{\\circ}",
        "{,}",
        ",\\!",
        "\\;",
        '"',
        "\\ldots",
        "}",
        "\\mathrm{th}",
    ),
    without="\\.,;:=*_`$",
)


@few
@given(
    MATHS, st.one_of(st.sampled_from(["7", "\\frac{1}{2}", "1000", "\\sqrt{3}", "[INVALID]x"]), MATHS), st.booleans()
)
def test_aime_rewards_the_same(text, truth, quote):
    truth = truth.strip()
    text = f"{text}\nAnswer: {truth}" if quote else text
    # What is empty when normalised is in the table below.
    assume(normalize_answer(truth) and "answer" not in truth.lower() and "$$" not in text + "\n" + truth)
    extras = {"reward_model": {"ground_truth": truth}}
    assert ours("aime", None, extras, text) == theirs("aime", None, extras, text)


ANSWERS = texts("Paris", "the ", "a ", " city", ".", ",", "of", "  ", "É", "An ", "'s", "_")


@pytest.mark.full
@few
@given(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=3), ANSWERS, st.booleans())
def test_search_rewards_the_same(answer, targets, around, copy):
    answer = targets[-1].upper() if copy else answer
    # What is empty without articles is in the table below.
    assume(all(set(normalize(text).split()) - {"a", "an", "the"} for text in [answer, *targets]))
    config = OmegaConf.create({"search_url": "http://127.0.0.1:1/", "topk": 3, "timeout": 1, "log_requests": False})
    text = f"<answer>{around}</answer>{around}<answer>{answer}</answer>{around}"
    extras = {"reward_spec": {"ground_truth": {"target": targets}}}
    assert ours("search", config, extras, text) == theirs("search", config, extras, text)


TAGS = texts("<think>", "</think>", "<think>a</think>", "<sql>", "</sql>", "<solution>", "</solution>", "q", "<Think>")


@few
@given(st.one_of(TAGS, TAGS.map(lambda text: f"<think>a</think>{text}<solution>q</solution>")))
def test_text2sql_takes_the_same_solution_from_a_turn(text):
    valid, _, solution, _ = verify_format_and_extract(text)
    assert extract_solution([text]) == (solution if valid else None)


TURNS = ["<think>a</think><sql>p</sql>", "<sql>p</sql>", " <think>b</think>", ""]
LAST = ["<think>c</think><solution>q</solution>", "<solution>q</solution>", "<think>c</think>", "<solution>q"]


@few
@given(st.lists(st.sampled_from(TURNS), max_size=3), st.sampled_from(LAST))
def test_text2sql_takes_the_same_solution_from_an_episode(turns, last):
    history = "".join(f"{turn}\n\n<observation>r</observation>\n\n" for turn in turns) + last
    valid, _, solution, _ = verify_format_and_extract(history)
    assert extract_solution([*turns, last]) == (solution if valid else None)


@pytest.fixture(scope="module")
def sql_config(tmp_path_factory) -> DictConfig:
    folder: Path = tmp_path_factory.mktemp("sql")
    (folder / "spider/database/d").mkdir(parents=True)
    with sqlite3.connect(folder / "spider/database/d/d.sqlite") as connection:
        connection.execute("create table t (a integer, b text)")
        connection.executemany("insert into t values (?, ?)", [(1, "x"), (2, "y"), (2, "z"), (None, "x")])
    connection.close()
    return OmegaConf.create({"db_path": str(folder)})


def sql_row(gold: str) -> dict:
    return {"db_id": "d", "data": "spider", "max_turns": 3, **spec(gold)}


def solved(sql: str) -> str:
    return f"<think>a</think><solution>{sql}</solution>"


DISTINCT_ROWS = [
    "select a, b from t",
    "select b, a from t",
    "select distinct b from t",
    "select b from t group by b",
    "select count(*) from t",
    "select 4",
    "select 4.0",
    "select max(a) from t where a > 2",
    "select null",
    "select nothing from t",
]


@quick
@given(st.sampled_from(DISTINCT_ROWS[:-1]), st.sampled_from(DISTINCT_ROWS))
def test_text2sql_rewards_the_same_where_rows_differ(sql_config, gold, sql):
    assume(" from " in sql or " from " not in gold)
    arguments = ("text2sql", sql_config, sql_row(gold), solved(sql))
    assert ours(*arguments) == theirs(*arguments)


def test_text2sql_refuses_a_gold_query_without_rows_which_skyrl_gym_does_not(sql_config):
    arguments = ("text2sql", sql_config, sql_row("select a from t where a > 2"), solved("select 0, 0 where 0"))
    assert theirs(*arguments) == [(1.0, True, 0)]
    with pytest.raises(EnvError, match="returns no rows"):
        ours(*arguments)


class Difference(NamedTuple):
    """A case in which we give another reward on purpose."""

    env_id: str
    why: str
    extras: dict
    turns: tuple[str, ...]
    theirs: float
    ours: float


SMUGGLED = "<think>a</think><sql>select '</observation><think>b</think><solu' || 'tion>select 4</solu' || 'tion>'</sql>"
DIFFERENCES = [
    Difference("gsm8k", "the gold answer is a number", spec(42), ("#### 42",), 0.0, 1.0),
    Difference("gsm8k", "the gold answer has separators", spec("1,000"), ("#### 1,000",), 0.0, 1.0),
    Difference("gsm8k", "a final point is none of the number", spec("42"), ("#### 42.",), 0.0, 1.0),
    Difference("gsm8k", "nor is the sign of a currency", spec("42"), ("#### $42",), 0.0, 1.0),
    Difference("gsm8k", "numbers are compared as such", spec("42"), ("#### 42.00",), 0.0, 1.0),
    Difference("gsm8k", "what goes on in letters is no number", spec("42"), ("#### 42abc",), 1.0, 0.0),
    Difference("gsm8k", "what goes on as a sum is another number", spec("42"), ("#### 42-43",), 1.0, 0.0),
    Difference("gsm8k", "commas are between thousands", spec("42"), ("#### 4,2",), 1.0, 0.0),
    Difference("gsm8k", "an empty gold answer is no answer", spec(""), ("#### ,",), 1.0, 0.0),
    Difference("aime", "a box is an answer", aime_row("42"), ("\\boxed{42}",), -1.0, 1.0),
    Difference("aime", "emphasis is none of the answer", aime_row("42"), ("**Answer:** 42",), -1.0, 1.0),
    Difference("aime", "nor is a final point", aime_row("42"), ("Answer: 42.",), -1.0, 1.0),
    Difference("aime", "numbers are compared as such", aime_row("025"), ("Answer: 25",), -1.0, 1.0),
    Difference("aime", "commas are between thousands", aime_row("42"), ("Answer: 4,2",), 1.0, -1.0),
    Difference("aime", "an equation of two numbers is neither", aime_row("42"), ("Answer: 41=42",), 1.0, -1.0),
    Difference("aime", "an empty gold answer is no answer", aime_row(""), ("Answer: units",), 1.0, -1.0),
    Difference("search", "an empty answer equals no target", spec({"target": "the"}), ("<answer></answer>",), 1.0, 0.0),
    Difference("search", "articles count if alone", spec({"target": "A"}), ("<answer>The</answer>",), 1.0, 0.0),
    Difference(
        "searchcode", "what a program prints is not read for the reward",
        {**spec("42"), "max_turns": 2}, ("<tool><python>print('#### ' + str(42))</python></tool>", "above"), 1.0, 0.0,
    ),
    Difference(
        "searchcode", "a mark in an earlier turn is no answer",
        {**spec("42"), "max_turns": 2}, ("#### 1 is my plan", "<solution>#### 42</solution>"), 0.0, 1.0,
    ),
    Difference(
        "text2sql", "order counts if asked for",
        sql_row("select b from t order by b"), (solved("select b from t order by b desc"),), 1.0, 0.0,
    ),
    Difference(
        "text2sql", "duplicates count", sql_row("select a from t"), (solved("select distinct a from t"),), 1.0, 0.0
    ),
    Difference(
        "text2sql", "a constant is no answer to a question about tables",
        sql_row("select count(*) from t"), (solved("select 4"),), 1.0, 0.0,
    ),
    Difference(
        "text2sql", "the result of a query is not read for the reward",
        sql_row("select 4"), (SMUGGLED, "<think>c</think>", "<think>d</think>"), 1.0, -1.0,
    ),
    Difference(
        "text2sql", "a result that holds a tag does not spoil the solution",
        sql_row("select 4"), ("<think>a</think><sql>select '<solu' || 'tion>'</sql>", solved("select 4")), -1.0, 1.0,
    ),
    Difference(
        "text2sql", "a turn may not write a result itself",
        sql_row("select 4"), ("<think>a</think><observation>4</observation>" + solved("select 4"),), 1.0, -1.0,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: f"{case.env_id}: {case.why}")
def test_a_difference_is_as_documented(case, sql_config, monkeypatch):
    monkeypatch.setenv(
        "PATH", str(Path(sys.executable).parent), prepend=os.pathsep
    )  # for their tool, which runs "python"
    search = OmegaConf.create({"search_url": "http://127.0.0.1:1/", "topk": 3, "timeout": 1, "log_requests": False})
    config = {"text2sql": sql_config, "search": search}.get(case.env_id)
    assert theirs(case.env_id, config, case.extras, *case.turns)[-1][0] == case.theirs
    assert ours(case.env_id, config, case.extras, *case.turns)[-1][0] == case.ours
