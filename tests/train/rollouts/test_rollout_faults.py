"""Environments and samplers that fail, hang, or fail to close: the others go on, and what failed is counted."""

import asyncio
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Answer, Prompt, Reply, ScriptedEnv, ScriptedSampler, generator, prompt, rollouts, run, user

from skyrl.envs import EnvError, StepResult
from skyrl.errors import ConfigError
from skyrl.train.rollouts import attempts
from skyrl.train.rollouts.attempts import FailureBudget, RolloutError
from skyrl.train.rollouts.metrics import rollout_metrics
from skyrl.train.rollouts.rows import rows_of
from skyrl.train.rollouts.trajectory import Failure, Trajectory, TrajectoryId
from tests.waiting import BOUND_S

ANSWER = Answer("One.<|im_end|>")
GOOD = [Reply([user("More.")], reward=0.25), Reply(reward=1.0, done=True)]
RAISES_AT_0 = [ValueError("boom")]
RAISES_AT_1 = [GOOD[0], ValueError("boom")]
HANGS_AT_0 = ["hang"]
HANGS_AT_1 = [GOOD[0], "hang"]


def collected(tokenizer, prompts: list[Prompt], sampler: ScriptedSampler | None = None, **options) -> list[Trajectory]:
    options = {"max_failed_fraction": 1.0, "trajectory_timeout_s": 60.0, **options}
    runs = rollouts(tokenizer, sampler or ScriptedSampler(tokenizer, [ANSWER]), **options)
    return run(runs.collect(prompts))


def failure_of(trajectory: Trajectory) -> Failure:
    assert trajectory.failure is not None
    return trajectory.failure


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        ({"script": RAISES_AT_0}, "env_error", r"ValueError\('boom'\) \(at turn 0, in the environment\)"),
        ({"script": RAISES_AT_1}, "env_error", r"ValueError\('boom'\) \(at turn 1, in the environment\)"),
        ({"script": GOOD, "at_init": OSError("no disk")}, "env_error", r"OSError\('no disk'\) \(at turn 0"),
        ({"script": HANGS_AT_0}, "timeout", r"longer than trajectory_timeout_s=60.0 \(at turn 0, in the environment\)"),
        ({"script": HANGS_AT_1}, "timeout", r"longer than trajectory_timeout_s=60.0 \(at turn 1, in the environment\)"),
        ({"script": GOOD, "at_init": "hang"}, "timeout", r"longer than trajectory_timeout_s=60.0 \(at turn 0"),
        ({"script": [TimeoutError("of its own")]}, "env_error", r"TimeoutError\('of its own'\)"),
        ({"script": [Reply(reward=float("nan"))]}, "env_error", r"environment '[^']*': reward=nan is not finite"),
        ({"script": [Reply(reward=None)]}, "env_error", r"environment '[^']*': reward=None is not a number"),
    ],
)
def test_a_failing_environment_is_closed_and_counted_and_the_others_go_on(chatml, columns, kind, message):
    good, bad, last = collected(
        chatml, [prompt(name="a", script=GOOD), prompt(name="b", **columns), prompt(name="c", script=GOOD)]
    )
    assert (good.reward, last.reward, bad.stop_reason) == (1.25, 1.25, "failed")
    assert failure_of(bad).kind == kind
    assert re.search(message, failure_of(bad).message)
    assert ScriptedEnv.closed == {"a": 1, "b": 1, "c": 1}
    assert [row.trajectory for row in rows_of([good, bad, last], generator())] == [0, 2]
    assert rollout_metrics([good, bad, last])[f"generate/failed_{kind}"] == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, r"step returned a float; return skyrl.envs.StepResult\(observations, reward, done\)"),
        (StepResult("again", 0.0, False), r"observations='again'; give a list of messages"),  # pyright: ignore
        (StepResult(None, 0.0, False), r"observations=None; give a list of messages"),  # pyright: ignore
        (StepResult(["again"], 0.0, False), r"observations=\['again'\]; give a list of messages"),  # pyright: ignore
    ],
)
def test_a_step_with_a_result_of_another_form_stops_the_run(chatml, monkeypatch, result, message):
    async def step(self, action):
        return result

    monkeypatch.setattr(ScriptedEnv, "step", step)
    with pytest.raises(ConfigError, match=message):
        collected(chatml, [prompt(name="a", script=GOOD)])


