"""Episodes in which the model says what a test wants it to say."""

import asyncio
from collections.abc import Mapping
from typing import Any

from isolation import strongest

from skyrl.envs import StepResult, make_env


def play(env_id: str, settings: Mapping[str, Any] | None, extras: Mapping[str, Any], *turns: str) -> list[StepResult]:
    """The steps of an episode in which the model says `turns`. All but the last must leave it going."""

    if env_id in ("lcb", "searchcode"):
        settings = {"isolation": strongest(), **(settings or {})}

    async def episode() -> list[StepResult]:
        env = make_env(env_id, settings, extras)
        try:
            await env.init([{"role": "user", "content": "?"}])
            steps = [await env.step(turn) for turn in turns]
        finally:
            await env.close()
        assert not any(step.done for step in steps[:-1])
        return steps

    return asyncio.run(episode())


def reward(env_id: str, settings: Mapping[str, Any] | None, extras: Mapping[str, Any], *turns: str) -> float:
    """The reward of the last turn of an episode, which must end it."""
    last = play(env_id, settings, extras, *turns)[-1]
    assert last.done
    return last.reward
