"""Routing in training beside routing in sampling, as `benchmarks/bench_routing.py` counts it."""

import pytest

from benchmarks.bench_routing import ARCHITECTURES, measure
from skyrl.tx.families.page import ROUTING_BOUNDS


@pytest.mark.full
@pytest.mark.parametrize("dtype", ROUTING_BOUNDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_token_has_the_same_experts_wherever_the_gap_of_its_scores_is_above_the_bound(arch, dtype, tmp_path):
    found = measure(arch, dtype, 2000, tmp_path)
    assert found["tokens"] >= 2000 and found["largest_gap"] <= ROUTING_BOUNDS[dtype]
