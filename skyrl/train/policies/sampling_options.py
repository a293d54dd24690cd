"""Sampling options that are read from a configuration: penalties, filters, and `additional_kwargs`."""

from pydantic import ValidationError

from skyrl.config import SamplingParams as SamplingConfig
from skyrl.errors import ConfigError
from skyrl.types import SamplingOptions, WireModel
from skyrl.utils.expected import expected
from skyrl.utils.spelling import did_you_mean


class AdditionalOptions(WireModel):
    """Options in `additional_kwargs`, with the names of vLLM's SamplingParams.

    See `SamplingOptions` for their meaning.
    """

    min_tokens: int = SamplingOptions.min_tokens
    stop_token_ids: tuple[int, ...] = SamplingOptions.stop_token_ids
    presence_penalty: float = SamplingOptions.presence_penalty
    frequency_penalty: float = SamplingOptions.frequency_penalty


def options_of(params: SamplingConfig) -> SamplingOptions:
    """Return the options of a sample. Raises ConfigError for unknown options and values of the wrong type."""
    given = params.additional_kwargs or {}
    try:
        additional = AdditionalOptions(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        name, text = ".".join(map(str, problem["loc"])), expected([problem])
        if problem["type"] == "extra_forbidden":
            known = AdditionalOptions.model_fields
            near = did_you_mean(name, known) or "; leave it out"
            text = f"there is no such option; known: {', '.join(known)}{near}"
        raise ConfigError(f"additional_kwargs.{name}={problem['input']}: {text}") from None
    return SamplingOptions(min_p=params.min_p, repetition_penalty=params.repetition_penalty, **additional.model_dump())
