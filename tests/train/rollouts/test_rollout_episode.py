import re

import numpy as np
import pytest
from scripted import (
    Answer,
    Reply,
    ScriptedEnv,
    ScriptedSampler,
    encode,
    generator,
    prompt,
    rollouts,
    run,
    run_one,
    user,
)

from skyrl.envs import EnvError
from skyrl.errors import ConfigError
from skyrl.train.config import EvalSamplingParams
from skyrl.train.rollouts.rows import rows_of
from skyrl.train.rollouts.trajectory import checked_rewards

ANSWER = Answer("One.<|im_end|>")
STEPS = {"step_wise_trajectories": True}
ENDLESS = [Reply([user("More.")])] * 20


def input_of(tokenizer, *messages) -> list[int]:
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)


def sampled_inputs(tokenizer, row, answers=(ANSWER,), **options):
    """(the trajectory, the inputs that the sampler was given)."""
    sampler = ScriptedSampler(tokenizer, list(answers))
    (trajectory,) = run(rollouts(tokenizer, sampler, **options).collect([row]))
    return trajectory, [call.prompt_ids for call in sampler.calls]


@pytest.mark.parametrize("options", [{}, STEPS], ids=["tokens", "steps"])
def test_an_input_that_is_too_long_is_never_sampled_from_and_one_that_just_fits_is(chatml, options):
    answer = {"role": "assistant", "content": "One."}
    second = input_of(chatml, user("Go."), answer, user("More."))
    fits, inputs = sampled_inputs(chatml, prompt(script=ENDLESS), max_input_length=len(second), max_turns=2, **options)
    assert (fits.stop_reason, inputs[1]) == ("max_turns", second)
    cut, inputs = sampled_inputs(
        chatml, prompt(script=ENDLESS), max_input_length=len(second) - 1, max_turns=2, **options
    )
    assert (cut.stop_reason, inputs) == ("length", [input_of(chatml, user("Go."))])


def test_what_was_sampled_before_an_input_grew_too_long_is_kept(chatml):
    trajectory, rows = run_one(
        chatml, [ANSWER], prompt(script=[Reply([user("More." * 40)], reward=0.5)]), max_input_length=40
    )
    assert (trajectory.stop_reason, trajectory.reward, len(rows)) == ("length", 0.5, 1)


def test_a_prompt_that_is_too_long_is_a_trajectory_without_turns(chatml):
    long, short = prompt(user("Go." * 100)), prompt(script=[Reply(reward=1.0, done=True)])
    sampler = ScriptedSampler(chatml, [ANSWER])
    first, second = run(rollouts(chatml, sampler, max_input_length=50).collect([long, short]))
    assert (first.stop_reason, first.turns, first.failure) == ("length", (), None)
    assert (second.stop_reason, second.reward) == ("stop", 1.0)
    assert ScriptedEnv.closed.total() == 2


@pytest.mark.parametrize("reward", [1, True, np.float32(0.5), np.int64(2)])
def test_a_reward_of_any_kind_of_number_becomes_a_float(chatml, reward):
    trajectory, _ = run_one(chatml, [ANSWER], prompt(script=[Reply(reward=reward, done=True)]))
    assert (type(trajectory.reward), trajectory.reward) == (float, float(reward))


def test_token_rewards_add_up_to_the_reward_within_what_float32_rounds():
    each = np.tile(np.float32([1000.1, -1000.1, 0.1]), 1000)
    total = float(each.cumsum(dtype=np.float32)[-1])
    assert abs(total - float(each.astype(np.float64).sum())) > 1e-4
    assert checked_rewards(total, each, len(each), "a step") == (total, each.tolist())
    with pytest.raises(ConfigError, match=r"a step has token_rewards that add up to 1.0, not to its reward=0.5"):
        checked_rewards(0.5, [0.25, 0.75], 2, "a step")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_token_reward_that_is_not_finite_is_named_whatever_the_reward_is(value):
    said = rf"a step: token_rewards\[1\]={value} is not finite; give a finite number"
    with pytest.raises(EnvError, match=said):
        checked_rewards(0.5, [0.25, value], 2, "a step")


def test_a_missing_token_reward_is_named():
    with pytest.raises(EnvError, match=r"a step: token_rewards\[0\]=None is not a number"):
        checked_rewards(0.5, [None, 0.5], 2, "a step")


@pytest.mark.parametrize("value", ["0.5", [1.0], 1j, {"score": 1.0}])
def test_a_reward_that_is_no_number_ends_the_run_and_names_the_environment(chatml, value):
    said = rf"trajectory .*: environment '.*': reward={re.escape(repr(value))} is of type {type(value).__name__}; give"
    with pytest.raises(ConfigError, match=said):
        run_one(chatml, [ANSWER], prompt(script=[Reply(reward=value, done=True)]))


