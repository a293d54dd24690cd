"""Right answers are rewarded and wrong ones are not, by the verdicts of `answers.py`."""

import sys

import pytest
from answers import AIME, ALGEBRA, FLEXIBLE, GSM8K, MATH, MATH_VERIFY, Answer
from episodes import play, reward
from isolation import strongest

from skyrl.envs import make_env
from skyrl.envs.tasks.answers import last_number, same_answer
from skyrl.envs.tasks.gsm8k import extract_answer
from skyrl.errors import ConfigError

TABLES = {"gsm8k": GSM8K, "gsm8k flexible": FLEXIBLE, "aime": AIME, "math": MATH, "math math-verify": MATH + ALGEBRA}
SETTINGS = {
    "gsm8k flexible": {"method": "flexible"},
    "math math-verify": {"comparison": "math-verify", "timeout": 6.0, "isolation": strongest()},
}
CASES = [pytest.param(table, answer, id=f"{table}: {answer.text[:30]!r} for {answer.gold!r}",
                      marks=pytest.mark.full if answer in ALGEBRA else ())
         for table, answers in TABLES.items() for answer in answers]  # fmt: skip


@pytest.mark.parametrize(("table", "answer"), CASES)
def test_an_answer_is_judged_as_the_table_says(table: str, answer: Answer):
    if table == "math math-verify":
        pytest.importorskip("math_verify", reason="math-verify is not installed")
    row = {"reward_spec": {"ground_truth": answer.gold}}
    assert (reward(table.split()[0], SETTINGS.get(table), row, answer.text) == 1.0) is answer.right


@pytest.mark.parametrize("env_id", ["gsm8k_multi_turn", "searchcode"])
@pytest.mark.parametrize("answer", GSM8K, ids=lambda answer: f"{answer.text[:30]!r} for {answer.gold!r}")
def test_what_ends_as_gsm8k_is_judged_like_it(env_id, answer):
    row = {"reward_spec": {"ground_truth": answer.gold}, "max_turns": 1}
    assert (reward(env_id, None, row, answer.text) == 1.0) is answer.right


@pytest.mark.gate
@pytest.mark.parametrize(("table", "answer"), [case for case in CASES if case.values[1].why == MATH_VERIFY])
def test_a_verdict_of_math_verify_is_its_own(table: str, answer: Answer):
    library = pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert library.verify(library.parse(f"\\boxed{{{answer.gold}}}"), library.parse(answer.text)) is answer.right


@pytest.mark.parametrize("piece", ["frac1", "$1", "\\text{", "1=", "a ", "{", "-(", ",000"])
def test_an_answer_cannot_make_its_judgement_slow(piece):
    """In time that grows with the square of its length this would run into the timeout of the suite."""
    long = piece * 1_000_000
    same_answer("1", long), last_number(long), extract_answer("#### 1" + long)


@pytest.mark.parametrize("answer", [answer for answer in ALGEBRA if answer.right], ids=lambda answer: answer.text)
def test_what_has_to_be_computed_is_not_right_by_its_text(answer):
    assert reward("math", None, {"reward_spec": {"ground_truth": answer.gold}}, answer.text) == 0.0


@pytest.mark.parametrize(("text", "boxed"), [("\\boxed{41}", 1.0), ("42", 0.0)])
def test_a_box_is_counted(text, boxed):
    (step,) = play("math", None, {"reward_model": {"ground_truth": "42"}}, text)
    assert (step.reward, step.metrics) == (0.0, {"boxed": boxed})


def test_math_verify_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"comparison=math-verify: it is not installed; pip install"):
        make_env("math", {"comparison": "math-verify"}, {"reward_spec": {"ground_truth": "42"}})
