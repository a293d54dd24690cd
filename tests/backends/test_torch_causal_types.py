"""Every causal architecture of transformers is computed as transformers does, or refused in a line."""

import pytest
from causal_types import FAILED, WRONG, outcome, shown, types

pytestmark = [pytest.mark.filterwarnings("ignore")]


def test_no_type_of_the_page_is_wrong_or_ends_in_a_traceback():
    assert not [kind for kind, result in shown().items() if result in (WRONG, FAILED)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", types())
def test_each_type_has_the_result_of_the_page(kind):
    result, reason = outcome(kind)
    assert result not in (WRONG, FAILED), reason
    assert result == shown().get(kind, result), reason
