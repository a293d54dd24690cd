"""Features that a request needs of an engine, or the reason why only the backend's sampler can draw the request.

An engine reports log-probabilities either of the unmodified model (`raw`), or after temperature and filters
(`processed`). They are never converted, so each request goes to an engine that reports the requested kind. At
temperature 1 without filters, both are equal.
"""

from skyrl.backends.operations import Sample
from skyrl.types import LoraConfig

RAW, PROCESSED = "logprobs:raw", "logprobs:processed"
RAW_MODE, PROCESSED_MODE = "raw_logprobs", "processed_logprobs"
"""Values of vLLM's --logprobs-mode that give these features. The first is vLLM's default."""
BY_PLACE = "seeds by place"
"""Feature: each token depends only on seed, position and preceding tokens, so a sample that resumes on another such
engine gets identical tokens."""
WHOLE = "whole models"
"""Feature: the engine can sample versions of fully trained models."""
BASE = "base model"
"""Feature: the engine samples the base model correctly while adapters are loaded."""
GROUPS = ("attn", "mlp", "unembed")
"""Groups of modules that an adapter may cover."""
COLDEST = 0.01
"""Lowest temperature above 0 in vLLM, which raises lower ones to this value."""


def adapter_feature(group: str) -> str:
    """Feature of engines that apply adapters to the modules of a group."""
    return f"adapter:{group}"


def way_out(lacking: frozenset[str]) -> str:
    """Advice on starting engines with the missing features, as the end of a message; empty if there is none."""
    modes = [mode for feature, mode in ((RAW, RAW_MODE), (PROCESSED, PROCESSED_MODE)) if feature in lacking]
    return f"; start them with --logprobs-mode {modes[0]}" if len(modes) == 1 else ""


def needs_of_adapter(config: LoraConfig) -> frozenset[str]:
    """Features needed for adapters of this configuration, or for versions of fully trained models (rank 0)."""
    if config.rank == 0:
        return frozenset({WHOLE})
    return frozenset(adapter_feature(group) for group in GROUPS if getattr(config, f"train_{group}"))


def needs_of(request: Sample, max_logprobs: int) -> frozenset[str] | str:
    """Features that a request needs besides those of its adapter, or the reason why engines cannot draw the request."""
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
    """Return True if an option other than the temperature changes the distribution."""
    params, options = request.params, request.options
    return params.top_k > 0 or params.top_p < 1 or options.changes_distribution


def has_scores(request: Sample) -> bool:
    """Return True if the request asks for scores of its prompt, which the backend's sampler computes."""
    return bool(
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.target_prompt_logprobs is not None
        or request.prompt_alt_tokens_k
    )
