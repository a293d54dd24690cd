"""Pending requests, both training requests and samples, with the reason why each waits."""

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from skyrl.tinker.context import Service
from skyrl.tinker.identity.ids import SAMPLE, folder_of_model, model_of_version
from skyrl.tinker.requests.futures import PendingFuture
from skyrl.tinker.requests.pending import PendingRequest
from skyrl.tinker.requests.queue import RequestQueue
from skyrl.tinker.requests.samples import WaitingSample
from skyrl.utils.slow_calls import SlowCall

State = Literal["waiting", "running"]
"""State of a request. Running: the engine has started it."""


@dataclass(slots=True)
class Queued:
    """A pending request."""

    request_id: str
    kind: str
    tenant: str
    """Display name of the tenant."""
    model_id: str
    """Model of a training request, or of a sample's weights; empty for the base model."""
    future: PendingFuture
    request: PendingRequest | WaitingSample
    ahead: int = 0
    """For a training request: number of earlier pending requests of its model."""

    @property
    def state(self) -> State:
        return "running" if self.future.runs else "waiting"

    @property
    def added_at(self) -> float:
        """Time of arrival on the monotonic clock; for requests of an earlier API process, the start of this process."""
        return self.future.timeline.accepted


Who = tuple[str, str]
"""(model id, display name of the tenant)."""


@dataclass(slots=True)
class Load:
    """A tenant's requests to one model."""

    waiting: int = 0
    running: dict[str, int] = field(default_factory=dict)
    """Number of running requests by kind."""
    oldest_at: float = math.inf
    """Arrival of the oldest request."""
    first: Queued | None = None
    """First waiting request; None if no request waits."""


class Requests:
    """Snapshot of all pending requests. Created on the event loop. Its methods may run in a thread.

    Args:
        service: The server's shared parts.
        queue: The queue of requests.
    """

    def __init__(self, service: Service, queue: RequestQueue):
        self._service = service
        self._queue = queue
        self._training = queue.training.waiting()
        self._samples = queue.samples.waiting()
        self._states = queue.training.engine_models.states()
        self._engine_trouble: str | None = None
        if service.engine.state != "ready":
            self._engine_trouble = f"the engine: {service.redact(service.engine.progress)}"
        self._slow_calls = service.slow_calls()
        self.now = time.monotonic()

    def __iter__(self) -> Iterator[Queued]:
        """Iterate over training requests in each model's order, then samples in order of arrival."""
        yield from self._of_training()
        for request_id, waiting in self._samples:
            if (future := self._queue.futures.get(request_id)) is not None:
                yield self._sample(request_id, waiting, future)

    def _of_training(self) -> Iterator[Queued]:
        ahead: defaultdict[str, int] = defaultdict(int)
        for owed in sorted(self._training, key=lambda owed: (owed.seq_id is None, owed.seq_id or 0)):
            if (future := self._queue.futures.get(owed.request_id)) is not None:
                number, ahead[owed.model_id] = ahead[owed.model_id], ahead[owed.model_id] + 1
                kind, tenant = owed.operation.name, self.shown(owed.tenant)
                yield Queued(owed.request_id, kind, tenant, owed.model_id, future, owed, number)

    def _sample(self, request_id: str, waiting: WaitingSample, future: PendingFuture) -> Queued:
        return Queued(request_id, SAMPLE, self.shown(waiting.tenant), _model_of(waiting), future, waiting)

    def by_model(self) -> dict[Who, Load]:
        """Return the load of each model that has requests, by tenant."""
        loads: defaultdict[Who, Load] = defaultdict(Load)
        for one in self._of_training():
            load = loads[one.model_id, one.tenant]
            load.oldest_at = min(load.oldest_at, one.added_at)
            if one.future.runs:
                load.running[one.kind] = load.running.get(one.kind, 0) + 1
            else:
                load.waiting += 1
                load.first = load.first or one
        # Thousands of samples are only counted: creating objects would hold the interpreter lock for long.
        find, groups = self._queue.futures.get, dict[tuple[str | None, str], tuple[Load, list[int]]]()
        for request_id, waiting in self._samples:
            if (future := find(request_id)) is None:
                continue
            group = groups.get((waiting.sample.version, waiting.tenant))
            if group is None:
                load = loads[_model_of(waiting), self.shown(waiting.tenant)]
                load.oldest_at = min(load.oldest_at, future.timeline.accepted)
                group = groups[waiting.sample.version, waiting.tenant] = load, [0, 0]
            load, counts = group
            counts[future.runs] += 1
            if load.first is None and not future.runs:
                load.first = self._sample(request_id, waiting, future)
        for load, (waits, runs) in groups.values():
            load.waiting += waits
            if runs:
                load.running[SAMPLE] = load.running.get(SAMPLE, 0) + runs
        return loads

    def told(
        self, limit: int, *, tenant: str | None, model: str | None, kind: str | None, state: State | None
    ) -> dict[str, Any]:
        """Return at most `limit` of the selected requests, oldest first, and the total number of selected requests.

        `tenant` is a display name or id.
        """
        if tenant is not None and self._service.names:
            tenant = self.shown(self._service.names.tenant(tenant))
        wanted = [
            one
            for one in self
            if tenant in (None, one.tenant)
            and model in (None, one.model_id)
            and kind in (None, one.kind)
            and state in (None, one.state)
        ]
        oldest = heapq.nsmallest(limit, wanted, key=attrgetter("added_at"))
        return {"requests": [self.describe(one) for one in oldest], "total": len(wanted)}

    def describe(self, one: Queued) -> dict[str, Any]:
        """Describe a request as JSON. Ages are in seconds."""
        return {
            "request_id": one.request_id,
            "kind": one.kind,
            "tenant": one.tenant,
            "model_id": one.model_id,
            "seq_id": one.request.seq_id if isinstance(one.request, PendingRequest) else None,
            "state": one.state,
            "age_s": round(self.now - one.added_at, 3),
            "waits_for": self.waits_for(one),
        }

    def waits_for(self, one: Queued) -> str | None:
        """Return the reason why a request waits, or None. A running request may wait for a service."""
        if (slow := self._slow_call(one)) is not None:
            return str(slow)
        if one.future.runs:
            return None
        if self._engine_trouble is not None:
            return self._engine_trouble
        if isinstance(one.request, WaitingSample):
            behind = len(self._queue.events.sampling)
            turn = f"its turn, behind {behind} samples that run" if behind else "its turn"
            return self._queue.samples.waits_for(one.request_id) or turn
        if not one.request.logged:
            return "the database, which is to log it"
        if not one.request.sent:
            parked = self._states.get(one.model_id) == "parking"
            return "its model, which is put on disk" if parked else "its model, which is brought back"
        if one.future.reason is not None:
            return one.future.reason.removeprefix("waiting for ")
        if one.ahead:
            return f"{one.ahead} earlier request{'s' * (one.ahead > 1)} of its model"
        return "its turn"

    def _slow_call(self, one: Queued) -> SlowCall | None:
        """Return the slow call for which a request waits: one on files of its model, or any one of the database."""
        files = folder_of_model(one.model_id)
        return next(
            (call for call in self._slow_calls if call.service == "database" or (files and files in call.what)), None
        )

    def shown(self, tenant: str) -> str:
        """Return the display name of a tenant."""
        return self._service.names(tenant)


def _model_of(waiting: WaitingSample) -> str:
    version = waiting.sample.version
    return "" if version is None else model_of_version(version)
