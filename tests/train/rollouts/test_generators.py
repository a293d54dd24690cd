"""Generators of one's own: trajectories in the place of those of environments, and the test of a class of them."""

import asyncio
from dataclasses import replace

import pytest
from scripted import ScriptedSampler, encode, generator, prompt, rollouts, run, user

from skyrl.envs import Env, StepResult
from skyrl.errors import ConfigError
from skyrl.train.config import EnvironmentConfig
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.generators.conformance import RandomPolicy, check_generator
from skyrl.train.rollouts.generators.generator import Generated, Generator
from skyrl.train.rollouts.metrics import rollout_metrics
from skyrl.train.rollouts.rows import rows_of
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Turn

OWN = f"{__name__}:"


class Length(Env):
    """One turn, worth the length of its text."""

    async def step(self, action):
        return StepResult([], float(len(action)), done=True, metrics={"letters": len(action)})


class Agent(Generator):
    """The same, and what the tests below change of it."""

    async def generate(self, prompt, params, session_id):
        tokens = self.chat.render(prompt.messages)
        sampled = await self.sampler.sample(tokens, params, session_id)
        text = self.chat.text(sampled.token_ids)
        return Generated([Turn(tokens, sampled, reward=self.reward(text), action=text)], sampled.stop_reason)

    def reward(self, text):
        return float(len(text))


class TwoTurns(Agent):
    """Asks again, and rewards each token of the second answer."""

    async def generate(self, prompt, params, session_id):
        tokens, turns = self.chat.render(prompt.messages), []
        for _ in range(2):
            sampled = await self.sampler.sample(tokens, params, session_id)
            turns.append(Turn(tokens, sampled))
            asked = self.chat.continuation([user("Again.")])
            tokens = [*tokens, *sampled.token_ids, *asked[self.chat.ended(sampled.token_ids) :]]
        rewards = [0.5] * len(turns[1].sampled.token_ids)
        turns[1] = replace(turns[1], reward=sum(rewards), token_rewards=rewards)
        return Generated(turns, "stop", metrics={"reward/style": 2.0, "calls": 2})


def both(tokenizer, name, row, **options):
    """Trajectories of one prompt by an environment, and by a generator."""
    answers = [("One <|im_end|>", "stop"), ("Three", "length")]
    found = []
    for own in (None, OWN + name):
        sampler = ScriptedSampler(tokenizer, answers)
        group = rollouts(tokenizer, sampler, generator_class=own, n_samples_per_prompt=2, max_turns=1, **options)
        found.append(run(group.collect([row])))
    return found


def test_trajectories_and_rows_are_those_of_an_environment_that_does_the_same(chatml):
    row = Prompt([user("Go.")], f"{__name__}:Length", "row", {"data_source": "here"})
    theirs, ours = both(chatml, "Agent", row)
    config = generator(n_samples_per_prompt=2)
    for one, other in zip(rows_of(theirs, config), rows_of(ours, config), strict=True):
        assert (one.token_ids, one.mask, one.logprobs, one.rewards) == (
            other.token_ids,
            other.mask,
            other.logprobs,
            other.rewards,
        )
    told = [(one.id, one.reward, one.stop_reason, one.data_source, list(one.messages)) for one in theirs]
    assert told == [(one.id, one.reward, one.stop_reason, one.data_source, list(one.messages)) for one in ours]


def test_turns_of_a_generator_make_one_row_with_rewards_at_their_tokens(chatml):
    sampler = ScriptedSampler(chatml, [("One<|im_end|>", "stop"), ("Two<|im_end|>", "stop")])
    (trajectory,) = run(rollouts(chatml, sampler, generator_class=OWN + "TwoTurns").collect([prompt(user("Go."))]))
    (row,) = rows_of([trajectory], generator())
    second = len(encode(chatml, "Two<|im_end|>"))
    assert sum(row.mask) == len(encode(chatml, "One<|im_end|>")) + second
    assert [reward for reward in row.rewards if reward] == [0.5] * second
    assert [mask for mask, reward in zip(row.mask, row.rewards, strict=True) if reward] == [True] * second
    metrics = rollout_metrics([trajectory])
    assert metrics["reward/style"] == 2.0 and metrics["environment/calls"] == 2.0


