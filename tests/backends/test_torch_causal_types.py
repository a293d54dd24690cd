"""Every causal architecture of transformers is computed as transformers does, or refused in a line."""

import pytest
import transformers

from tests.backends.causal_types import FAILED, PAGE, WRONG, outcome, shown, types

pytestmark = [pytest.mark.filterwarnings("ignore")]


def test_no_type_of_the_page_is_wrong_or_ends_in_a_traceback():
    assert not [kind for kind, result in shown().items() if result in (WRONG, FAILED)]


def test_the_page_has_all_types_of_the_installed_transformers():
    assert sorted(shown()) == types()
    assert f"causal model types of transformers {transformers.__version__}:" in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", types())
def test_each_type_has_the_result_of_the_page(kind):
    result, reason = outcome(kind)
    assert result not in (WRONG, FAILED), reason
    assert result == shown()[kind], reason
