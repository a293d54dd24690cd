"""Every row of config-fields.md, the public table of the configuration tree: class, field, type, default, override."""

import copy
import json
import os
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Optional, Union, get_type_hints

import pytest

import skyrl.train.config as config_package
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.machinery.fields import meanings_of
from tests.train.config.table import OWNERS, PATHS, ROWS, another

NAMES = {name: getattr(config_package, name) for name in config_package.__all__}
TYPES = {"Optional": Optional, "Union": Union, "List": list, "Dict": dict, "Any": Any, "dict": dict[str, Any]} | NAMES
WIDENED = {("TrainerConfig", "logger"): str | list[str]}
"""Fields that take what the table says and more."""
ADDED = {
    "TrainerConfig": {"jax", "one_step_off"},
    "FullyAsyncConfig": {"enabled", "staleness_policy"},
    "SkyRLGymConfig": {"others"},
    "GSM8kLLMJudgeEnvConfig": {"max_concurrency", "instructions"},
    "GeneratorConfig": {
        "trajectory_timeout_s",
        "trajectory_retries",
        "retry_with_new_seed",
        "env_error_reward",
        "max_failed_fraction",
        "max_concurrent_trajectories",
        "trajectories_per_second",
    },
}
"""Fields that the table does not have."""
ids = [f"{row.owner}.{row.field}" for row in ROWS]


def test_the_table_is_read_whole():
    assert (len(OWNERS), len(ROWS)) == (34, 254)


@pytest.mark.parametrize("owner", OWNERS)
def test_a_class_has_the_fields_of_the_table_in_its_order(owner):
    declared = [field.name for field in fields(NAMES[owner]) if field.name not in ADDED.get(owner, ())]
    assert declared == [row.field for row in ROWS if row.owner == owner]


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_a_field_has_the_type_of_the_table(row):
    expected = WIDENED.get((row.owner, row.field)) or eval(row.type, {}, TYPES)
    assert get_type_hints(NAMES[row.owner])[row.field] == expected


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_a_field_has_the_default_of_the_table(row):
    default = eval(row.default, {}, {"os": os, "copy": copy} | NAMES)
    if default in (dict, list) or (is_dataclass(default) and isinstance(default, type)):
        default = default()
    value = getattr(NAMES[row.owner](), row.field)
    assert value == default and type(value) is type(default)


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_says_what_it_means(owner):
    assert set(meanings_of(NAMES[owner])) == {field.name for field in fields(NAMES[owner])}


def test_megatron_defaults_are_those_of_the_table():
    assert config_package.DEFAULT_MEGATRON_OPTIMIZER_KWARGS == {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
    }
    assert config_package.DEFAULT_TRANSFORMER_CONFIG_KWARGS == {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def expected_tree(path: str, value: Any) -> dict[str, Any]:
    """The tree of defaults with one value in it."""
    tree = asdict(SkyRLTrainConfig())
    *sections, name = path.split(".")
    node = tree
    for section in sections:
        if node[section] is None:
            node[section] = asdict(BASES[section]())
        node = node[section]
    node[name] = {**node[name], **value} if isinstance(node[name], dict) else value
    return tree


BASES = {
    "mixed_precision": config_package.MixedPrecisionConfig,
    "eval_sampling_params": config_package.EvalSamplingParams,
}


def as_text(path: str, value: Any) -> str:
    return f"{path}={value if isinstance(value, str) else json.dumps(value)}"


def test_other_values_are_not_the_defaults():
    unchanged = [path for path, row in PATHS if expected_tree(path, another(path, row)) == asdict(SkyRLTrainConfig())]
    assert unchanged == ["trainer.sequence_parallel_backend", "generator.inference_engine.backend"]


@pytest.mark.parametrize(("path", "row"), PATHS, ids=[path for path, _ in PATHS])
def test_an_override_on_the_command_line_changes_its_field_and_no_other(path, row):
    value = another(path, row)
    assert asdict(SkyRLTrainConfig.from_cli_overrides([as_text(path, value)])) == expected_tree(path, value)


@pytest.mark.parametrize(("path", "row"), PATHS, ids=[path for path, _ in PATHS])
def test_an_override_in_a_mapping_changes_its_field_and_no_other(path, row):
    value = another(path, row)
    assert asdict(SkyRLTrainConfig.from_cli_overrides({path: value})) == expected_tree(path, value)


@pytest.mark.parametrize("owner", OWNERS)
def test_every_class_is_built_from_a_mapping(owner):
    cls = NAMES[owner]
    assert cls.from_dict_config(asdict(cls())) == cls()