class Flaky(Agent):
    tries = 0

    async def generate(self, prompt, params, session_id):
        Flaky.tries += 1
        if Flaky.tries == 1:
            raise KeyError("tool")
        return await super().generate(prompt, params, session_id)


def test_what_a_generator_raises_fails_an_attempt_and_another_begins(chatml):
    Flaky.tries = 0
    group = rollouts(
        chatml, ScriptedSampler(chatml, [("A", "stop")]), generator_class=OWN + "Flaky", trajectory_retries=1
    )
    (trajectory,) = run(group.collect([prompt()]))
    assert trajectory.failure is None and trajectory.attempts == 2


class Slow(Agent):
    async def generate(self, prompt, params, session_id):
        await asyncio.Event().wait()


def test_a_generator_that_takes_too_long_is_cancelled_and_counted(chatml):
    options = {"trajectory_timeout_s": 0.01, "max_failed_fraction": 1.0}
    group = rollouts(chatml, ScriptedSampler(chatml, []), generator_class=OWN + "Slow", **options)
    (trajectory,) = run(group.collect([prompt()]))
    assert trajectory.failure is not None and trajectory.failure.kind == "timeout"
    assert "in the generator" in trajectory.failure.message
    assert rollout_metrics([trajectory])["generate/failed_timeout"] == 1


class Infinite(Agent):
    def reward(self, text):
        return float("inf")


class Bare(Agent):
    async def generate(self, prompt, params, session_id):
        return "text"


class NoPrompt(Agent):
    async def generate(self, prompt, params, session_id):
        made = await super().generate(prompt, params, session_id)
        return replace(made, turns=[replace(made.turns[0], prompt_ids=())])


class Unending(Agent):
    async def generate(self, prompt, params, session_id):
        return replace(await super().generate(prompt, params, session_id), stop_reason="failed")


class Uneven(Agent):
    async def generate(self, prompt, params, session_id):
        made = await super().generate(prompt, params, session_id)
        return replace(made, turns=[replace(made.turns[0], token_rewards=[1.0])])


class Unequal(Agent):
    async def generate(self, prompt, params, session_id):
        made = await super().generate(prompt, params, session_id)
        (turn,) = made.turns
        return replace(made, turns=[replace(turn, reward=3.0, token_rewards=[0.0] * len(turn.sampled.token_ids))])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bare", "trajectory row_0: generator Bare gave str; give a Generated"),
        ("NoPrompt", "turn 0 has no prompt_ids"),
        ("Unending", "stop_reason='failed' of a trajectory; use stop, length or max_turns"),
        ("Uneven", r"generator Uneven, turn 0 has 1 token_rewards for \d+ tokens"),
        ("Unequal", r"turn 0 has token_rewards that add up to 0.0, not to its reward=3.0"),
        ("Nobody", r"generator.generator_class=.*:Nobody: no generator at .*; name a class as module:Class"),
        ("Length", "no subclass of skyrl.train.rollouts.generators.generator.Generator"),
    ],
)
def test_what_cannot_be_trained_on_ends_the_run_with_the_reason(chatml, name, said):
    sampler = ScriptedSampler(chatml, [("One two three", "stop")])
    with pytest.raises(ConfigError, match=said):
        run(rollouts(chatml, sampler, generator_class=OWN + name).collect([prompt()]))


def test_a_reward_that_is_not_finite_is_a_failure(chatml):
    sampler = ScriptedSampler(chatml, [("One", "stop")])
    group = rollouts(chatml, sampler, generator_class=OWN + "Infinite", max_failed_fraction=1.0)
    (trajectory,) = run(group.collect([prompt()]))
    assert trajectory.failure is not None and trajectory.failure.kind == "generator_error"
    assert "generator Infinite, turn 0: reward=inf is not finite" in trajectory.failure.message


# -- the test of a class ----------------------------------------------------------------------------------------------