def test_the_failure_of_an_environment_has_the_line_that_raised(chatml):
    (bad,) = collected(chatml, [prompt(name="b", script=RAISES_AT_0)])
    assert re.match(r"tests/train/rollouts/scripted\.py, line \d+: ValueError\('boom'\) \(at", failure_of(bad).message)


def test_a_failing_sampler_is_counted_and_the_environment_closed(chatml):
    sampler = ScriptedSampler(chatml, [ANSWER], failing={"b_0": 1})
    good, bad = collected(chatml, [prompt(name="a", script=GOOD), prompt(name="b", script=GOOD)], sampler)
    assert good.failure is None
    assert failure_of(bad).kind == "sampler_error"
    assert "ConnectionError('the engine is gone') (at turn 0, in the sampler)" in failure_of(bad).message
    assert ScriptedEnv.closed == {"a": 1, "b": 1}


def test_a_hanging_sampler_is_a_timeout(chatml):
    sampler = ScriptedSampler(chatml, [ANSWER], hanging=["b_0"])
    good, bad = collected(chatml, [prompt(name="a", script=GOOD), prompt(name="b", script=GOOD)], sampler)
    assert (good.failure, failure_of(bad).kind) == (None, "timeout")
    assert "in the sampler" in failure_of(bad).message
    assert ScriptedEnv.closed == {"a": 1, "b": 1}


def test_a_message_that_the_template_cannot_render_fails_one_trajectory(chatml):
    good, bad = collected(chatml, [prompt(script=GOOD), prompt({"role": "user", "content": None}, script=GOOD)])
    assert (good.failure, failure_of(bad).kind) == (None, "template_error")


def test_another_attempt_gets_a_fresh_environment_and_starts_from_the_beginning(chatml):
    row = prompt(name="a", attempts=[RAISES_AT_1, HANGS_AT_0, GOOD])
    (trajectory,) = collected(chatml, [row], trajectory_retries=2)
    assert (trajectory.failure, trajectory.attempts, len(trajectory.turns)) == (None, 3, 2)
    assert (ScriptedEnv.made["a"], ScriptedEnv.closed["a"]) == (3, 3)
    assert rollout_metrics([trajectory])["generate/retries"] == 2


@pytest.mark.parametrize("anew", [True, False])
def test_another_attempt_is_sampled_with_another_seed_unless_told_otherwise(chatml, anew):
    sampler = ScriptedSampler(chatml, [ANSWER])
    row = prompt(name="a", attempts=[RAISES_AT_1, RAISES_AT_1, GOOD])
    run(rollouts(chatml, sampler, trajectory_retries=2, retry_with_new_seed=anew).collect([row]))
    sessions = [call.session_id for call in sampler.calls]
    assert len(set(sessions)) == (3 if anew else 1)
    assert sessions[0] == sessions[1]


def test_what_an_environment_raises_on_a_text_may_have_a_reward(chatml):
    rows = [prompt(name="a", script=GOOD), prompt(name="b", script=RAISES_AT_1)]
    good, raised = collected(chatml, rows, env_error_reward=-0.5, trajectory_retries=2)
    assert (raised.failure, raised.attempts, [turn.reward for turn in raised.turns][-1]) == (None, 1, -0.5)
    assert [row.trajectory for row in rows_of([good, raised], generator())] == [0, 1]
    assert rollout_metrics([good, raised])["generate/env_errors"] == 1
    assert ScriptedEnv.closed == {"a": 1, "b": 1}


@pytest.mark.parametrize("error", [EnvError("down"), ConnectionError("gone"), TimeoutError("slow")])
def test_trouble_below_an_environment_has_no_reward(chatml, error):
    (trajectory,) = collected(chatml, [prompt(script=[error])], env_error_reward=0.0)
    assert failure_of(trajectory).kind == "env_error"


@pytest.mark.parametrize("reward", [None, 0.0])
def test_an_environments_exception_is_shown_once_with_its_traceback(chatml, caplog, reward):
    rows = [prompt(name=name, script=RAISES_AT_1) for name in "abc"]
    collected(chatml, rows, trajectory_retries=2, env_error_reward=reward, max_failed_fraction=1.0)
    shown = [record for record in caplog.records if record.exc_info]
    assert len(shown) == 1
    assert "in _act" in "".join(traceback.format_exception(*shown[0].exc_info))


