"""The environment `searchcode`: its two tools, and what is rewarded."""

import pytest
from episodes import play, reward
from http_server import closed_port, serving

from skyrl.envs import EnvError
from skyrl.envs.services import http
from skyrl.envs.services.retrieval import Document, Index, create_app

ROW = {"reward_spec": {"ground_truth": "42"}, "max_turns": 3}


def told(action: str, settings: dict | None = None) -> str:
    """Return the model's observation after `action`, which does not end the episode."""
    (step,) = play("searchcode", settings, ROW, action)
    assert (step.reward, step.done) == (0.0, False)
    (message,) = step.observations
    assert message["role"] == "user"
    return message["content"]


def python(code: str) -> str:
    return f"<tool><python>{code}</python></tool>"


def test_a_program_is_run():
    assert told(python("print(6 * 7)")) == "42"


@pytest.mark.full("while True: pass-The program was stopped after 0.2 s.")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("print('so far'); 1 / 0", "so far"),
        ("x = 1", "The program printed nothing."),
        ("while True: pass", "The program was stopped after 0.2 s."),
        ("import ctypes; ctypes.string_at(0)", "The program crashed."),
    ],
)
def test_the_model_is_told_what_went_wrong(code, expected):
    assert expected in told(python(code), {"code_timeout": 0.2})


def test_a_long_output_is_cut():
    assert len(told(python("print('x' * 100000)"))) < 10_000


def test_a_program_does_not_see_our_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert "sk-secret" not in told(python("import os; print(os.environ); print(open('/proc/1/environ').read())"))


def test_a_search_is_made():
    with serving(create_app(Index([Document(id=1, contents="Cats sleep.")]))) as address:
        found = told("<tool> <search>cats</search> </tool>", {"search_url": f"{address}/retrieve"})
    assert found == "Doc 1: Cats sleep.\n"


def test_a_search_engine_that_is_down_is_a_failure(monkeypatch):
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.0)
    with pytest.raises(EnvError, match="is the server running"):
        told("<tool><search>cats</search></tool>", {"search_url": f"http://127.0.0.1:{closed_port()}/retrieve"})


@pytest.mark.parametrize(
    "action", ["I think.", "<tool>6 * 7</tool>", "<tool><shell>ls</shell></tool>", "<python>1</python>"]
)
def test_a_turn_without_a_call_gets_a_hint(action):
    assert "<tool><python>...</python></tool> or <tool><search>...</search></tool>" in told(action)


@pytest.mark.parametrize(
    ("last", "expected"), [("<solution>#### 42</solution>", 1.0), ("<solution>42</solution>", 0.0), ("#### 42", 1.0)]
)
def test_the_number_in_the_last_turn_counts(last, expected):
    turns = [python("print(1) #### 41"), "hm", last]
    assert reward("searchcode", None, ROW, *turns) == expected


def test_an_answer_that_a_program_prints_is_not_rewarded():
    assert (
        reward("searchcode", None, {**ROW, "max_turns": 2}, python("print('#### ' + str(42))"), "It is above.") == 0.0
    )