class Retokenises(Agent):
    async def generate(self, prompt, params, session_id):
        made = await super().generate(prompt, params, session_id)
        (turn,) = made.turns
        tokens = self.chat.encode(turn.action + " ")
        sampled = Sampled(tokens, [-1.0] * len(tokens), "stop", 0)
        return replace(made, turns=[replace(turn, sampled=sampled)])


class ForgetsThePrompt(Agent):
    async def generate(self, prompt, params, session_id):
        made = await super().generate(prompt, params, session_id)
        return replace(made, turns=[replace(made.turns[0], prompt_ids=made.turns[0].prompt_ids[1:])])


class NamesSessionsItself(Agent):
    async def generate(self, prompt, params, session_id):
        return await super().generate(prompt, params, "mine")


class SharesState(Agent):
    async def generate(self, prompt, params, session_id):
        self.prompt = prompt
        await asyncio.sleep(0)
        return await super().generate(self.prompt, params, session_id)


class Counts(Agent):
    made = 0

    def reward(self, text):
        Counts.made += 1
        return float(Counts.made)


class Overlong(Agent):
    async def generate(self, prompt, params, session_id):
        longer = replace(prompt, messages=[*prompt.messages, user("word " * 200)])
        return await super().generate(longer, params, session_id)


class Warmer(Agent):
    async def generate(self, prompt, params, session_id):
        return await super().generate(prompt, replace(params, temperature=1.5), session_id)


class Swallows(Agent):
    async def generate(self, prompt, params, session_id):
        try:
            return await super().generate(prompt, params, session_id)
        except ConnectionError:
            return Generated([], "stop")


class Lingers(Agent):
    async def generate(self, prompt, params, session_id):
        try:
            return await super().generate(prompt, params, session_id)
        except asyncio.CancelledError:
            return Generated([], "stop")


class Endless(Agent):
    """Nothing ends it, not even where it is cancelled."""

    async def generate(self, prompt, params, session_id):
        while True:
            try:
                return await super().generate(prompt, params, session_id)
            except asyncio.CancelledError:
                continue


FAULTS = {
    Bare: "can be trained on",
    Unequal: "can be trained on",
    Retokenises: "token for token",
    ForgetsThePrompt: "token for token",
    NamesSessionsItself: "token for token",
    SharesState: "do not mix",
    Counts: "the same trajectory",
    Overlong: "stay within",
    Warmer: "temperature",
    Swallows: "failure of the policy",
    Lingers: "cancelled",
}


def findings(tokenizer, cls) -> dict[str, str | None]:
    config = generator(max_input_length=128, sampling_params={"max_generate_length": 16})
    prompts = [prompt(user(f"Go {n}."), name=f"row{n}") for n in range(3)]
    return dict(check_generator(cls, config, EnvironmentConfig().resolve(), Chat(tokenizer), prompts))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_generator_that_cannot_be_cancelled_is_told_so_and_the_test_ends(chatml):
    config = generator(max_input_length=128, sampling_params={"max_generate_length": 16})
    checks = check_generator(Endless, config, EnvironmentConfig().resolve(), Chat(chatml), [prompt(user("Go."))], 1.0)
    broken = {check: problem for check, problem in checks if problem is not None}
    assert broken == {
        "it ends where it is cancelled": "it was cancelled and went on; let asyncio.CancelledError out",
    }


@pytest.mark.parametrize("cls", [Agent, TwoTurns])
def test_a_generator_that_keeps_the_rules_passes(chatml, cls):
    assert set(findings(chatml, cls).values()) == {None}


@pytest.mark.parametrize("cls", FAULTS, ids=lambda cls: cls.__name__)
def test_a_generator_that_breaks_a_rule_is_told_which(chatml, cls):
    broken = [check for check, problem in findings(chatml, cls).items() if problem is not None]
    assert any(FAULTS[cls] in check for check in broken), broken


def test_the_pretended_policy_answers_alike_and_of_each_session_otherwise(chatml):
    policy, params = RandomPolicy(Chat(chatml)), generator().sampling_params
    first, second, other = (asyncio.run(policy.sample([1, 2], params, name)) for name in ("a", "a", "b"))
    assert first == second != other
