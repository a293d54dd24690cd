import json

from scripted import Answer, Reply, encode, logprobs_of, prompt, run_one, user

from skyrl.train.config import GeneratorConfig
from skyrl.train.rollouts.records import as_record, as_state, as_text, from_state
from skyrl.train.rollouts.rows import rows_of
from skyrl.train.rollouts.trajectory import Failure, Trajectory, TrajectoryId

SCRIPT = [Reply([user("More.")], reward=0.25), Reply(reward=1.0, done=True)]
ANSWERS = [Answer("One.</go>"), Answer("Two.<|im_end|>")]


def two_turns(tokenizer) -> Trajectory:
    return run_one(tokenizer, ANSWERS, prompt(name="p", script=SCRIPT, stop=["</go>"], metrics={"acc": 1.0}))[0]


def test_a_record_survives_json_and_holds_what_was_said_sampled_and_rewarded(chatml):
    record = json.loads(json.dumps(as_record(two_turns(chatml))))
    assert (record["instance_id"], record["repetition_id"], record["reward"]) == ("p", 0, 1.25)
    assert (record["stop_reason"], record["failure"], record["metrics"]) == ("stop", None, {"acc": 1.0})
    assert record["messages"] == [user("Go.")]
    ids = encode(chatml, "One.</go>")
    expected = {
        "token_ids": ids,
        "logprobs": logprobs_of(0, len(ids)),
        "closing_ids": [chatml.eos_token_id],
        "stop_reason": "stop",
        "policy_version": 7,
        "action": "One.</go>",
        "observations": [user("More.")],
        "reward": 0.25,
    }
    assert {name: record["turns"][0][name] for name in expected} == expected


def test_a_record_says_why_a_trajectory_failed():
    record = as_record(Trajectory(TrajectoryId("p", 0), (), "failed", failure=Failure("timeout", "slow", OSError())))
    assert json.loads(json.dumps(record))["failure"] == {"kind": "timeout", "message": "slow"}


def test_a_trajectory_is_restored_from_its_state(chatml):
    failed = Trajectory(TrajectoryId("p", 1), (), "failed", failure=Failure("timeout", "slow"), attempts=2, seconds=0.5)
    for trajectory in (two_turns(chatml), failed):
        restored = from_state(json.loads(json.dumps(as_state(trajectory))))
        assert as_state(restored) == as_state(trajectory)
        assert rows_of([restored], GeneratorConfig()) == rows_of([trajectory], GeneratorConfig())


def test_as_text_a_trajectory_is_a_conversation(chatml):
    assert as_text(two_turns(chatml)) == (
        "=== p_0: reward 1.25, stop\n"
        "[user] Go.\n"
        "[assistant, reward 0.25] One.</go>\n"
        "[user] More.\n"
        "[assistant, reward 1] Two.\n"
    )


def test_as_text_a_failure_is_named():
    failed = Trajectory(TrajectoryId("p", 0), (), "failed", failure=Failure("timeout", "too slow"))
    assert as_text(failed) == "=== p_0: reward 0, failed: too slow\n"
