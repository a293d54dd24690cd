"""Overview of the whole server."""

import os
import time
from collections.abc import Mapping
from typing import Any

from skyrl import __version__
from skyrl.tinker.context import Service
from skyrl.tinker.status.models import state_of
from skyrl.tinker.status.requests import Load, Requests
from skyrl.utils.machine import available_memory, host_memory, resident_memory

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
