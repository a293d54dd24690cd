import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from scripted import Answer, Reply, ScriptedEnv, ScriptedSampler, generator, prompt, rollouts, run

from skyrl.errors import ConfigError
from skyrl.train.config import EnvironmentConfig, GeneratorConfig
from skyrl.train.rollouts.rollouts import Rollouts, chat_of

ANSWER = Answer("One.<|im_end|>")
DONE = [Reply(done=True)]


class SlowSampler(ScriptedSampler):
    """Takes as many seconds as `seconds` says of a session."""

    def __init__(self, tokenizer, seconds: dict[str, float]):
        super().__init__(tokenizer, [ANSWER])
        self.seconds = seconds

    async def sample(self, prompt_token_ids: Sequence[int], params, session_id: str):
        await asyncio.sleep(self.seconds.get(session_id, 0))
        return await super().sample(prompt_token_ids, params, session_id)


def rows(names: str):
    return [prompt(name=name, script=DONE) for name in names]


def test_trajectories_come_in_the_order_of_the_prompts_whoever_is_first(chatml):
    sampler = SlowSampler(chatml, {"a_0": 5, "a_1": 1, "b_0": 3, "b_1": 4})
    trajectories = run(rollouts(chatml, sampler, n_samples_per_prompt=2).collect(rows("abc")))
    assert [str(trajectory.id) for trajectory in trajectories] == ["a_0", "a_1", "b_0", "b_1", "c_0", "c_1"]


def test_a_stream_gives_groups_as_they_are_complete(chatml):
    async def main() -> list[tuple[float, list[str]]]:
        sampler = SlowSampler(chatml, {"a_0": 5, "b_1": 3, "c_0": 1})
        stream = rollouts(chatml, sampler, n_samples_per_prompt=2).stream(rows("abc"))
        clock = asyncio.get_running_loop().time
        return [(clock(), [str(trajectory.id) for trajectory in group]) async for group in stream]

    assert run(main()) == [(1, ["c_0", "c_1"]), (3, ["b_0", "b_1"]), (5, ["a_0", "a_1"])]


def test_a_stream_that_is_closed_cancels_the_others_and_closes_their_environments(chatml):
    async def main() -> None:
        sampler = SlowSampler(chatml, {"b_0": 1e6})
        async with aclosing(rollouts(chatml, sampler).stream(rows("ab"))) as stream:
            async for _ in stream:
                break

    run(main())
    assert ScriptedEnv.made == ScriptedEnv.closed == {"a": 1, "b": 1}


class FullBatchSampler(ScriptedSampler):
    """Answers nobody before `size` requests are there."""

    def __init__(self, tokenizer, size: int):
        super().__init__(tokenizer, [ANSWER])
        self.all_here = asyncio.Barrier(size)

    async def sample(self, prompt_token_ids: Sequence[int], params, session_id: str):
        await self.all_here.wait()
        return await super().sample(prompt_token_ids, params, session_id)


def test_a_batch_that_is_batched_is_at_the_sampler_as_a_whole(chatml):
    sampler = FullBatchSampler(chatml, 6)
    trajectories = run(
        rollouts(chatml, sampler, batched=True, max_turns=1, n_samples_per_prompt=2).collect(rows("abc"))
    )
    assert [trajectory.failure for trajectory in trajectories] == [None] * 6


def test_the_same_prompt_may_be_in_a_batch_twice(chatml):
    sampler = ScriptedSampler(chatml, [ANSWER])
    twice = [prompt(name="a", script=[Reply(reward=reward, done=True)]) for reward in (1.0, 2.0)]
    trajectories = run(rollouts(chatml, sampler, n_samples_per_prompt=2).collect(twice))
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 1.0, 2.0, 2.0]


def test_no_prompts_give_no_trajectories(chatml):
    assert run(rollouts(chatml, ScriptedSampler(chatml, [])).collect([])) == []


def test_the_same_script_gives_the_same_trajectories(chatml):
    def once():
        sampler = ScriptedSampler(chatml, [ANSWER, Answer("Two.<|im_end|>")])
        script = [Reply(reward=0.5), Reply(done=True)]
        trajectories = run(rollouts(chatml, sampler).collect([prompt(name=name, script=script) for name in "abc"]))
        return [(t.id, [(turn.prompt_ids, turn.sampled) for turn in t.turns], t.reward) for t in trajectories]

    assert once() == once()


def test_a_length_of_a_prompt_is_that_of_its_tokens(chatml):
    messages = prompt().messages
    chat = chat_of(generator(), chatml)
    ids = chatml.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat.render(messages, ()) == ids


def test_a_configuration_that_was_not_resolved_is_refused(chatml):
    with pytest.raises(ConfigError, match="max_input_length=None: resolve the whole configuration"):
        Rollouts(GeneratorConfig(), EnvironmentConfig(), chatml, ScriptedSampler(chatml, []))


def test_settings_of_an_environment_reach_it(chatml):
    environment = EnvironmentConfig.from_cli_overrides(["skyrl_gym.ScriptedEnv.level=3"]).resolve()
    runs = Rollouts(generator(), environment, chatml, ScriptedSampler(chatml, [ANSWER]))
    with pytest.raises(ConfigError, match="level"):
        run(runs.collect(rows("a")))
