from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.train.config import GeneratorConfig
from skyrl.train.rl.evaluate import eval_rows
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.rows import Row, mask_stale, merge_turns, rows_of
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Failure, Trajectory, TrajectoryId, Turn

tokens = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def histories(draw) -> list[Turn]:
    """Turns whose inputs extend the one before, cut it, or have nothing to do with it."""
    turns: list[Turn] = []
    history: list[int] = []
    for number in range(draw(st.integers(1, 6))):
        kept = draw(st.sampled_from([len(history), len(history), len(history) // 2, 0]))
        prompt = [*history[:kept], *draw(tokens)] or [9]
        sampled = draw(tokens)
        logprobs = [-(number + 1) - 0.01 * i for i in range(len(sampled))]
        closing = draw(st.sampled_from([[], [7]]))
        turns.append(Turn(prompt, Sampled(sampled, logprobs, "stop", number), closing, reward=draw(st.integers(-2, 2))))
        history = prompt + sampled + draw(st.sampled_from([[], closing]))
    return turns


def rows_from(turns, merge=True) -> list[Row]:
    return [Row(segments) for segments in merge_turns(turns, merge=merge)]


def turn(prompt, sampled, **options) -> Turn:
    return Turn(prompt, Sampled(sampled, [-0.5] * len(sampled), "stop", 0), **options)


def trajectory(turns, stop_reason="stop", failure=None) -> Trajectory:
    return Trajectory(TrajectoryId("p", 0), turns, stop_reason, failure=failure)


@given(histories(), st.booleans())
def test_each_sampled_token_is_trained_on_once_with_its_logprob_and_nothing_else_is(turns, merge):
    trained = [
        (token, logprob)
        for row in rows_from(turns, merge)
        for token, mask, logprob in zip(row.token_ids, row.mask, row.logprobs or [], strict=True)
        if mask
    ]
    sampled = [pair for turn in turns for pair in zip(turn.sampled.token_ids, turn.sampled.logprobs or [], strict=True)]
    assert trained == sampled


@given(histories(), st.booleans())
def test_before_each_sampled_token_stands_exactly_what_the_sampler_saw(turns, merge):
    contexts = [
        row.token_ids[:position] for row in rows_from(turns, merge) for position, mask in enumerate(row.mask) if mask
    ]
    seen = [
        [*turn.prompt_ids, *turn.sampled.token_ids[:i]] for turn in turns for i in range(len(turn.sampled.token_ids))
    ]
    assert contexts == seen


@given(histories())
def test_a_row_ends_only_where_an_input_does_not_extend_it(turns):
    breaks = sum(
        list(after.prompt_ids[: len(before.prompt_ids) + len(before.sampled.token_ids)])
        != [*before.prompt_ids, *before.sampled.token_ids]
        for before, after in pairwise(turns)
    )
    assert len(rows_from(turns)) == 1 + breaks


@given(histories(), st.booleans())
def test_no_reward_is_lost(turns, merge):
    assert sum(sum(row.rewards) for row in rows_from(turns, merge)) == sum(turn.reward for turn in turns)


def test_the_reward_of_a_turn_without_tokens_is_added_to_the_last_token_before_it():
    (row,) = rows_from([turn([1], [2, 3], reward=1.0, token_rewards=[0.25, 0.75]), turn([1, 2, 3], [], reward=4.0)])
    assert row.rewards == [0, 0.25, 4.75]


@given(histories(), st.booleans())
def test_every_list_of_a_row_has_one_entry_per_token(turns, merge):
    for row in rows_from(turns, merge):
        lists = (row.mask, row.logprobs, row.rewards, row.policy_versions)
        assert {len(values or []) for values in lists} == {len(row.token_ids)}


def test_what_is_between_two_turns_is_not_trained_on():
    (row,) = rows_from([turn([1, 2], [3, 4], reward=0.5), turn([1, 2, 3, 4, 5, 6], [7], reward=1.0)])
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert row.mask == [False, False, True, True, False, False, True]
    assert row.rewards == [0, 0, 0, 0.5, 0, 0, 1.0]
    assert row.logprobs == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert row.policy_versions == [None, None, 0, 0, None, None, 0]
    assert row.prompt_length == 2


def test_an_input_that_was_rewritten_starts_a_row():
    first, second = rows_from([turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6])])
    assert (first.token_ids, first.mask) == ([1, 2, 3, 4], [False, False, True, True])
    assert (second.token_ids, second.mask) == ([1, 2, 4, 5, 6], [False, False, False, False, True])


def test_closing_tokens_end_a_row_with_mask_0_and_are_not_doubled_where_the_next_input_has_them():
    (row,) = rows_from([turn([1], [2], closing_ids=[9]), turn([1, 2, 9, 3], [4], closing_ids=[9], reward=1.0)])
    assert (row.token_ids, row.mask) == ([1, 2, 9, 3, 4, 9], [False, True, False, False, True, False])
    assert row.rewards == [0, 0, 0, 0, 1.0, 0]


def test_a_row_with_a_response_without_logprobs_has_none():
    without = Turn([1], Sampled([2], None, "stop", 0))
    assert Row(merge_turns([without])[0]).logprobs is None


def test_a_sampler_that_loses_logprobs_is_told_so():
    with pytest.raises(ValueError, match="gave 1 logprobs for 2 token_ids; give one for each"):
        Sampled([1, 2], [-0.5], "stop", 0)


def test_step_wise_rows_are_turns_with_their_own_rewards():
    turns = [turn([1], [2], reward=0.25), turn([1, 2, 3], [4], reward=1.0)]
    rows = rows_of([trajectory(turns)], GeneratorConfig(step_wise_trajectories=True))
    assert [row.token_ids for row in rows] == [[1, 2], [1, 2, 3, 4]]
    assert [row.rewards for row in rows] == [[0, 0.25], [0, 0, 0, 1.0]]
    assert [row.is_last_step for row in rows] == [False, True]


def test_rows_say_which_trajectory_they_are_of():
    forked = trajectory([turn([1], [2]), turn([5], [6])])
    rows = rows_of([trajectory([turn([1], [2])]), forked], GeneratorConfig())
    assert [row.trajectory for row in rows] == [0, 1, 1]


@pytest.mark.parametrize("stop_reason", ["length", "max_turns"])
def test_overlong_filtering_takes_all_rows_of_a_trajectory_that_did_not_end_out_of_the_loss(stop_reason):
    forked = [turn([1], [2], reward=1.0), turn([5], [6])]
    config = GeneratorConfig(apply_overlong_filtering=True)
    rows = rows_of([trajectory(forked, stop_reason), trajectory(forked)], config)
    assert [any(row.mask) for row in rows] == [False, False, True, True]
    assert [sum(row.rewards) for row in rows] == [1.0, 0, 1.0, 0]


def test_rewards_of_a_trajectory_that_did_not_end_are_zeroed_on_demand():
    forked = [turn([1], [2], reward=1.0), turn([5], [6])]
    config = GeneratorConfig(zero_reward_on_non_stop=True)
    rows = rows_of([trajectory(forked, "length"), trajectory(forked)], config)
    assert [sum(row.rewards) for row in rows] == [0, 0, 1.0, 0]
    assert all(any(row.mask) for row in rows)


def test_tokens_of_weights_that_are_too_old_are_not_trained_on_and_stay_where_they_are():
    old, new = (Sampled([number], [-0.5], "stop", number) for number in (3, 4))
    turns = [Turn([1], old, reward=1.0), Turn([1, 3, 2], new, reward=2.0)]
    (row,) = mask_stale(rows_of([trajectory(turns)], GeneratorConfig()), oldest=4)
    assert (row.token_ids, row.mask) == ([1, 3, 2, 4], [False, False, False, True])
    assert (row.rewards, row.logprobs) == ([0.0, 1.0, 0.0, 2.0], [0.0, -0.5, 0.0, -0.5])


def test_a_failed_trajectory_and_one_without_a_turn_have_no_rows():
    failed = trajectory([turn([1], [2])], "failed", Failure("env_error", "boom"))
    assert rows_of([failed, trajectory([], "length")], GeneratorConfig()) == []


def test_an_evaluation_of_several_turns_is_dumped_with_what_the_environment_answered():
    turns = [
        turn([1], [2], action="first", observations=[{"role": "user", "content": "again"}]),
        turn([1, 2], [3], action="second"),
    ]
    prompt = Prompt([{"role": "user", "content": "Q"}], "arithmetic", "p", {})
    [row] = eval_rows([prompt], [trajectory(turns)])
    assert row.output_response == [
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "second"},
    ]
    [row] = eval_rows([prompt], [trajectory(turns[:1])])
    assert row.output_response == "first"
