"""Right answers are rewarded and wrong ones are not, by the verdicts of `answers.py`."""

import time

import pytest
from answers import AIME, FLEXIBLE, GSM8K, MATH_VERIFY, Answer
from episodes import reward

from skyrl.envs.answers import last_number, same_answer
from skyrl.envs.gsm8k import extract_answer

TABLES = {"gsm8k": GSM8K, "gsm8k flexible": FLEXIBLE, "aime": AIME}
SETTINGS = {"gsm8k flexible": {"method": "flexible"}}
CASES = [pytest.param(table, answer, id=f"{table}: {answer.text[:30]!r} for {answer.gold!r}")
         for table, answers in TABLES.items() for answer in answers]  # fmt: skip


@pytest.mark.parametrize(("table", "answer"), CASES)
def test_an_answer_is_judged_as_the_table_says(table: str, answer: Answer):
    row = {"reward_spec": {"ground_truth": answer.gold}}
    assert (reward(table.split()[0], SETTINGS.get(table), row, answer.text) == 1.0) is answer.right


@pytest.mark.parametrize("env_id", ["gsm8k_multi_turn", "searchcode"])
@pytest.mark.parametrize("answer", GSM8K, ids=lambda answer: f"{answer.text[:30]!r} for {answer.gold!r}")
def test_what_ends_as_gsm8k_is_judged_like_it(env_id, answer):
    row = {"reward_spec": {"ground_truth": answer.gold}, "max_turns": 1}
    assert (reward(env_id, None, row, answer.text) == 1.0) is answer.right


@pytest.mark.parametrize(("table", "answer"), [case for case in CASES if case.values[1].why == MATH_VERIFY])
def test_a_verdict_of_math_verify_is_its_own(table: str, answer: Answer):
    library = pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert library.verify(library.parse(str(answer.gold)), library.parse(answer.text)) is answer.right


@pytest.mark.parametrize("piece", ["frac1", "$1", "\\text{", "1=", "a ", "{", "-(", ",000"])
def test_an_answer_cannot_make_its_judgement_slow(piece):
    start = time.perf_counter()
    same_answer("1", piece * 20_000), last_number(piece * 20_000), extract_answer("#### 1" + piece * 20_000)
    assert time.perf_counter() - start < 5
