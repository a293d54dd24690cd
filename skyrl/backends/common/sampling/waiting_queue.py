"""Queue of requests that wait to be sampled: order of admission, and rules for overtaking.

Requests start in the order of `FairQueue`, fairly between tenants. A request that lacks room (cache pages, or a slot
for its version) is overtaken by later requests that have room, until these have taken as many pages in total as the
cache has. From then on nobody overtakes it, and pages that become free are kept for it. A large request therefore waits
for the running requests, and for smaller ones that together take at most as many pages as the cache has. It never
starves. The same limit applies to a started request without pages for its next sample.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set

from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.prefill import pages_of, pages_per_sample
from skyrl.backends.common.sampling.sequences import Job
from skyrl.backends.executor.fair_queue import FairQueue

LOOK_PAST = 64
"""Maximum number of requests without room to overtake; requests whose version is being read do not count."""
LOOK_AT = 512
"""Maximum number of requests to examine, unless there are more tenants. Limits the cost of long queues."""


class WaitingQueue:
    """Jobs that have not started.

    Args:
        room: Pages of the cache.
    """

    def __init__(self, room: int):
        self._room = room
        self._jobs: FairQueue[Job] = FairQueue()

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants. Call before `append`."""
        self._jobs.weigh(weights)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job.request.request_id in self._jobs

    def get(self, request_id: str) -> Job | None:
        """Job of a request; None if it is not waiting."""
        return self._jobs.get(request_id)

    @property
    def tenants(self) -> Set[str]:
        """Tenants with waiting requests."""
        return self._jobs.tenants

    def append(self, job: Job) -> None:
        self._jobs.add(job.request, job)

    def remove(self, job: Job) -> None:
        self._jobs.remove(job.request.request_id)

    def begin(self, job: Job) -> None:
        """Remove a job that starts, and charge its tenant for the prompt."""
        self._jobs.begin(job.request.request_id)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge a tenant for generated tokens. A negative number credits prompt tokens found in the cache."""
        self._jobs.charge(tenant, tokens)

    def order(self) -> Iterator[Job]:
        """Iterate over the requests to examine, in the order in which they start if each finds room."""
        return self._jobs.order(LOOK_AT)

    def may_begin(self, begun: Sequence[Job] = ()) -> Iterator[Job]:
        """Iterate over jobs that may start if there is room, in order.

        A caller that starts a job calls `begin` before it asks for the next job.

        Args:
            begun: Started jobs. Those that lack room count as ahead of all waiting jobs.
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
                    if job.slot is not None:  # the job has started
                        for other in ahead:
                            other.passed_by += pages
                        left -= pages
                    continue
            if job.lacks_room:
                lacking += 1
                ahead.append(job)
                left = min(left, self._room - job.passed_by)


def pages_to_begin(job: Job) -> int:
    """Number of pages for a prompt and its first sample."""
    return pages_of(job, PAGE_SIZE) + pages_per_sample(job, PAGE_SIZE)


def pages_in_all(job: Job) -> int:
    """Number of pages for a prompt and all its samples."""
    return pages_of(job, PAGE_SIZE) + job.request.num_samples * pages_per_sample(job, PAGE_SIZE)
