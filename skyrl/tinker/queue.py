"""The queue of all requests: training requests and samples go in, their outcomes come out of one place."""

import random
from dataclasses import dataclass
from typing import Literal

from skyrl.tinker import request_log
from skyrl.tinker.admission import Obsolete
from skyrl.tinker.auth import Caller
from skyrl.tinker.futures import Lost, Outcome
from skyrl.tinker.ids import is_sample
from skyrl.tinker.sample_queue import SampleQueue
from skyrl.tinker.service import Service
from skyrl.tinker.training_queue import TrainingQueue
from skyrl.types import Result

SHORTEST_POLL = 0.5
"""Part of `long_poll_s` that a poll takes at least. Thousands that began together end, and come again, apart."""


@dataclass(frozen=True)
class TryAgain:
    """A request is still being worked on."""

    queue_state: Literal["active", "paused_capacity"]
    reason: str | None


class RequestQueue:
    """Hands outcomes out. All methods are called on the event loop."""

    def __init__(self, service: Service):
        self._service = service
        self.samples = SampleQueue(service)
        self.training = TrainingQueue(service, self.samples.reads)

    def done(self, request_id: str, result: Result) -> None:
        """The engine has finished a request."""
        (self.samples if is_sample(request_id) else self.training).done(request_id, result)

    def held(self, request_id: str, reason: str | None) -> None:
        """The engine cannot start a request yet (or, None, now can)."""
        if (future := self._service.futures.get(request_id)) is not None:
            future.reason = reason

    def lose_all(self, reason: str) -> None:
        """The engine has ended by itself."""
        self.samples.lose_all()
        self.training.lose_all(reason)

    async def discard(self, files: Obsolete) -> None:
        """Remove files that nobody names any more, unless something may still read them."""
        await self.training.discard(files)

    async def settle(self) -> None:
        """Wait until every result that has arrived is dealt with."""
        await self.samples.settle()
        await self.training.settle()

    async def outcome(self, request_id: str, caller: Caller) -> Outcome | TryAgain:
        """The outcome of a request, waited for as long as a poll may take.

        Raises:
            UnknownName: There is no such training request.
        """
        future = self._service.futures.get(request_id)
        if future is not None and caller.may_touch(future.tenant):
            outcome = await future.wait(self._service.config.long_poll_s * random.uniform(SHORTEST_POLL, 1))
            return outcome or self._try_again(future.reason)
        if is_sample(request_id):
            return Lost()
        tenant, outcome = await self._service.database.read(lambda session: request_log.outcome_of(session, request_id))
        if not caller.may_touch(tenant):
            raise request_log.unknown_request(request_id)
        return outcome

    def _try_again(self, reason: str | None) -> TryAgain:
        engine = self._service.engine
        if engine.state == "ready":
            return TryAgain("active", reason)
        return TryAgain("paused_capacity", f"the engine is not ready: {engine.progress}")
