"""Any input of a user gives a configuration or a message, never another exception."""

import contextlib
import warnings
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.config.machinery.help import describe_fields
from skyrl.train.config import ConfigError, SkyRLTrainConfig

pytestmark = pytest.mark.full

PATHS = [field.path for field in describe_fields(SkyRLTrainConfig())]
SECTIONS = sorted({path.rpartition(".")[0] for path in PATHS} - {""})
OLD = ["generator.num_inference_engines", "generator.engine_init_kwargs", "generator.model_name", "generator.backend"]
NAMES = st.sampled_from([*PATHS, *SECTIONS, *OLD, "trainer.zzz", "trainer.epochs.zzz", "", ".", "trainer."])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["a", "1e-6"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(autouse=True)
def warnings_are_no_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_mapping_gives_a_configuration_or_a_message(overrides):
    with contextlib.suppress(ConfigError):
        SkyRLTrainConfig.from_cli_overrides(overrides).resolve()


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.builds("{}={}".format, NAMES, VALUES.map(str) | st.text(max_size=8)) | st.text(max_size=8), max_size=4)
)
def test_any_arguments_give_a_configuration_or_a_message(arguments):
    with contextlib.suppress(ConfigError):
        SkyRLTrainConfig.from_cli_overrides(arguments).resolve()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATHS), st.integers(1, 4) | st.booleans() | st.floats(0, 4))
def test_a_resolved_configuration_is_what_its_own_values_resolve_to(path, value):
    with contextlib.suppress(ConfigError):
        resolved = SkyRLTrainConfig.from_cli_overrides({path: value}).resolve()
        assert asdict(SkyRLTrainConfig.from_dict_config(asdict(resolved)).resolve()) == asdict(resolved)
