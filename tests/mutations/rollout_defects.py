"""Defects of rollouts, which train on what was never sampled or let one failure spoil a run, as in `defects.py`.

The numbers are those of the list of known defects of trainers.
"""

from defects import Defect, Edit

ROLLOUTS = "skyrl/train/rollouts/"
TESTS = "tests/train/rollouts/"
FAULTS = TESTS + "test_rollout_faults.py::"
TOKENS = TESTS + "test_rollout_tokens.py::"

ROLLOUT_DEFECTS = [
    Defect(
        "G1.1",
        "rewards of tokens are put at the last token of their turn",
        [Edit(ROLLOUTS + "rows.py", "if self.token_rewards is not None:", "if False:")],
        [TESTS + "test_generators.py::test_turns_of_a_generator_make_one_row_with_rewards_at_their_tokens"],
    ),
    Defect(
        "G1.1b",
        "a token reward that is not finite is trained on beside a finite reward",
        [Edit(ROLLOUTS + "trajectory.py", "if not math.isfinite(number):", "if math.isinf(number):")],
        [TESTS + "test_rollout_episode.py::test_a_token_reward_that_is_not_finite_is_named_whatever_the_reward_is"],
    ),
    Defect(
        "G1.1c",
        "turns of rollouts run past the token with which the template ends them",
        [
            Edit(
                ROLLOUTS + "rollouts.py",
                '(more.get("stop_token_ids") or ()), token]',
                '(more.get("stop_token_ids") or ())]',
            )
        ],
        ["tests/train/test_turn_ends.py::test_a_turn_of_a_rollout_ends_where_its_template_ends_it"],
    ),
    Defect(
        "G1.1d",
        "sampling stops at what the files name as the end, and not at the end of a turn of the chat template",
        [
            Edit(
                "skyrl/utils/tokenizer.py",
                "union(*self._named_ids.values(), self._of_template)",
                "union(*self._named_ids.values())",
            )
        ],
        [
            "tests/utils/test_chat_template.py::test_a_sequence_ends_where_the_template_ends_a_turn_whatever_the_files_say[all]"
        ],
    ),
    Defect(
        "G1.2",
        "the weight of a reward function is not looked at",
        [Edit("skyrl/envs/reward_function.py", "reward += term.weight * result.reward", "reward += result.reward")],
        ["tests/envs/test_reward_function.py::test_a_sum_of_functions_is_weighted_and_tells_each_reward_by_its_name"],
    ),
    Defect(
        "G1.3",
        "the test of a generator does not look at what the policy was given",
        [
            Edit(
                ROLLOUTS + "generators/conformance.py",
                "if not any(list(turn.prompt_ids) == prompt for",
                "if not any(True for",
            )
        ],
        [TESTS + "test_generators.py::test_a_generator_that_breaks_a_rule_is_told_which[ForgetsThePrompt]"],
    ),
    Defect(
        "F1.9a",
        "the length of an input is checked a turn late, before it is rendered anew",
        [
            Edit(
                ROLLOUTS + "episode.py",
                "if len(prompt_ids) > limit:",
                "if len(self.turns[-1].prompt_ids if self.turns else prompt_ids) > limit:",
            )
        ],
        [
            TESTS + "test_rollout_episode.py::"
            "test_an_input_that_is_too_long_is_never_sampled_from_and_one_that_just_fits_is[steps]"
        ],
    ),
    Defect(
        "F1.9b",
        "a prompt that is too long is an error",
        [
            Edit(
                ROLLOUTS + "episode.py",
                '                return "length"\n',
                '                return "length" if self.turns[-1].prompt_ids else "stop"\n',
            )
        ],
        [TESTS + "test_rollout_episode.py::test_a_prompt_that_is_too_long_is_a_trajectory_without_turns"],
    ),
    Defect(
        "F1.10",
        "an end-of-sequence token that was appended is trained on, as sampled with probability 1",
        [
            Edit(
                ROLLOUTS + "rows.py",
                "    if rows:\n        _append(rows[-1], Segment(closing))\n",
                "    if rows:\n        _append(rows[-1], Segment(closing, True, [0.0] * len(closing), 0))\n",
            )
        ],
        [
            TOKENS + "test_an_appended_end_of_sequence_token_is_not_trained_on",
            TESTS + "test_rollout_rows.py::"
            "test_each_sampled_token_is_trained_on_once_with_its_logprob_and_nothing_else_is",
        ],
    ),
    Defect(
        "F1.11a",
        "an environment that failed is not closed",
        [Edit(ROLLOUTS + "attempts.py", "    finally:\n        await _close", "    else:\n        await _close")],
        [
            FAULTS + "test_a_failing_environment_is_closed_and_counted_and_the_others_go_on",
            FAULTS + "test_a_cancelled_run_closes_its_environments",
        ],
    ),
    Defect(
        "F1.11b",
        "nothing limits how long an environment or the sampler takes",
        [Edit(ROLLOUTS + "attempts.py", "asyncio.timeout(timeout_s)", "asyncio.timeout(None)")],
        [FAULTS + "test_a_hanging_sampler_is_a_timeout"],
    ),
    Defect(
        "F1.11c",
        "one exception ends the step of all trajectories",
        [Edit(ROLLOUTS + "attempts.py", "    except Exception as error:", "    except ZeroDivisionError as error:")],
        [FAULTS + "test_a_failing_sampler_is_counted_and_the_environment_closed"],
    ),
    Defect(
        "F1.21",
        "of a trajectory in steps, only the last reward counts",
        [
            Edit(
                ROLLOUTS + "rows.py",
                "sampled.policy_version, turn.reward)",
                "sampled.policy_version, turn.reward if turn is list(turns)[-1] else 0.0)",
            )
        ],
        [TESTS + "test_rollout_rows.py::test_step_wise_rows_are_turns_with_their_own_rewards"],
    ),
    Defect(
        "F1.22d",
        "pass@n looks at the reward of the last turn only",
        [
            Edit(
                ROLLOUTS + "metrics.py",
                "rewards = [[item.reward for item in group",
                "rewards = [[item.turns[-1].reward for item in group",
            )
        ],
        [TESTS + "test_rollout_metrics.py::test_pass_at_n_looks_at_the_rewards_of_all_turns"],
    ),
    Defect(
        "T15",
        "special tokens inside a response are kept from the environment",
        [Edit(ROLLOUTS + "chat.py", "skip_special_tokens=False", "skip_special_tokens=True")],
        ["tests/train/test_encodings.py::test_only_the_token_that_ends_a_turn_is_dropped_from_the_text_of_a_response"],
    ),
    Defect(
        "T17b",
        "text after sampled tokens begins with the marker of a start",
        [Edit(ROLLOUTS + "chat.py", "for anchor in ANCHORS:", "for anchor in ():")],
        ["tests/train/test_encodings.py::test_text_after_sampled_tokens_begins_without_the_marker_of_a_start"],
    ),
]
