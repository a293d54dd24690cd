"""Models that accept requests, whether or not the engine has them."""

import math
import time
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlmodel import Session, col

from skyrl.tinker.database.tables import ModelRow
from skyrl.tinker.requests.engine_models import State
from skyrl.tinker.status.requests import Load, Requests

TAKES_REQUESTS = ("creating", "live")
PLACES: dict[State | None, str] = {"here": "in the engine", None: "on disk"}
COLUMNS = [
    getattr(ModelRow, name)
    for name in ("model_id", "tenant", "lora_config", "created_at", "last_request_at", "snapshot_bytes")
]


def newest(session: Session, limit: int, tenant: str | None) -> tuple[list[Any], int]:
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


def described(rows: Collection[Any], states: Mapping[str, State], requests: Requests) -> list[dict[str, Any]]:
    """Convert rows of `newest` to JSON. Ages are in seconds."""
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


def state_of(model_id: str, states: Mapping[str, State], load: Load, requests: Requests) -> dict[str, Any]:
    """Return the state of a model, and its number of requests."""
    state = states.get(model_id)
    return {
        "state": PLACES.get(state, state) if model_id else "in the engine",
        "waiting": load.waiting,
        "running": load.running,
        "oldest_s": None if load.oldest_at == math.inf else round(requests.now - load.oldest_at, 3),
        "waits_for": requests.waits_for(load.first) if load.first else None,
    }
