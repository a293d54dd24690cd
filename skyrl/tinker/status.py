"""Status of a server for its operator, computed from existing state.

It covers the whole server (`overview`), each pending request with the reason why it waits (`Requests`), and each model
that accepts requests, whether or not the engine has it.

Tenants appear by their display names, never by their keys. Texts and tokens do not appear.
"""

import heapq
import math
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from sqlalchemy import ColumnElement, func, select
from sqlmodel import Session, col

from skyrl import __version__
from skyrl.tinker.context import Service
from skyrl.tinker.database.tables import ModelRow
from skyrl.tinker.identity.ids import SAMPLE, folder_of_model, model_of_version
from skyrl.tinker.requests.engine_models import State as ModelState
from skyrl.tinker.requests.futures import PendingFuture
from skyrl.tinker.requests.pending_training import PendingRequest
from skyrl.tinker.requests.queue import RequestQueue
from skyrl.tinker.requests.samples import WaitingSample
from skyrl.utils.machine import available_memory, host_memory, resident_memory
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


TAKES_REQUESTS = ("creating", "live")
PLACES: dict[ModelState | None, str] = {"here": "in the engine", None: "on disk"}
COLUMNS = [
    getattr(ModelRow, name)
    for name in ("model_id", "tenant", "lora_config", "created_at", "last_request_at", "snapshot_bytes")
]


def newest_models(session: Session, limit: int, tenant: str | None) -> tuple[list[Any], int]:
    """Return at most `limit` models, most recently used first, and the total number."""
    wanted: list[ColumnElement[bool]] = [col(ModelRow.status).in_(TAKES_REQUESTS)]
    if tenant is not None:
        wanted.append(col(ModelRow.tenant) == tenant)
    order = func.coalesce(col(ModelRow.last_request_at), col(ModelRow.created_at)).desc()
    rows = session.execute(select(*COLUMNS).where(*wanted).order_by(order, col(ModelRow.model_id)).limit(limit))
    total = session.execute(select(func.count()).select_from(ModelRow).where(*wanted)).scalar_one()
    return list(rows), total


def tenants_of(session: Session, model_ids: Collection[str]) -> dict[str, str]:
    """Return the tenant of each model."""
    model_id = col(ModelRow.model_id)
    rows = session.execute(select(model_id, col(ModelRow.tenant)).where(model_id.in_(model_ids)))
    return {row.model_id: row.tenant for row in rows}


def described_models(
    rows: Collection[Any], states: Mapping[str, ModelState], requests: Requests
) -> list[dict[str, Any]]:
    """Convert rows of `newest_models` to JSON. Ages are in seconds."""
    loads, now = requests.by_model(), time.time()
    return [
        {
            "model_id": row.model_id,
            "tenant": (tenant := requests.shown(row.tenant)),
            "rank": row.lora_config.get("rank"),
            **state_of(row.model_id, states, loads.get((row.model_id, tenant), Load()), requests),
            "age_s": round(now - row.created_at, 1),
            "idle_s": round(now - (row.last_request_at or row.created_at), 1),
            "snapshot_bytes": row.snapshot_bytes,
        }
        for row in rows
    ]


def state_of(model_id: str, states: Mapping[str, ModelState], load: Load, requests: Requests) -> dict[str, Any]:
    """Return the state of a model, and its number of requests."""
    state = states.get(model_id)
    return {
        "state": PLACES.get(state, state) if model_id else "in the engine",
        "waiting": load.waiting,
        "running": load.running,
        "oldest_s": None if load.oldest_at == math.inf else round(requests.now - load.oldest_at, 3),
        "waits_for": requests.waits_for(load.first) if load.first else None,
    }


MOST_MODELS = 200
"""Maximum number of models in the overview: first those with requests, then others in the engine."""
CACHE = ("cache_pages", "cache_pages_used")


def overview(
    service: Service, requests: Requests, states: Mapping[str, Any], owners: Mapping[str, str]
) -> dict[str, Any]:
    """Describe the server as JSON: counts since its API process started, ages in seconds. May be called in any thread.

    Args:
        service: The server's shared parts.
        requests: Pending requests of the server.
        states: States of models that are in the engine or on their way to or from it; see `EngineModels.states`.
        owners: Tenants of models without requests.
    """
    loads = dict(requests.by_model())
    busy = sorted(loads, key=lambda who: (who[0] != "", -_size(loads[who])))
    known = {model_id for model_id, _ in loads}
    others = [(model_id, requests.shown(owners.get(model_id, ""))) for model_id in states if model_id not in known]
    listed = [*busy, *others][:MOST_MODELS]
    oldest_at = min((load.oldest_at for load in loads.values()), default=None)
    return {
        "version": __version__,
        "time": time.time(),
        "uptime_s": round(time.time() - service.started_at, 1),
        "engine": _engine(service),
        "requests": {
            "waiting": sum(load.waiting for load in loads.values()),
            "running": sum(sum(load.running.values()) for load in loads.values()),
            "oldest_s": None if oldest_at is None else round(requests.now - oldest_at, 3),
            "ended": service.metrics.requests.ended_totals(),
            "failed": service.metrics.requests.failed_total(),
        },
        "tenants": [{"tenant": name, **totals} for name, totals in service.metrics.requests.tenant_totals().items()],
        "models": [
            {"model_id": who[0], "tenant": who[1], **state_of(who[0], states, loads.get(who, Load()), requests)}
            for who in listed
        ],
        "models_left_out": len(loads) + len(others) - len(listed),
        "memory": _memory(service),
        "slow_calls": [str(call) for call in service.slow_calls()],
        "disk": {"stored": service.metrics.storage.stored, "free": service.metrics.storage.free},
    }


def _size(load: Load) -> int:
    return load.waiting + sum(load.running.values())


def _engine(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "state": engine.state,
        "progress": service.redact(engine.progress),
        "pid": engine.pid,
        "restarts": service.metrics.engine.restarts_total(),
        "base_model": engine.info.base_model if engine.info else None,
    }


def _memory(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "api": resident_memory(os.getpid()),
        "engine": resident_memory(engine.pid) if engine.pid else None,
        "machine": host_memory(),
        "available": available_memory(),
        **{name: engine.statistics[name] for name in CACHE if name in engine.statistics},
    }
