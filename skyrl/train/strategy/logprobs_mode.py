"""Log-probability mode of vLLM servers that a trainer starts: the one that serves its training samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from skyrl.backends.engines.needs import PROCESSED, PROCESSED_MODE, needs_of
from skyrl.backends.operations import Sample
from skyrl.train.config import SamplingParams as SamplingConfig
from skyrl.train.policies.sampling_options import options_of
from skyrl.types import SamplingParams


def with_logprobs_mode(engines: Mapping[str, Any], params: SamplingConfig) -> dict[str, Any]:
    """Return options of engines with vLLM's `logprobs_mode` set, if vLLM's default does not serve the samples.

    Args:
        engines: Options of the engines of a run.
        params: Options of its training samples.
    """
    launch = engines.get("launch") or {}
    if not launch.get("python") or not _only_processed(params):
        return dict(engines)
    return {**engines, "launch": {**launch, "arguments": {"logprobs_mode": PROCESSED_MODE} | launch["arguments"]}}


def _only_processed(params: SamplingConfig) -> bool:
    """Return True if only engines that report log-probabilities after the temperature can draw the samples."""
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