def test_after_the_last_attempt_the_trajectory_says_why_it_failed(chatml):
    (trajectory,) = collected(chatml, [prompt(name="a", script=RAISES_AT_1)], trajectory_retries=2)
    assert (trajectory.attempts, failure_of(trajectory).kind) == (3, "env_error")
    assert isinstance(failure_of(trajectory).error, ValueError)
    assert ScriptedEnv.closed["a"] == 3


@pytest.mark.parametrize("error", [ConfigError("bad"), ImportError("bad"), NotImplementedError("bad")])
def test_an_error_of_the_program_is_raised_at_once_and_closes_every_environment(chatml, error):
    rows = [prompt(name="a", script=HANGS_AT_0), prompt(name="b", script=[error])]
    with pytest.raises(type(error), match="bad"):
        collected(chatml, rows, trajectory_retries=5, trajectory_timeout_s=60.0)
    assert ScriptedEnv.made == ScriptedEnv.closed == {"a": 1, "b": 1}


def test_an_unknown_environment_stops_the_run(chatml):
    with pytest.raises(ConfigError, match="no environment named 'nothing'"):
        collected(chatml, [Prompt([user("Go.")], "nothing", "a")])


def test_an_environment_that_cannot_be_made_fails_one_trajectory(chatml, monkeypatch):
    class Broken(ScriptedEnv):
        def __init__(self, config, extras):
            raise OSError("no database")

    monkeypatch.setattr("scripted.Broken", Broken, raising=False)
    good, bad = collected(chatml, [prompt(script=GOOD), Prompt([user("Go.")], "scripted:Broken", "b")])
    assert (good.failure, failure_of(bad).kind) == (None, "env_error")


@pytest.mark.parametrize("at_close", [RuntimeError("stuck"), "hang"])
def test_an_environment_that_does_not_close_spoils_nothing(chatml, at_close, monkeypatch, caplog):
    monkeypatch.setattr(attempts, "CLOSE_S", 5.0)
    (trajectory,) = collected(chatml, [prompt(name="a", script=GOOD, at_close=at_close)])
    assert (trajectory.failure, trajectory.reward) == (None, 1.25)
    assert "its environment did not close" in caplog.text


def test_a_cancelled_run_closes_its_environments(chatml):
    async def cancel_half_way() -> None:
        runs = rollouts(chatml, ScriptedSampler(chatml, [ANSWER]))
        task = asyncio.create_task(runs.collect([prompt(name=name, script=HANGS_AT_1) for name in "ab"]))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel_half_way())
    assert ScriptedEnv.made == ScriptedEnv.closed == {"a": 1, "b": 1}


HANGING_IN_A_THREAD = """
import asyncio
import threading

import conftest
from scripted import Answer, Prompt, ScriptedSampler, generator, user

from skyrl.envs.gym import BaseTextEnv, adapted
from skyrl.train.config import EnvironmentConfig
from skyrl.train.rollouts.rollouts import Rollouts


class Loop(asyncio.SelectorEventLoop):
    # Its clock can be put forward.
    ahead_s = 0.0

    def time(self):
        return super().time() + self.ahead_s

    def put_forward(self, seconds):
        self.ahead_s += seconds
        self.call_soon_threadsafe(lambda: None)  # so that it looks at its clock


class Hanging(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.hangs = extras["hangs"]

    def step(self, action):
        if self.hangs:
            loop.put_forward(601)
            threading.Event().wait()
        return {"observations": [], "reward": 1.0, "done": True}


HangingEnv = adapted(Hanging)
loop = Loop()
config = generator(trajectory_timeout_s=600.0, max_concurrent_trajectories=1, max_failed_fraction=1.0)
environment = EnvironmentConfig.from_dict_config({"skyrl_gym": {"max_env_workers": 1}}).resolve()
tokenizer = conftest.make("chatml")
rollouts = Rollouts(config, environment, tokenizer, ScriptedSampler(tokenizer, [Answer("One.<|im_end|>")]))
prompts = [Prompt([user("Go.")], "__main__:HangingEnv", str(hangs), {"hangs": hangs}) for hangs in (True, False)]
with asyncio.Runner(loop_factory=lambda: loop) as runner:
    print(*(trajectory.stop_reason for trajectory in runner.run(rollouts.collect(prompts))))
"""


