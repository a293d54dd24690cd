"""The sampler of a backend whose base model can be trained but not sampled: it rejects every request."""

from collections.abc import Callable, Mapping

from skyrl.backends.operations import Completion, Sample
from skyrl.backends.statistics import Statistics
from skyrl.types import BackendInfo


class NoSampler:
    """`SamplerLoop` that never has anything to do.

    Args:
        info: Facts about the backend.
    """

    busy = False
    running: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    def __init__(self, info: Callable[[], BackendInfo]):
        self._info = info

    @property
    def statistics(self) -> Statistics:
        """No statistics."""
        return {}

    def weigh(self, weights: Mapping[str, float]) -> None:
        pass

    def add(self, request: Sample) -> None:
        """Raise `RequestError`."""
        self._info().check_samples()

    def burst(self) -> list[Completion]:
        return []

    def cancel(self, request_id: str) -> None:
        pass
