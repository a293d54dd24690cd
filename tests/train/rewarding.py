"""An environment in which any model gets different rewards, so that every step moves it."""

import zlib

import numpy as np

from skyrl.envs.env import Env, NoSettings, StepResult


class Hashed(Env[NoSettings]):
    """The reward is a hash of what the model said, from 0 to 1."""

    async def step(self, action: str) -> StepResult:
        return StepResult([], zlib.crc32(action.encode()) % 11 / 10, done=True)


class Tossed(Env[NoSettings]):
    """The reward is 0 or 1, by a hash of what the model said: samples of a prompt are often alike."""

    async def step(self, action: str) -> StepResult:
        return StepResult([], zlib.crc32(action.encode()) % 2, done=True)


class Vowels(Env[NoSettings]):
    """The reward is the share of vowels in what the model said: something that a model can learn."""

    async def step(self, action: str) -> StepResult:
        return StepResult([], sum(letter in "aeiou" for letter in action) / max(len(action), 1), done=True)


class Content(Env[NoSettings]):
    """The reward is 1 whatever the model says."""

    async def step(self, action: str) -> StepResult:
        return StepResult([], 1.0, done=True)


class Sized(Env[NoSettings]):
    """Its numbers are those of NumPy."""

    async def step(self, action: str) -> StepResult:
        size = np.float32(1 + len(action))
        return StepResult([], np.int64(len(action) % 2), done=True, metrics={"size": size})  # pyright: ignore


class Broken(Env[NoSettings]):
    """Every step fails."""

    async def step(self, action: str) -> StepResult:
        raise RuntimeError("the world ended")
