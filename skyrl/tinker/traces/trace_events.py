"""Timelines in Chrome's trace event format, as JSON: https://ui.perfetto.dev and chrome://tracing open it.

A model or sampler is a process; its requests are slices on as few threads as keep them apart. Within a request's slice
lie its phases, without a gap:

queue     until the engine has it: it is logged, its model is brought back, its version is written, an engine starts
batch     until the engine computes it: its place in its model's order, its tenant's turn, room in a batch
compute   until the engine has finished it, with the files that it writes; others may be computed in between
save      until its outcome is stored and may be answered

Format: "Trace Event Format", Google, 2016 (complete events `X`, metadata events `M`; times in microseconds).
"""

import heapq
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from skyrl.tinker.identity.ids import kind_of
from skyrl.tinker.traces.timelines import Timeline

PIECE = 64
"""Requests that are written at a time, in a millisecond."""
PIECE_BYTES = 40_000
"""Bytes of their text, roughly."""

Event = dict[str, Any]


def text(session_id: str, timelines: Iterable[Timeline]) -> Iterator[bytes]:
    """The text of a trace, in pieces. What has not ended lasts until now.

    Args:
        session_id: Session that the requests are of.
        timelines: What is known of them.
    """
    now = time.monotonic()
    to_unix = time.time() - now
    yield b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[' % json.dumps({"session_id": session_id}).encode()
    lanes = _Lanes()
    requests = sorted(timelines, key=lambda one: one.accepted)
    for first in range(0, len(requests), PIECE):
        events = [event for one in requests[first : first + PIECE] for event in _of_request(one, lanes, now, to_unix)]
        piece = json.dumps(events, separators=(",", ":"))[1:-1].encode()
        yield b"," + piece if first else piece
    yield b"]}"


def phases(timeline: Timeline, now: float) -> Sequence[tuple[str, float, float]]:
    """(name, begin, end) of each phase that a request came to."""
    end = now if timeline.ended is None else timeline.ended
    begins = (
        ("queue", timeline.accepted),
        ("batch", timeline.sent),
        ("compute", timeline.began),
        ("save", timeline.done),
    )
    found = [(name, begin) for name, begin in begins if begin is not None]
    ends = [*(begin for _, begin in found[1:]), end]
    return [(name, begin, end) for (name, begin), end in zip(found, ends, strict=True)]


class _Lanes:
    """Processes for models and samplers, and threads of which each has one request at a time."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._free: dict[str, list[tuple[float, int]]] = {}
        """By model or sampler, when each of its threads is free."""

    def place(self, run: str, begin: float, end: float) -> tuple[int, int, bool]:
        """(process, thread, whether the process is new)."""
        is_new = run not in self._processes
        process = self._processes.setdefault(run, len(self._processes) + 1)
        free = self._free.setdefault(run, [])
        if free and free[0][0] <= begin:
            thread = free[0][1]
            heapq.heapreplace(free, (end, thread))
        else:
            thread = len(free) + 1
            heapq.heappush(free, (end, thread))
        return process, thread, is_new


def _of_request(timeline: Timeline, lanes: _Lanes, now: float, to_unix: float) -> Iterator[Event]:
    parts = phases(timeline, now)
    begin, end = parts[0][1], parts[-1][2]
    process, thread, is_new = lanes.place(timeline.run, begin, end)
    place = {"pid": process, "tid": thread}
    if is_new:
        yield {"name": "process_name", "ph": "M", **place, "args": {"name": timeline.run}}
    args = {"request_id": timeline.request_id, "outcome": timeline.outcome, "engines_ended": timeline.engines}
    whole = (kind_of(timeline.request_id), begin, end)
    for category, (name, since, until), told in (
        ("request", whole, args),
        *(("phase", phase, {}) for phase in parts),
    ):
        # Both ends are rounded alike, so that a phase never sticks out of its request.
        start, stop = (round((moment + to_unix) * 1e6) for moment in (since, until))
        yield {"name": name, "cat": category, "ph": "X", "ts": start, "dur": stop - start, **place, "args": told}
