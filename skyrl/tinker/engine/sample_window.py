"""Admission of samples to the backend: a window of tokens per tenant. Further samples wait here.

The window limits the memory for a tenant's results until they are sent to the API process. Each tenant has a separate
window, so no sample waits here for another tenant. The backend schedules the admitted samples fairly.
"""

from collections import deque
from dataclasses import dataclass, field

from skyrl.backends.operations import Sample

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
