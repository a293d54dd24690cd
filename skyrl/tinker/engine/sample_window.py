"""Window of samples that the backend is given at a time: of each tenant so many tokens, and the rest waits here.

It bounds what a tenant's results may take in memory while they are on their way to the API process. Each tenant has a
window of its own, so nobody waits here for anybody else: who is next among those that the backend has is its own
affair, and fair.
"""

from collections import deque
from dataclasses import dataclass, field

from skyrl.backends.operations import Sample

AT_LEAST = 64
"""Samples of a tenant that fit into its window, however large they are."""


@dataclass
class _Tenant:
    used: int = 0
    """Tokens of those that the backend has."""
    waiting: dict[str, Sample] = field(default_factory=dict)


class SampleWindow:
    """Samples by tenant, first come, first served.

    Args:
        tokens: Of a tenant that the backend is given at a time: prompts, and what may be generated.
    """

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._tenants: dict[str, _Tenant] = {}
        self._able: deque[str] = deque()
        """Tenants with room and something that waits; some are not, any more."""
        self._out: dict[str, Sample] = {}

    def add(self, sample: Sample) -> None:
        """Take in a sample; one that is here already is ignored."""
        tenant = self._tenants.setdefault(sample.tenant, _Tenant())
        if sample.request_id not in self._out:
            tenant.waiting.setdefault(sample.request_id, sample)
        self._able.append(sample.tenant)

    def next(self) -> Sample | None:
        """The next that the backend is to have, until it is `done`."""
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
        """The backend has it no more, and its result is not in memory any more."""
        if self._out.pop(sample.request_id, None) is not None:
            self._tenants[sample.tenant].used -= self._share(sample)
            self._able.append(sample.tenant)
            self._forget_idle(sample.tenant)

    def remove(self, request_id: str) -> bool:
        """Drop a sample that waits here. Returns True if it did."""
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
    """Tokens of its prompt, and those that may be generated."""
    return len(sample.prompt) + (sample.params.max_tokens or 1) * sample.num_samples
