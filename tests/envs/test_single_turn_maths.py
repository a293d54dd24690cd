"""`gsm8k`, `gsm8k_multi_turn` and `aime`: what they say besides the rewards that test_against_skyrl_gym.py compares."""

import asyncio

import pytest
from episodes import play, reward

from skyrl.envs import make_env

ROW = {"reward_spec": {"ground_truth": "42"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 42", 1.0),
        ("#### 41 #### 42", 0.0),
        ("#### 42 #### 41", 1.0),
        ("42", 0.0),
        ("####42", 0.0),
    ],
)
def test_the_first_answer_in_the_right_form_counts(text, expected):
    assert reward("gsm8k", None, ROW, text) == expected


def test_form_alone_earns_a_fifth_at_most():
    steps = play("gsm8k_multi_turn", None, {**ROW, "max_turns": 4}, *["#### 1"] * 4)
    assert sum(step.reward for step in steps) == pytest.approx(0.2) and steps[-1].done


def test_the_last_turn_is_announced():
    steps = play("gsm8k_multi_turn", None, {**ROW, "max_turns": 3}, "?", "?", "?")
    asked = [message["content"] for step in steps for message in step.observations]
    assert len(asked) == 2 and "step by step" in asked[0] and "nothing but your final" in asked[1]


@pytest.mark.parametrize(
    ("extras", "turns"),
    [({}, 5), ({"extra_info": {"max_turns": 2}}, 2), ({"extra_info": {"max_turns": 2}, "max_turns": 3}, 3)],
)
def test_the_rollouts_limit_goes_before_the_rows_and_that_before_the_default(extras, turns):
    assert play("gsm8k_multi_turn", None, {**ROW, **extras}, *["?"] * turns)[-1].done


def test_turns_are_counted():
    async def episode():
        env = make_env("gsm8k_multi_turn", None, ROW)
        await env.step("?")
        await env.step("#### 42")
        return env.metrics()

    assert asyncio.run(episode()) == {"steps": 2.0}


@pytest.mark.parametrize("column", ["reward_spec", "reward_model"])
@pytest.mark.parametrize("truth", ["42", 42])
def test_aime_takes_the_answer_from_either_column(column, truth):
    assert reward("aime", None, {column: {"ground_truth": truth}}, "Answer: 42") == 1.0


@pytest.mark.parametrize(("settings", "wrong"), [(None, -1.0), ({"wrong_reward": 0.0}, 0.0)])
def test_aime_gives_a_wrong_answer_the_reward_of_the_settings_and_accuracy_0(settings, wrong):
    (step,) = play("aime", settings, ROW, "Answer: 41")
    assert (step.reward, step.metrics) == (wrong, {"acc": 0.0})


def test_aime_reads_the_end_of_the_solution():
    assert reward("aime", None, ROW, "Answer: 42" + " " * 300) == -1.0
    assert reward("aime", None, ROW, "Answer: 41\n" + " " * 250 + "Answer: 42") == 1.0
