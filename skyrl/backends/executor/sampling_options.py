"""Check of the sampling options of a request against the options that a backend supports. Used by all backends."""

from collections.abc import Callable
from dataclasses import fields

from skyrl.backends.operations import Sample
from skyrl.errors import RequestError
from skyrl.types import BackendInfo, SamplingOptions


def check_values(options: SamplingOptions, max_tokens: int) -> None:
    """Raise `RequestError` for the first invalid value. The sample generates at most `max_tokens` tokens."""
    for option in fields(options):
        value = getattr(options, option.name)
        if option.metadata and not option.metadata["is_valid"](value):
            raise RequestError(f"{option.name}={value}: must be {option.metadata['rule']}")
    if not 0 <= options.min_tokens <= max_tokens:
        raise RequestError(f"min_tokens={options.min_tokens}: must be between 0 (off) and max_tokens={max_tokens}")


def check_options(request: Sample, info: Callable[[], BackendInfo]) -> None:
    """Raise `RequestError` for the first option that is unsupported or has an invalid value.

    Args:
        request: A request that passed `check_sample`.
        info: Returns facts about the backend; called only if the request has options.
    """
    if not (given := request.options.given):
        return
    facts, most = info(), request.params.max_tokens
    assert most is not None, request
    for name, value in given.items():
        if name not in facts.sampling_options:
            served = ", ".join(sorted(facts.sampling_options)) or "none"
            raise RequestError(
                f"{name}={value} is not served by this backend (options it serves: {served}); leave it out"
            )
    check_values(request.options, most)
    for token in request.options.stop_token_ids:
        if not 0 <= token < facts.vocab_size:
            raise RequestError(
                f"stop_token_ids has {token}, which is no token: they go from 0 to {facts.vocab_size - 1}; leave it out"
            )
