"""Sampling options that are read from a configuration: penalties, filters, and `additional_kwargs`."""

from dataclasses import fields

from pydantic import ValidationError, create_model

from skyrl.config import SamplingParams as SamplingConfig
from skyrl.errors import ConfigError
from skyrl.types import SamplingOptions, WireModel
from skyrl.utils.expected import expected
from skyrl.utils.spelling import did_you_mean

OWN = frozenset(field.name for field in fields(SamplingConfig)) & {field.name for field in fields(SamplingOptions)}
"""Options that are fields of a configuration."""
AdditionalOptions = create_model(
    "AdditionalOptions",
    __base__=WireModel,
    **{one.name: (one.type, one.default) for one in fields(SamplingOptions) if one.name not in OWN},  # pyright: ignore
)
"""Options in `additional_kwargs`: the others."""


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
    return SamplingOptions(**{name: getattr(params, name) for name in OWN}, **additional.model_dump())
