"""Environments of whole runs in which something goes wrong, and an event loop that need not wait for it."""

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl.envs.env import Env, Message, NoSettings, StepResult
from skyrl.envs.tasks.search import SearchEnv

TURNS = 3
FAULTY_TURN = 1


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


class Faulty(Env[NoSettings]):
    """Three turns, each rewarded by a hash of what the model said. Some episodes fail in the middle one."""

    faults: ClassVar[dict[int, str]] = {}
    """Episodes that go wrong, by their number from the beginning of the process: "raises" or "hangs"."""
    made: ClassVar[int] = 0
    closed: ClassVar[list[int]] = []

    def __init__(self, config: NoSettings, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.number: int | None = None
        self.turns = 0

    async def init(self, prompt: list[Message]) -> list[Message]:
        """Take a number: environments that only check a row are never played."""
        self.number = Faulty.made
        Faulty.made += 1
        return prompt

    @classmethod
    def restart(cls, faults: Mapping[int, str]) -> None:
        """Count episodes from 0; these are to go wrong."""
        cls.faults, cls.made, cls.closed = dict(faults), 0, []

    async def step(self, action: str) -> StepResult:
        if self.turns == FAULTY_TURN and self.number in self.faults:
            if self.faults[self.number] == "raises":
                raise RuntimeError("the world ended")
            await self._hang()
        self.turns += 1
        reward = zlib.crc32(action.encode()) % 11 / 10
        return StepResult([{"role": "user", "content": "More."}], reward, done=self.turns == TURNS)

    async def close(self) -> None:
        if self.number is not None:
            Faulty.closed.append(self.number)

    async def _hang(self) -> None:
        """For two hours, which begin when all others are through."""
        while len(Faulty.closed) < Faulty.made - 1:
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkippingLoop)
        loop.skipped_s += 7200.0
        await asyncio.Event().wait()


class Searching(SearchEnv):
    """Environment in which each answer is a query, or, in the last turn, the answer. The reward is a hash of that."""

    async def step(self, action: str) -> StepResult:
        last = self.turns + 1 == self.max_turns
        result = await super().step(action if last else f"<search>{action}</search>")
        return StepResult(result.observations, zlib.crc32(action.encode()) % 11 / 10, result.done)
