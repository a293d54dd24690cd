"""Options that nothing reads are said: each with the option that would have it read."""

import json
import re
import warnings

import pytest

from skyrl.config.algorithm import READ_WITH
from skyrl.train.config import AlgorithmConfig

OTHER = {
    "clip_ratio_c": 5.0,
    "clip_cov.clip_cov_ub": 3.0,
    "off_policy_correction.geo_mask_high": 1.5,
    "grpo_norm_by_std": False,
    "tis_imp_ratio_cap": 3.0,
    "kl_ctrl.horizon": 5,
    "dynamic_sampling.max_sample_batches": 5,
}
"""Values that are not the defaults; 0.75 elsewhere."""
OFF = {"policy_loss_type": "regular", "advantage_estimator": "rloo"}
"""Values that switch an option off; its default elsewhere."""
NEEDED = {"kl_ctrl.type": ["use_kl_in_reward=true", "use_kl_loss=false"]}


def cautions(*overrides: str) -> list[str]:
    """Messages of an algorithm, as it resolves by itself."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AlgorithmConfig.from_cli_overrides(overrides).resolve()
    return [str(warning.message) for warning in caught]


def setting(path: str) -> str:
    return f"{path}={json.dumps(OTHER.get(path, 0.75))}"


@pytest.mark.parametrize(("path", "switch", "values"), READ_WITH, ids=[path for path, _, _ in READ_WITH])
def test_an_option_that_is_not_read_is_said(path, switch, values):
    off = [f"{switch}={OFF[switch]}"] if switch in OFF else []
    (message,) = [text for text in cautions(*off, setting(path)) if " is read with " in text]
    assert re.match(rf"{re.escape(path)}=\S+ is read with {re.escape(switch)}={re.escape(str(values[0]))}", message)


@pytest.mark.parametrize(("path", "switch", "values"), READ_WITH, ids=[path for path, _, _ in READ_WITH])
def test_an_option_that_is_read_is_not_said(path, switch, values):
    for value in values:
        on = f"{switch}={json.dumps(value)}"
        assert not [text for text in cautions(on, *NEEDED.get(switch, []), setting(path)) if " is read with " in text]


def test_a_loss_of_ones_own_may_read_any_option():
    assert cautions("policy_loss_type=my_module:loss", "sapo.tau_pos=3", "clip_ratio_c=2") == []


def test_defaults_are_not_said():
    assert cautions() == []
