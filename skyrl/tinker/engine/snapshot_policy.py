"""Snapshot policy: after a number of optimizer steps, requests or bytes, and after each load.

With full fine-tuning, snapshots are as large as the base model. Such a model is snapshotted after each checkpoint that
it saves instead of after a number of steps.

The policy counts finished work since the last successful snapshot. A model has at most one snapshot in progress. A
failed snapshot is retried after a growing pause, and the retry includes later work. A load triggers a snapshot at once,
because the files that were loaded may be deleted.

The policy has no clock except the `now` argument, in seconds.
"""

import math
from dataclasses import dataclass, field, fields

from skyrl.backends.operations import (
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    OptimStep,
    Publish,
    Rejected,
    SaveCheckpoint,
)
from skyrl.types import Datum
from skyrl.utils.backoff import pause_s

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


@dataclass
class _Counts:
    """Work that a revival would have to replay."""

    changes: int = 0
    """Requests that may have changed the model."""
    steps: int = 0
    requests: int = 0
    bytes: int = 0
    loads: int = 0
    checkpoints: int = 0

    def add(self, other: "_Counts") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class _Model:
    since: _Counts = field(default_factory=_Counts)
    """Work since the last snapshot, or since the start of the snapshot in progress."""
    under_way: _Counts | None = None
    """Work that the snapshot in progress covers."""
    whole: bool = False
    """True if the model has base weights of its own (full fine-tuning)."""
    failures: int = 0
    """Consecutive failed snapshots."""
    retry_at: float = -math.inf


class SnapshotPolicy:
    """Decides when to snapshot models: `note` operations, `begin` the snapshots that are `due`, report results."""

    def __init__(self, *, every_steps: int, every_requests: int, every_bytes: int):
        self._every = _Counts(steps=every_steps, requests=every_requests, bytes=every_bytes, loads=1)
        self._models: dict[str, _Model] = {}
        self._wanted: set[str] = set()
        """Models that have reached a limit."""

    def note(self, operation: ModelOperation, whole: bool = False) -> None:
        """Count a finished operation. `whole` is True for a model with full fine-tuning instead of an adapter."""
        model = self._models.setdefault(operation.model_id, _Model())
        model.whole = whole
        model.since.add(_counts_of(operation))
        self._consider(operation.model_id)

    def due(self, now: float) -> list[str]:
        """Models to snapshot now."""
        return [model_id for model_id in self._wanted if self._models[model_id].retry_at <= now]

    def deadline(self, now: float) -> float:
        """Earliest time after `now` at which a failed snapshot is retried; infinity if no retry is pending."""
        times = (self._models[model_id].retry_at for model_id in self._wanted)
        return min((time for time in times if time > now), default=math.inf)

    def changed(self) -> list[str]:
        """Models that may have changed since their last snapshot, or since the start of the snapshot in progress."""
        return [model_id for model_id, model in self._models.items() if model.since.changes]

    def under_way(self, model_id: str) -> bool:
        """Return True if a snapshot of the model is in progress."""
        return model_id in self._models and self._models[model_id].under_way is not None

    def begin(self, model_id: str) -> None:
        """Record that a snapshot of the model was submitted to the backend."""
        model = self._models[model_id]
        assert model.under_way is None, model_id
        model.under_way, model.since = model.since, _Counts()
        self._consider(model_id)

    def succeeded(self, model_id: str) -> None:
        """Record that the snapshot is on disk."""
        if model_id in self._models:
            model = self._models[model_id]
            model.under_way, model.failures, model.retry_at = None, 0, -math.inf
            self._consider(model_id)

    def failed(self, model_id: str, now: float) -> None:
        """Record that the snapshot failed. The work that it would have covered still counts."""
        if model_id in self._models:
            model = self._models[model_id]
            assert model.under_way is not None, model_id
            model.since.add(model.under_way)
            model.under_way = None
            model.retry_at = now + pause_s(model.failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            model.failures += 1
            self._consider(model_id)

    def forget(self, model_id: str) -> None:
        """Forget a model that is gone."""
        self._models.pop(model_id, None)
        self._wanted.discard(model_id)

    def _consider(self, model_id: str) -> None:
        model, every = self._models[model_id], self._every
        since = model.since
        limits = (
            since.checkpoints >= 1 if model.whole else since.steps >= every.steps,
            since.requests >= every.requests,
            since.bytes >= every.bytes,
            since.loads >= every.loads,
        )
        if since.changes and any(limits) and model.under_way is None:
            self._wanted.add(model_id)
        else:
            self._wanted.discard(model_id)


def _counts_of(operation: ModelOperation) -> _Counts:
    if isinstance(operation, LoadSnapshot):
        return _Counts()
    if isinstance(operation, ForwardBackward) and operation.forward_only:
        return _Counts()
    same = isinstance(operation, SaveCheckpoint | Publish)
    same |= isinstance(operation, Rejected) and operation.gradients == "kept"
    return _Counts(
        changes=int(not same),
        steps=int(isinstance(operation, OptimStep)),
        requests=1,
        bytes=sum(map(_bytes_of, operation.data)) if isinstance(operation, ForwardBackward) else 0,
        loads=int(isinstance(operation, LoadCheckpoint)),
        checkpoints=int(isinstance(operation, SaveCheckpoint)),
    )


def _bytes_of(datum: Datum) -> int:
    return datum.tokens.nbytes + sum(array.nbytes for array in datum.loss_fn_inputs.values())
