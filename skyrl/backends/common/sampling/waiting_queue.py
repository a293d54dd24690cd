"""Requests that wait to be sampled: who is next, and who may pass whom.

They begin in the order of `FairQueue`, fairly between tenants. One that lacks room (pages of the cache, or a slot for
its version) is passed by those behind it that find some, until these have taken as many pages in all as the cache has.
From then on nobody passes it, so what ends makes room for it: a large request waits for what runs and for one cache's
worth of smaller ones, never for ever. A request that has begun and lacks pages for its next sample is passed within the
same limit.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set

from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.prefill import pages_of, pages_per_sample
from skyrl.backends.common.sampling.sequences import Job
from skyrl.backends.executor.fair_queue import FairQueue

LOOK_PAST = 64
"""Requests without room that are passed at most; those whose version is being read do not count."""
LOOK_AT = 512
"""Requests that are looked at, at most, unless there are more tenants: a long line costs no more than a short one."""


class WaitingQueue:
    """Jobs that have not begun.

    Args:
        room: Pages of the cache.
    """

    def __init__(self, room: int):
        self._room = room
        self._jobs: FairQueue[Job] = FairQueue()

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants. Before anything waits."""
        self._jobs.weigh(weights)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job.request.request_id in self._jobs

    def get(self, request_id: str) -> Job | None:
        """The job of a request, if it has not begun."""
        return self._jobs.get(request_id)

    @property
    def tenants(self) -> Set[str]:
        """Tenants that wait."""
        return self._jobs.tenants

    def append(self, job: Job) -> None:
        self._jobs.add(job.request, job)

    def remove(self, job: Job) -> None:
        self._jobs.remove(job.request.request_id)

    def begin(self, job: Job) -> None:
        """A job has begun: its tenant is charged for its prompt."""
        self._jobs.begin(job.request.request_id)

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens were generated for a tenant or, if fewer than 0, did not have to be read."""
        self._jobs.charge(tenant, tokens)

    def order(self) -> Iterator[Job]:
        """Requests that are looked at, in the order in which they begin if each finds room."""
        return self._jobs.order(LOOK_AT)

    def may_begin(self, begun: Sequence[Job] = ()) -> Iterator[Job]:
        """The jobs that may begin if there is room, in order. Who lets one begin calls `begin` before going on.

        Args:
            begun: Jobs that have left the line; those that lack room count as ahead of all that wait.
        """
        ahead = [job for job in begun if job.lacks_room]
        left = min((self._room - job.passed_by for job in ahead), default=math.inf)
        lacking = 0
        for job in self.order():
            if left <= 0 or lacking >= LOOK_PAST:
                return
            pages = pages_in_all(job)
            if pages <= left:
                yield job
                if job not in self:
                    if job.slot is not None:  # it has begun
                        for other in ahead:
                            other.passed_by += pages
                        left -= pages
                    continue
            if job.lacks_room:
                lacking += 1
                ahead.append(job)
                left = min(left, self._room - job.passed_by)


def pages_to_begin(job: Job) -> int:
    """Pages that a prompt and its first sample take."""
    return pages_of(job, PAGE_SIZE) + pages_per_sample(job, PAGE_SIZE)


def pages_in_all(job: Job) -> int:
    """Pages that a prompt and all its samples take."""
    return pages_of(job, PAGE_SIZE) + job.request.num_samples * pages_per_sample(job, PAGE_SIZE)
