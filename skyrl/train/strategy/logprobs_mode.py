"""Choice of vLLM's option `logprobs_mode` for servers that a trainer starts. It depends on the training samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from skyrl.backends.engines.needs import PROCESSED, PROCESSED_MODE, needs_of
from skyrl.backends.operations import Sample
from skyrl.config import SamplingParams as SamplingConfig
from skyrl.train.policies.sampling_options import options_of
from skyrl.types import SamplingParams


def with_logprobs_mode(engines: Mapping[str, Any], params: SamplingConfig) -> dict[str, Any]:
    """Return the engine options. If vLLM's default `logprobs_mode` does not suit the samples, it is set in them.

    Args:
        engines: Options of a run's engines.
        params: Sampling parameters of the run's training samples.
    """
    launch = engines.get("launch") or {}
    if not launch.get("python") or not _only_processed(params):
        return dict(engines)
    return {**engines, "launch": {**launch, "arguments": {"logprobs_mode": PROCESSED_MODE} | launch["arguments"]}}


def _only_processed(params: SamplingConfig) -> bool:
    """Return True if the samples need engines whose log-probabilities are computed after applying the temperature."""
    sampling = SamplingParams(
        max_tokens=1, seed=0, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    request = Sample(
        request_id="",
        version=None,
        prompt=np.zeros(1, np.int32),
        params=sampling,
        options=options_of(params),
        tempered_logprobs=True,
    )
    needs = needs_of(request, 0)
    return not isinstance(needs, str) and PROCESSED in needs
