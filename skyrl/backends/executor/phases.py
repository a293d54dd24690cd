"""Training and sampling by turns, on devices that only one of them can use at a time (`BackendInfo.colocated`).

A phase goes on while it has something to do and the other has not, or for `phase_s` seconds. Then nothing of it begins
any more, what is in flight ends, and hooks of the backend hand the devices over:

    training -> sampling: sleep("training"), wake("sampling"), resume()
    sampling -> training: pause(), sleep("sampling"), wake("training")

So neither starves: each has its phase after `phase_s` and what runs as it comes, whatever is sent for the other. A hook
that returns a future is waited for; nobody looks meanwhile.
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
    """Hooks of a backend for when devices change hands. See `Executor`."""

    phase_s: float

    def sleep(self, phase: Phase) -> "Future[Any] | None": ...

    def wake(self, phase: Phase) -> "Future[Any] | None": ...

    def pause(self) -> "Future[Any] | None": ...

    def resume(self) -> "Future[Any] | None": ...

    def notify(self) -> None:
        """Told when a future that a hook has returned is done."""
        ...


class Demand(NamedTuple):
    """Work that there is to do."""

    training: bool
    sampling: bool
    in_flight: bool
    """True if something of training is computed elsewhere, and so has to end before the devices change hands."""

    def of(self, phase: Phase) -> bool:
        """Return True if there is something to do for a phase."""
        return self.training or self.in_flight if phase == "training" else self.sampling


class Phases:
    """Phases of devices that training and sampling share.

    Args:
        hooks: Called when they change hands.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, hooks: Hooks, clock: Callable[[], float] = time.monotonic):
        self._hooks = hooks
        self._clock = clock
        self._phase: Phase | None = None
        """None until there is something to do."""
        self._since = 0.0
        """Begin of the phase, on the monotonic clock."""
        self._to_call: deque[Callable[[], Future[Any] | None]] = deque()
        self._called: Future[Any] | None = None
        """Future of the hook that was called last."""

    @property
    def is_changing(self) -> bool:
        """True if devices are changing hands, so that nothing may begin."""
        return self._called is not None or bool(self._to_call)

    def is_over(self, demand: Demand) -> bool:
        """Return True if the other phase is next, once what is in flight has ended."""
        if self._phase is None:
            return demand.of("training") or demand.of("sampling")
        return demand.of(_other(self._phase)) and (not demand.of(self._phase) or self._left <= 0)

    def now(self, demand: Demand) -> Phase | None:
        """The phase of which something may begin now; None: of neither."""
        return None if self.is_changing or self.is_over(demand) else self._phase

    def time_left(self, demand: Demand) -> float | None:
        """Seconds until the phase is over; None: nothing waits for that."""
        if self.now(demand) is None or self._phase is None or not demand.of(_other(self._phase)):
            return None
        return self._left

    def may_go_on(self, demand: Demand) -> bool:
        """Return True if `turn` would do something: a hook has ended, or one can be called."""
        if self.is_changing:
            return self._called is None or self._called.done()
        return self.is_over(demand) and not demand.in_flight

    def turn(self, demand: Demand) -> Phase | None:
        """Hand devices over if it is time for that. Returns the phase of which something is to be done now, if any.

        After each change that is something of the new phase, however short it is.
        """
        if not self.is_changing:
            if not self.may_go_on(demand):
                return self.now(demand)
            self._begin(_other(self._phase) if self._phase else ("training" if demand.training else "sampling"))
        return self._phase if self._has_changed() else None

    @property
    def _left(self) -> float:
        return self._since + self._hooks.phase_s - self._clock()

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
        """Call the hooks that can be called. Return True if all have ended."""
        try:
            while self.is_changing:
                if self._called is not None:
                    if not self._called.done():
                        return False
                    self._called.result()
                    self._called = None
                elif (called := self._to_call.popleft()()) is not None:
                    self._called = called
                    called.add_done_callback(lambda _: self._hooks.notify())
        except BackendLost:
            raise
        except Exception as error:
            raise BackendLost(f"devices cannot be handed over to {self._phase}: {error!r}", ()) from error
        self._since = self._clock()
        return True


def _other(phase: Phase) -> Phase:
    return "sampling" if phase == "training" else "training"
