"""Needs of a request: features of an engine by name, or what no engine has, so that the backend's sampler does it.

Log-probabilities are those of the model as it is (`raw`), or at the request's temperature and after its filters
(`processed`): an engine has one of the two ways. They are never made of one another, so each request goes where what it
asks for comes out. At temperature 1 without filters both are the same.
"""

from skyrl.backends.operations import Sample
from skyrl.types import LoraConfig

RAW, PROCESSED = "logprobs:raw", "logprobs:processed"
BY_PLACE = "seeds by place"
"""A token follows from the seed, its place and what is before it: samples can be gone on with elsewhere, to the bit."""
WHOLE = "whole models"
"""Versions of models of which all weights are trained."""
BASE = "base model"
"""Samples of the base model stay its own while adapters are there."""
GROUPS = ("attn", "mlp", "unembed")
"""Groups of modules that an adapter may be on."""
COLDEST = 0.01
"""Temperatures between 0 and this are taken for this by vLLM."""


def adapter_feature(group: str) -> str:
    """Feature of engines that adapt the modules of a group."""
    return f"adapter:{group}"


def needs_of_adapter(config: LoraConfig) -> frozenset[str]:
    """Features that adapters of this kind need, or versions of whole models."""
    if config.rank == 0:
        return frozenset({WHOLE})
    return frozenset(adapter_feature(group) for group in GROUPS if getattr(config, f"train_{group}"))


def needs_of(request: Sample, max_logprobs: int) -> frozenset[str] | str:
    """Features that a request needs beside those of its adapter; or why engines cannot draw it."""
    temperature = request.params.temperature
    if request.topk_sample_logprobs > max_logprobs:
        return f"topk_sample_logprobs={request.topk_sample_logprobs} is above max_logprobs={max_logprobs}"
    if 0 < temperature < COLDEST:
        return f"temperature={temperature} is taken for {COLDEST}"
    filtered, tempered = _filters(request), temperature not in (0, 1)
    needs = {BASE} if request.version is None else set[str]()
    if request.tempered_logprobs and filtered and tempered:
        return f"temperature={temperature} with filters or penalties: log-probabilities would be those after them"
    if filtered or (tempered and not request.tempered_logprobs):
        needs.add(RAW)
    elif tempered:
        needs.add(PROCESSED)
    return frozenset(needs)


def _filters(request: Sample) -> bool:
    """Return True if anything but the temperature changes what may be drawn."""
    params, options = request.params, request.options
    return bool(params.top_k > 0 or params.top_p < 1 or options.min_p or options.min_tokens or options.penalises)


def has_scores(request: Sample) -> bool:
    """Return True if its prompt is to be scored, which the backend's sampler does."""
    return bool(
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.target_prompt_logprobs is not None
        or request.prompt_alt_tokens_k
    )
