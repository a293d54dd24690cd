"""Bounds of the comparison of versions on engines with ours."""

from typing import Any

import pytest

from skyrl.backends.engines.protocol import Admitted
from skyrl.backends.engines.sync_check import SyncCheck
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
