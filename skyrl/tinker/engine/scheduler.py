"""Order of requests: operations of a model reach the backend strictly by seq_id.

A model's requests have the seq_ids 0, 1, 2, ..., where 0 creates the model. After 0, they may arrive in any order. A
request that arrives early is held until all earlier ones have arrived. If no request of the model arrives for
`gap_timeout_s`, the held requests fail at their positions in the model's order, and the model continues with the next
request. Other requests go to the backend at once, and the backend schedules them fairly. Only samples above the limit
of `SampleWindow` wait here: a window of tokens per tenant, which limits the memory for a tenant's results until they
are sent to the API process. Each tenant has a separate window, so no sample waits here for another tenant.

The scheduler also tracks the last finished request of each model. For a revived model, it is unknown until all replayed
operations have finished.

The scheduler has no threads and no clock except the `now` argument, in seconds.
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
from skyrl.types import GradientEffect

AT_LEAST = 64
"""Minimum number of samples that fit into a tenant's window, however large they are."""


@dataclass
class _Tenant:
    used: int = 0
    """Tokens of the samples that the backend has."""
    waiting: dict[str, Sample] = field(default_factory=dict)


class SampleWindow:
    """Waiting and admitted samples of each tenant, in order of arrival.

    Args:
        tokens: Size of each tenant's window in tokens. Prompts and possible output count.
    """

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._tenants: dict[str, _Tenant] = {}
        self._able: deque[str] = deque()
        """Tenants that may have both room and waiting samples; entries can be outdated."""
        self._out: dict[str, Sample] = {}

    def add(self, sample: Sample) -> None:
        """Add a sample; duplicates are ignored."""
        tenant = self._tenants.setdefault(sample.tenant, _Tenant())
        if sample.request_id not in self._out:
            tenant.waiting.setdefault(sample.request_id, sample)
        self._able.append(sample.tenant)

    def next(self) -> Sample | None:
        """Admit and return the next sample, which occupies the window until `done`."""
        while self._able:
            tenant = self._tenants.get(self._able[0])
            if tenant is None or not tenant.waiting or tenant.used >= self._tokens:
                self._able.popleft()
                continue
            sample = tenant.waiting.pop(next(iter(tenant.waiting)))
            tenant.used += self._share(sample)
            self._out[sample.request_id] = sample
            return sample
        return None

    def done(self, sample: Sample) -> None:
        """Free a sample's part of the window. The sample has left the backend, and its result has left the memory."""
        if self._out.pop(sample.request_id, None) is not None:
            self._tenants[sample.tenant].used -= self._share(sample)
            self._able.append(sample.tenant)
            self._forget_idle(sample.tenant)

    def remove(self, request_id: str) -> bool:
        """Remove a waiting sample. Returns True if the sample was waiting here."""
        for name, tenant in self._tenants.items():
            if tenant.waiting.pop(request_id, None) is not None:
                self._forget_idle(name)
                return True
        return False

    def _share(self, sample: Sample) -> int:
        return min(cost_of(sample), self._tokens // AT_LEAST)

    def _forget_idle(self, name: str) -> None:
        if not (self._tenants[name].waiting or self._tenants[name].used):
            del self._tenants[name]


def cost_of(sample: Sample) -> int:
    """Return the number of tokens in a sample's prompt plus the number that may be generated."""
    return len(sample.prompt) + (sample.params.max_tokens or 1) * sample.num_samples


@dataclass
class _Line:
    """Order of one model: the next seq_id, and held requests."""

    tenant: str
    """Tenant of the request that created or revived the model."""
    next_seq_id: int = 0
    held: dict[int, ModelOperation] = field(default_factory=dict)
    """Held requests by seq_id."""
    finished: int | None = None
    """The highest finished seq_id. None: the creation or the replay has not finished."""


class Scheduler:
    """Orders requests: `add` them, submit what `next` returns, report each end to `done`, and call `expire` at
    `deadline`.

    Args:
        gap_timeout_s: Seconds that held requests wait for a missing one while no other request of their model arrives.
        samples_at_a_time: Size of each tenant's `SampleWindow` in tokens; see `BackendInfo.samples_at_a_time`.
    """

    def __init__(self, gap_timeout_s: float, samples_at_a_time: int):
        self.gap_timeout_s = gap_timeout_s
        self._ready: deque[ModelOperation] = deque()
        self._unended: set[str] = set()
        """Ids of model operations that are queued or outstanding."""
        self._samples = SampleWindow(samples_at_a_time)
        self._lines: dict[str, _Line] = {}
        self._gaps: dict[str, float] = {}
        """For each model with held requests: the time at which its last request arrived."""
        self._notices: list[tuple[str, str | None]] = []
        self._own: set[str] = set()
        self._seq_ids: dict[str, int] = {}
        """seq_ids of queued and outstanding operations, by request id."""
        self._unfinished: Counter[str] = Counter()
        """Number of queued and outstanding operations of each model."""

    def add(self, operation: Operation, seq_id: int | None, now: float) -> None:
        """Add a request. `seq_id` is its position in the model's order; None takes the next position on arrival.

        Requests of a model that is not in this engine are not held, and the backend rejects them at once.
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
        """Queue the operations that revive a model, in order. The next request has the position `next_seq_id`."""
        *earlier, last = operations
        self._lines[model_id] = _Line(last.tenant, next_seq_id)
        for operation in earlier:
            self._queue(operation, None)
        self._queue(last, next_seq_id - 1)

    def next(self) -> Operation | None:
        """Return the next operation to submit, or None. The operation is outstanding until `done`."""
        return self._ready.popleft() if self._ready else self._samples.next()

    def done(self, operation: Operation) -> bool:
        """Record that a submitted operation has ended or was cancelled.

        Returns False if the scheduler itself added the operation, so that its result is not sent.
        """
        if isinstance(operation, Sample):
            self._samples.done(operation)
        elif isinstance(operation, ModelOperation):
            self._ended(operation)
        if operation.request_id in self._own:
            self._own.remove(operation.request_id)
            return False
        return True

    def tenant(self, model_id: str) -> str:
        """Return the tenant of a model, or "" if the model is not known."""
        line = self._lines.get(model_id)
        return line.tenant if line else ""

    def knows(self, model_id: str) -> bool:
        """Return True if the model was created or revived here, and not forgotten since."""
        return model_id in self._lines

    def idle(self, model_id: str) -> bool:
        """Return True if the model has no held, queued or outstanding operations."""
        return model_id not in self._unfinished and model_id not in self._gaps

    def finished(self, model_id: str) -> int | None:
        """Return the last finished seq_id, or None until the creation or the replay has finished."""
        line = self._lines.get(model_id)
        return line.finished if line else None

    def forget(self, model_id: str, why: str) -> None:
        """Forget a model that is no longer in the backend. Its held requests fail."""
        self._fail_held(model_id, why)
        self._lines.pop(model_id, None)

    def drop_sample(self, request_id: str) -> bool:
        """Remove a sample that was not submitted yet. Returns True if the sample was found."""
        return self._samples.remove(request_id)

    def refuse(self, refusal: Rejected) -> bool:
        """If a request was not submitted yet, put `refusal` in its place. Returns True if the request was found."""
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
        """Restart the timeout of a model's held requests, because the server rejected an earlier request for lack of
        memory.

        The client will send the rejected request again.
        """
        if model_id in self._gaps:
            self._gaps[model_id] = now

    def deadline(self) -> float:
        """Earliest time at which `expire` has something to do; infinity if no request is held."""
        return min(self._gaps.values(), default=math.inf) + self.gap_timeout_s

    def expire(self, now: float) -> None:
        """Fail requests that were held for too long, at their positions in the model's order."""
        for model_id, since in list(self._gaps.items()):
            if now >= since + self.gap_timeout_s:
                missing = self._lines[model_id].next_seq_id
                self._fail_held(model_id, f"seq_id={missing} did not arrive within {self.gap_timeout_s:g} s")

    def notices(self) -> list[tuple[str, str | None]]:
        """Return the changes since the last call, in order, as (request id, reason why the request is held). A reason
        of None means that the request is no longer held."""
        notices, self._notices = self._notices, []
        return notices

    def _line_up(self, line: _Line, seq_id: int, operation: ModelOperation, now: float) -> None:
        """Hold a request, then queue all held requests whose predecessors have arrived."""
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
        """Queue a model's held requests as failures.

        The missing request may have been a pass, so the gradient sums count as incomplete. A held optimizer step is
        queued after a failed pass, so that the step fails and clears the sums.
        """
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
                # After a failed pass, an optimizer step fails and clears the sums; another failure would not.
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
