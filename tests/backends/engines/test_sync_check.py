"""Bounds of the comparison of versions on engines with ours, and what requests ask of engines."""

from typing import Any

import numpy as np
import pytest

from skyrl.backends.common.sampling.sequences import Job
from skyrl.backends.common.versions import Claim
from skyrl.backends.engines.admission import FixedPrompt
from skyrl.backends.engines.protocol import Admitted
from skyrl.backends.engines.requests import EngineRequest
from skyrl.backends.engines.sync_check import SyncCheck
from skyrl.backends.operations import Sample
from skyrl.types import BackendInfo, SamplingParams
from tests.backends.engines.marked import OPTIONS

NOTHING: Any = None


@pytest.mark.parametrize(
    ("found", "given", "bound"),
    [(1e-6, None, 1e-3), (4e-3, None, 4e-2), (0.09, None, 0.1), (4e-3, 0.5, 0.5)],
    ids=["float32", "bfloat16", "far", "given"],
)
def test_a_version_may_differ_ten_times_more_than_what_was_compared_at_admission(found, given, bound):
    options = OPTIONS.model_copy(update={"sync_logprob_bound": given})
    check = SyncCheck(options, NOTHING, NOTHING, NOTHING)
    assert check.bound(Admitted(64, frozenset(), [], "base", found)) == pytest.approx(bound)


@pytest.mark.parametrize(("longest", "tokens"), [(256, 16 + 32), (17, 8 + 8), (4, 2 + 1)])
def test_the_fixed_prompt_leaves_room_for_samples_in_a_short_context(longest, tokens):
    info = BackendInfo("base", "Qwen3ForCausalLM", 300, longest, 8, None)
    draw = FixedPrompt(info, NOTHING).draw()
    assert len(draw.prompt) + draw.max_tokens == tokens < longest


def test_requests_of_two_tenants_share_no_salt():
    salts = [request.hand_out()[0].draw.salt for request in map(requested, ("a", "b", "a"))]
    assert salts[0] == salts[2] != salts[1]


def requested(tenant: str) -> EngineRequest:
    params = SamplingParams(max_tokens=2, seed=0)
    sample = Sample(request_id="1", tenant=tenant, version=None, prompt=np.arange(3, dtype=np.int32), params=params)
    return EngineRequest(Job.of(sample, frozenset()), Claim(None, None), frozenset())
