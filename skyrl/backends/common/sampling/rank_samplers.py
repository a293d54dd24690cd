"""Data-parallel sampling: each rank with the whole base model has a sampler, and each request goes to one of them.

Each rank's sampler has its own cache and queue. The samplers' bursts run in parallel threads, but only one thread
computes at a time: a thread has the lock `Turn`, and releases it while it waits for its rank. Shared state of the
samplers therefore needs no other lock.
"""

import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.sampler import Sampler
from skyrl.backends.operations import Completion, Sample
from skyrl.backends.statistics import Statistics

Version = TypeVar("Version")


class Turn:
    """Lock that lets one thread at a time compute. A thread releases it while it waits for its rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Let other threads run during this context. The calling thread must hold the lock."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class RankSamplers(Generic[Version]):
    """`SamplerLoop` of several samplers.

    Args:
        samplers: One sampler for each rank.
        turn: Lock shared by the runners of all samplers.
    """

    elsewhere: tuple[str, ...] = ()

    def __init__(self, samplers: Sequence[Sampler[Version]], turn: Turn):
        self._samplers, self._turn = samplers, turn
        self._pool = ThreadPoolExecutor(len(samplers), thread_name_prefix="sampler")
        self._places: dict[str, tuple[int, int]] = {}
        """(index of the sampler, number of sequences) of each request in progress."""
        self._load: Counter[int] = Counter()
        """Number of sequences in progress, by index of the sampler."""

    @property
    def busy(self) -> bool:
        return any(sampler.busy for sampler in self._samplers)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(request for sampler in self._samplers for request in sampler.running)

    @property
    def statistics(self) -> Statistics:
        """Sums over ranks."""
        total: Counter[str] = Counter()
        for sampler in self._samplers:
            total.update(sampler.statistics)
        return dict(total)

    def weigh(self, weights: Mapping[str, float]) -> None:
        for sampler in self._samplers:
            sampler.weigh(weights)

    def add(self, request: Sample) -> None:
        """Queue a request at the sampler whose cache may have its prefix, unless another sampler has much less load."""
        place, count = self._place_for(request), request.num_samples
        self._samplers[place].add(request)
        self._places[request.request_id] = place, count
        self._load[place] += count

    def _place_for(self, request: Sample) -> int:
        least = min(range(len(self._samplers)), key=lambda place: self._load[place])
        start = request.prompt[:PAGE_SIZE].tobytes()
        known = zlib.crc32(f"{request.tenant} {request.version}".encode() + start) % len(self._samplers)
        return known if self._load[known] < self._load[least] + max(1, request.num_samples) else least

    def cancel(self, request_id: str) -> None:
        if request_id in self._places:
            self._samplers[self._places[request_id][0]].cancel(request_id)
            self._forget(request_id)

    def burst(self) -> list[Completion]:
        """Run the bursts of all busy samplers in parallel. Raises a sampler's error after all bursts have ended."""
        bursts = [self._pool.submit(self._burst, sampler) for sampler in self._samplers if sampler.busy]
        wait(bursts)
        completions = [completion for burst in bursts for completion in burst.result()]
        for completion in completions:
            self._forget(completion.request_id)
        return completions

    def _burst(self, sampler: Sampler[Version]) -> list[Completion]:
        with self._turn:
            return sampler.burst()

    def _forget(self, request_id: str) -> None:
        place, count = self._places.pop(request_id)
        self._load[place] -= count

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()