def test_a_step_that_hangs_in_its_thread_keeps_neither_the_others_from_running_nor_the_process_from_ending():
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    ended = subprocess.run(
        [sys.executable, "-c", HANGING_IN_A_THREAD],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert (ended.stdout, ended.returncode) == ("failed stop\n", 0), ended.stderr


def test_more_failures_than_allowed_stop_the_run_with_numbers_and_cause(chatml):
    rows = [prompt(name=f"bad{i}", script=RAISES_AT_0) for i in range(2)]
    rows += [prompt(name=f"good{i}", script=GOOD) for i in range(2)]
    with pytest.raises(RolloutError) as raised:
        collected(chatml, rows, max_failed_fraction=0.25)
    assert "2 of 4 trajectories failed (env_error 2), more than generator.max_failed_fraction=0.25" in str(raised.value)
    assert "allows, and 2 were stopped; the first, bad0_0, after 1 attempts" in str(raised.value)
    assert "ValueError('boom')" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)


def test_as_many_failures_as_allowed_do_not_stop_the_run(chatml):
    rows = [prompt(name="bad", script=RAISES_AT_0), *(prompt(name=f"good{i}", script=GOOD) for i in range(3))]
    assert [trajectory.stop_reason for trajectory in collected(chatml, rows, max_failed_fraction=0.25)] == [
        "failed",
        "stop",
        "stop",
        "stop",
    ]


def test_a_run_with_too_many_failures_does_not_wait_for_what_still_runs(chatml):
    rows = [prompt(name="bad", script=RAISES_AT_0), prompt(name="slow", script=HANGS_AT_0)]
    with pytest.raises(RolloutError):
        collected(chatml, rows, max_failed_fraction=0.0, trajectory_timeout_s=None)
    assert ScriptedEnv.closed == {"bad": 1, "slow": 1}


ATTEMPTS = {"good": GOOD, "raises": RAISES_AT_1, "hangs": HANGS_AT_0, "cut": [GOOD[0]]}


@given(
    plans=st.lists(st.lists(st.sampled_from(sorted(ATTEMPTS)), min_size=3, max_size=3), max_size=6),
    at_close=st.sampled_from([None, RuntimeError("stuck"), "hang"]),
    places=st.sampled_from([None, 1, 2]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_fails_the_first_good_attempt_counts_and_every_environment_is_closed(chatml, plans, at_close, places):
    ScriptedEnv.made.clear()
    ScriptedEnv.closed.clear()
    rows = [
        prompt(name=str(i), attempts=[ATTEMPTS[name] for name in plan], at_close=at_close)
        for i, plan in enumerate(plans)
    ]
    trajectories = collected(chatml, rows, trajectory_retries=2, max_concurrent_trajectories=places)
    tries = [plan.index("good") + 1 if "good" in plan else 3 for plan in plans]
    assert [trajectory.id.instance_id for trajectory in trajectories] == [str(i) for i in range(len(plans))]
    assert [trajectory.failure is None for trajectory in trajectories] == ["good" in plan for plan in plans]
    assert [trajectory.attempts for trajectory in trajectories] == tries
    assert ScriptedEnv.made == ScriptedEnv.closed == {str(i): number for i, number in enumerate(tries)}


def test_a_budget_counts_failures_only():
    budget = FailureBudget(0.5, 4)
    failed = Trajectory(TrajectoryId("p", 0), (), "failed", failure=Failure("timeout", "slow"))
    for trajectory in (failed, Trajectory(TrajectoryId("p", 1), (), "stop"), failed):
        budget.count(trajectory)
    with pytest.raises(RolloutError, match=r"3 of 4 trajectories failed \(timeout 3\)"):
        budget.count(failed)


def test_a_budget_counts_all_of_a_group_before_it_is_exceeded():
    budget = FailureBudget(0.0, 4)
    failed = [Trajectory(TrajectoryId("p", i), (), "failed", failure=Failure("timeout", "slow")) for i in range(4)]
    with pytest.raises(RolloutError, match=r"4 of 4 trajectories failed \(timeout 4\), .* allows; the first"):
        budget.count(*failed)
