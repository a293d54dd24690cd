"""In which order requests reach the backend: a model's strictly by seq_id.

A model's requests carry seq_ids 0, 1, 2, ... and may arrive in any order after 0, its creation. One that arrives early
is held until those before it are here. If nothing of the model comes for `gap_timeout_s`, what is held fails, in its
place in the model's order, and the model goes on with the next request. Requests whose turn has come go to the backend
at once, which is fair between tenants; only a flood of samples waits here (`SampleWindow`).

It also knows how far each model is: which request was the last to end. A revived model has a place in its order again
once all that repeats its past has ended.

Pure: no threads, no clock but the `now` (seconds) that is passed in.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from skyrl.backends.operations import (
    DeleteModel,
    ModelOperation,
    Operation,
    OptimStep,
    Rejected,
    Sample,
)
from skyrl.tinker.engine.sample_window import SampleWindow
from skyrl.types import GradientEffect


@dataclass
class _Line:
    """Requests that a model has had, and those that are held."""

    tenant: str
    """Tenant of the request that made or revived it."""
    next_seq_id: int = 0
    held: dict[int, ModelOperation] = field(default_factory=dict)
    """By seq_id."""
    finished: int | None = None
    """The highest seq_id that has ended. None: not even the model's past is complete."""


class Scheduler:
    """Orders requests: `add` them, submit what `next` returns, report its end to `done`; `expire` at `deadline`.

    Args:
        gap_timeout_s: Seconds that requests wait for a missing earlier one while nothing else of their model comes.
        samples_at_a_time: As in `BackendInfo`.
    """

    def __init__(self, gap_timeout_s: float, samples_at_a_time: int):
        self.gap_timeout_s = gap_timeout_s
        self._ready: deque[ModelOperation] = deque()
        self._unended: set[str] = set()
        """Model operations that are queued or outstanding."""
        self._samples = SampleWindow(samples_at_a_time)
        self._lines: dict[str, _Line] = {}
        self._gaps: dict[str, float] = {}
        """Models with held requests, and when something of them came last."""
        self._notices: list[tuple[str, str | None]] = []
        self._own: set[str] = set()
        self._seq_ids: dict[str, int] = {}
        """By request id, of what is queued or outstanding."""
        self._unfinished: Counter[str] = Counter()
        """Operations of each model that are queued or outstanding."""

    def add(self, operation: Operation, seq_id: int | None, now: float) -> None:
        """Take in a request. `seq_id` is its place in the model's order; None takes the next place when it arrives.

        Requests of a model whose creation has not been here (or that was deleted) are not held: the backend says at
        once that there is no such model.
        """
        if isinstance(operation, Sample):
            self._samples.add(operation)
            return
        assert isinstance(operation, ModelOperation), operation
        if seq_id == 0:
            self._lines.setdefault(operation.model_id, _Line(operation.tenant))
        line = self._lines.get(operation.model_id)
        if line is None or seq_id is None:
            if isinstance(operation, DeleteModel):
                self._fail_held(operation.model_id, "its model was deleted")
            self._queue(operation, None)
        elif seq_id >= line.next_seq_id:
            self._line_up(line, seq_id, operation, now)
        else:
            error = (
                f"seq_id={seq_id} of model {operation.model_id} arrived more than {self.gap_timeout_s:g} s after its "
                "followers, which have failed for want of it; send all of them again"
            )
            self._queue(_rejected(operation, error, "kept"), None)

    def revive(self, model_id: str, next_seq_id: int, operations: Sequence[ModelOperation]) -> None:
        """Queue what brings a model back, in order. The request after it is `next_seq_id`."""
        *earlier, last = operations
        self._lines[model_id] = _Line(last.tenant, next_seq_id)
        for operation in earlier:
            self._queue(operation, None)
        self._queue(last, next_seq_id - 1)

    def next(self) -> Operation | None:
        """The next operation to submit, outstanding from now on until `done`; None if nothing may go now."""
        return self._ready.popleft() if self._ready else self._samples.next()

    def done(self, operation: Operation) -> bool:
        """A submitted operation has ended, or was cancelled. Returns True if it was added (not made here)."""
        if isinstance(operation, Sample):
            self._samples.done(operation)
        elif isinstance(operation, ModelOperation):
            self._ended(operation)
        if operation.request_id in self._own:
            self._own.remove(operation.request_id)
            return False
        return True

    def tenant(self, model_id: str) -> str:
        """Tenant of a model; nobody ("") if it is not known."""
        line = self._lines.get(model_id)
        return line.tenant if line else ""

    def knows(self, model_id: str) -> bool:
        """Return True if the model keeps an order here: it was created or revived, and not forgotten since."""
        return model_id in self._lines

    def idle(self, model_id: str) -> bool:
        """Return True if nothing of the model is held, queued or outstanding."""
        return model_id not in self._unfinished and model_id not in self._gaps

    def finished(self, model_id: str) -> int | None:
        """The last seq_id that has ended; None while the model's past has not."""
        line = self._lines.get(model_id)
        return line.finished if line else None

    def forget(self, model_id: str, why: str) -> None:
        """The model is not in the backend any more. What is held fails."""
        self._fail_held(model_id, why)
        self._lines.pop(model_id, None)

    def drop_sample(self, request_id: str) -> bool:
        """Forget a sample that has not been submitted. Returns True if there was one."""
        return self._samples.remove(request_id)

    def refuse(self, refusal: Rejected) -> bool:
        """Put a refusal in the place of a request that has not been submitted. Returns True if there was one."""
        line = self._lines.get(refusal.model_id)
        held = line.held if line else {}
        for seq_id, operation in held.items():
            if operation.request_id == refusal.request_id:
                held[seq_id] = refusal
                return True
        for number, operation in enumerate(self._ready):
            if operation.request_id == refusal.request_id:
                self._ready[number] = refusal
                return True
        return False

    def turned_away(self, model_id: str, now: float) -> None:
        """A request of the model came for which there was no room, and will come again: held ones wait on."""
        if model_id in self._gaps:
            self._gaps[model_id] = now

    def deadline(self) -> float:
        """Time at which `expire` has something to do at the earliest; infinity if no request is held."""
        return min(self._gaps.values(), default=math.inf) + self.gap_timeout_s

    def expire(self, now: float) -> None:
        """Fail what has been held for too long, in its place in its model's order."""
        for model_id, since in list(self._gaps.items()):
            if now >= since + self.gap_timeout_s:
                missing = self._lines[model_id].next_seq_id
                self._fail_held(model_id, f"seq_id={missing} did not arrive within {self.gap_timeout_s:g} s")

    def notices(self) -> list[tuple[str, str | None]]:
        """(request_id, why it is held, or None: it is held no longer) since the last call, in order."""
        notices, self._notices = self._notices, []
        return notices

    def _line_up(self, line: _Line, seq_id: int, operation: ModelOperation, now: float) -> None:
        """Hold a request, then queue all whose turn has come."""
        if seq_id in line.held:
            return
        line.held[seq_id] = operation
        if seq_id > line.next_seq_id:
            self._gaps[operation.model_id] = now
            reason = f"waiting for the request with seq_id={line.next_seq_id}, which has not arrived"
            self._notices.append((operation.request_id, reason))
            return
        while line.next_seq_id in line.held:
            ready = line.held.pop(line.next_seq_id)
            self._queue(ready, line.next_seq_id)
            if line.next_seq_id > seq_id:
                self._notices.append((ready.request_id, None))
            line.next_seq_id += 1
        if not line.held:
            self._gaps.pop(operation.model_id, None)
        else:
            self._gaps[operation.model_id] = now

    def _fail_held(self, model_id: str, why: str) -> None:
        """Queue held requests as failures. What is missing may have been a pass, so no gradients survive it."""
        if self._gaps.pop(model_id, None) is None:
            return
        line = self._lines[model_id]
        for seq_id, operation in sorted(line.held.items()):
            line.next_seq_id = seq_id + 1
            error = f"seq_id={seq_id} of model {model_id} was not done: {why}; send it again with what was missing"
            failed = _rejected(operation, error, "incomplete")
            if isinstance(operation, Rejected):
                gradients = "dropped" if operation.gradients == "dropped" else "incomplete"
                failed = replace(operation, gradients=gradients)
            self._notices.append((operation.request_id, None))
            if isinstance(operation, OptimStep):
                # An optimizer step after a failed pass fails itself and clears the sums, which a mere failure does not.
                first = replace(failed, request_id=f"before {failed.request_id}")
                self._own.add(first.request_id)
                self._queue(first, None)
                self._queue(operation, seq_id)
            else:
                self._queue(failed, seq_id)
        line.held.clear()

    def _ended(self, operation: ModelOperation) -> None:
        model_id, seq_id = operation.model_id, self._seq_ids.pop(operation.request_id, None)
        self._unended.discard(operation.request_id)
        self._unfinished[model_id] -= 1
        if not self._unfinished[model_id]:
            del self._unfinished[model_id]
        line = self._lines.get(model_id)
        if line is not None and seq_id is not None:
            line.finished = seq_id if line.finished is None else max(line.finished, seq_id)
        if isinstance(operation, DeleteModel):
            self.forget(model_id, "its model was deleted")

    def _queue(self, operation: ModelOperation, seq_id: int | None) -> None:
        request_id, model_id = operation.request_id, operation.model_id
        if request_id in self._unended:
            return
        self._unended.add(request_id)
        self._ready.append(operation)
        self._unfinished[model_id] += 1
        if seq_id is not None:
            self._seq_ids[request_id] = seq_id


def _rejected(operation: ModelOperation, error: str, gradients: GradientEffect) -> Rejected:
    return Rejected(
        request_id=operation.request_id,
        tenant=operation.tenant,
        model_id=operation.model_id,
        error=error,
        gradients=gradients,
    )