def test_an_environment_that_never_ends_has_max_turns(chatml):
    trajectory, inputs = sampled_inputs(chatml, prompt(script=ENDLESS), max_turns=3)
    assert (trajectory.stop_reason, len(inputs)) == ("max_turns", 3)


def test_the_environment_is_told_how_many_turns_there_are(chatml):
    run_one(chatml, [ANSWER], prompt(script=[Reply(done=True)]), max_turns=5)
    assert ScriptedEnv.columns[0]["max_turns"] == 5


def test_the_environment_reads_the_text_without_the_end_of_sequence_token(chatml):
    run_one(chatml, [ANSWER], prompt(script=[Reply(done=True)]))
    assert ScriptedEnv.actions == ["One."]


def test_the_environment_may_rewrite_the_prompt(chatml):
    system = {"role": "system", "content": "Be brief."}
    trajectory, inputs = sampled_inputs(chatml, prompt(script=[Reply(done=True)], preface=[system]))
    assert inputs == [input_of(chatml, system, user("Go."))]
    assert trajectory.messages == [system, user("Go.")]


def test_stop_strings_of_the_environment_are_added_to_those_of_the_configuration(chatml):
    sampler = ScriptedSampler(chatml, [ANSWER])
    runs = rollouts(chatml, sampler, sampling_params={"stop": ["</a>", "</b>"], "temperature": 0.5})
    run(runs.collect([prompt(script=[Reply(done=True)], stop=("</b>", "</c>"))]))
    (call,) = sampler.calls
    assert (call.params.stop, call.params.temperature) == (["</a>", "</b>", "</c>"], 0.5)


def test_evaluation_has_its_own_sampling_parameters_and_number_of_samples(chatml):
    sampler = ScriptedSampler(chatml, [ANSWER])
    runs = rollouts(chatml, sampler, n_samples_per_prompt=4, eval_n_samples_per_prompt=2)
    trajectories = run(runs.collect([prompt(script=[Reply(done=True)])], phase="eval"))
    assert len(trajectories) == 2
    assert all(isinstance(call.params, EvalSamplingParams) and call.params.temperature == 0 for call in sampler.calls)


def test_all_calls_of_a_trajectory_have_its_session_and_no_other_has(chatml):
    sampler = ScriptedSampler(chatml, [ANSWER])
    runs = rollouts(chatml, sampler, n_samples_per_prompt=2, max_turns=3)
    run(runs.collect([prompt(name="p", script=ENDLESS)]))
    assert sampler.number == {"p_0": 3, "p_1": 3}


def test_every_sample_gets_columns_of_its_own(chatml):
    row = prompt(script=[Reply(done=True)])
    sampler = ScriptedSampler(chatml, [ANSWER])
    run(rollouts(chatml, sampler, n_samples_per_prompt=2).collect([row]))
    scripts = [row.extras["script"], *(columns["script"] for columns in ScriptedEnv.columns)]
    assert scripts[0] == scripts[1] == scripts[2]
    assert len({id(script) for script in scripts}) == 3


def test_metrics_of_turns_are_averaged_and_those_of_the_episode_added(chatml):
    script = [Reply([user("More.")], metrics={"tool_error": 1.0}), Reply(done=True, metrics={"tool_error": 0.0})]
    trajectory, _ = run_one(chatml, [ANSWER], prompt(script=script, metrics={"steps": 2.0}))
    assert trajectory.metrics == {"tool_error": 0.5, "steps": 2.0}


def test_a_turn_tells_what_was_said(chatml):
    script = [Reply([user("More.")], reward=0.5), Reply(done=True)]
    trajectory, _ = run_one(chatml, [ANSWER, Answer("Two.<|im_end|>")], prompt(script=script))
    assert [(turn.action, list(turn.observations)) for turn in trajectory.turns] == [
        ("One.", [user("More.")]),
        ("Two.", []),
    ]


def test_responses_without_logprobs_make_rows_without(chatml):
    class Silent(ScriptedSampler):
        async def sample(self, prompt_token_ids, params, session_id):
            sampled = await super().sample(prompt_token_ids, params, session_id)
            return type(sampled)(sampled.token_ids, None, sampled.stop_reason, sampled.policy_version)

    trajectories = run(rollouts(chatml, Silent(chatml, [ANSWER])).collect([prompt(script=[Reply(done=True)])]))
    (row,) = rows_of(trajectories, generator())
    assert row.logprobs is None
    assert row.token_ids[row.prompt_length :] == encode(chatml, "One.<|im_end|>")
