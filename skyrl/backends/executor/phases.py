"""Alternating phases of training and sampling, for devices that they use in turns (`BackendInfo.colocated`).

While the other phase has no work, a phase lasts without limit. Otherwise it lasts until it has no more work, or for
`phase_s` seconds at most. Then it starts nothing more, its work in flight completes, and hooks of the backend hand the
devices over:

    training -> sampling: sleep("training"), wake("sampling"), resume()
    sampling -> training: pause(), sleep("sampling"), wake("training")

Neither phase starves: each starts at most `phase_s` seconds, plus the work in flight, after it gets work. If a hook
returns a future, the change continues when the future is done, without polling.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from skyrl.errors import BackendLost

Phase = Literal["training", "sampling"]


class Hooks(Protocol):
    """Hooks of a backend for the change of phases. See `Executor`."""

    phase_s: float
    deadline_s: float | None
    """Maximum seconds until the future of a hook is done; None: no limit."""

    def sleep(self, phase: Phase) -> "Future[Any] | None": ...

    def wake(self, phase: Phase) -> "Future[Any] | None": ...

    def pause(self) -> "Future[Any] | None": ...

    def resume(self) -> "Future[Any] | None": ...

    def notify(self) -> None:
        """Called when the future of a hook is done."""
        ...

    def hang(self) -> str:
        """Describe what does not end, for an error message."""
        ...


class Demand(NamedTuple):
    """Phases that have work."""

    training: bool
    sampling: bool
    in_flight: bool
    """True if a training dispatch is in flight, which has to complete before the phase changes."""

    def of(self, phase: Phase) -> bool:
        """Return True if a phase has work."""
        return self.training or self.in_flight if phase == "training" else self.sampling


class Phases:
    """State of the alternation between training and sampling.

    Args:
        hooks: Hooks to call when the phase changes.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, hooks: Hooks, clock: Callable[[], float] = time.monotonic):
        self._hooks = hooks
        self._clock = clock
        self._phase: Phase | None = None
        """The current phase; None until there is work."""
        self._since = 0.0
        """Start of the phase on the monotonic clock."""
        self._to_call: deque[Callable[[], Future[Any] | None]] = deque()
        self._called: Future[Any] | None = None
        """Future of the hook that was called last."""
        self._called_at = 0.0
        """Time of its call on the monotonic clock."""

    @property
    def is_changing(self) -> bool:
        """True during a change of phases, when nothing may start."""
        return self._called is not None or bool(self._to_call)

    def is_over(self, demand: Demand) -> bool:
        """Return True if the other phase is next, after the work in flight has completed."""
        if self._phase is None:
            return demand.of("training") or demand.of("sampling")
        return demand.of(_other(self._phase)) and (not demand.of(self._phase) or self._left <= 0)

    def now(self, demand: Demand) -> Phase | None:
        """Phase whose work may start now, or None."""
        return None if self.is_changing or self.is_over(demand) else self._phase

    def time_left(self, demand: Demand) -> float | None:
        """Seconds until the phase ends, or a hook is late; None if the other phase has no work."""
        if self._called is not None:
            return self._hook_left
        if self.now(demand) is None or self._phase is None or not demand.of(_other(self._phase)):
            return None
        return self._left

    def may_go_on(self, demand: Demand) -> bool:
        """Return True if `turn` has something to do: a hook has finished or is late, or one can be called."""
        if self.is_changing:
            return self._called is None or self._called.done() or self._hook_left == 0
        return self.is_over(demand) and not demand.in_flight

    def turn(self, demand: Demand) -> Phase | None:
        """Change the phase if it is time. Returns the phase whose work has to run now, if any.

        After each change, the new phase runs at least once, however short it is.
        """
        if not self.is_changing:
            if not self.may_go_on(demand):
                return self.now(demand)
            self._begin(_other(self._phase) if self._phase else ("training" if demand.training else "sampling"))
        return self._phase if self._has_changed() else None

    @property
    def _left(self) -> float:
        return self._since + self._hooks.phase_s - self._clock()

    @property
    def _hook_left(self) -> float | None:
        """Seconds until the called hook is late; None if there is no limit."""
        if self._hooks.deadline_s is None:
            return None
        return max(0.0, self._called_at + self._hooks.deadline_s - self._clock())

    def _begin(self, phase: Phase) -> None:
        hooks, before, self._phase = self._hooks, self._phase, phase
        if before == "sampling":
            self._to_call.append(hooks.pause)
        if before is not None:
            self._to_call.append(partial(hooks.sleep, before))
        self._to_call.append(partial(hooks.wake, phase))
        if phase == "sampling":
            self._to_call.append(hooks.resume)

    def _has_changed(self) -> bool:
        """Call the hooks that can be called. Returns True when all have finished."""
        try:
            while self.is_changing:
                if self._called is not None:
                    if not self._called.done():
                        if self._hook_left == 0:
                            raise BackendLost(
                                f"devices were not handed over to {self._phase} within {self._hooks.deadline_s:g} s"
                                f"{self._hooks.hang()}",
                                (),
                            )
                        return False
                    self._called.result()
                    self._called = None
                elif (called := self._to_call.popleft()()) is not None:
                    self._called, self._called_at = called, self._clock()
                    called.add_done_callback(lambda _: self._hooks.notify())
        except BackendLost:
            raise
        except Exception as error:
            raise BackendLost(f"devices cannot be handed over to {self._phase}: {error!r}", ()) from error
        self._since = self._clock()
        return True


def _other(phase: Phase) -> Phase:
    return "sampling" if phase == "training" else "training"
