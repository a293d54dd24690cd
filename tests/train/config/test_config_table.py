"""Every row of config-fields.md, the public table of the configuration tree: class, field, type, default, override."""

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, Optional, Union, get_type_hints

import pytest

import skyrl.train.config as config_package
from skyrl.config.machinery.fields import meanings_of
from skyrl.train.config import SkyRLTrainConfig
from tests.train.config.table import OWNERS, PATHS, ROWS, Row, another

NAMES = {name: getattr(config_package, name) for name in config_package.__all__}
TYPES = {"Optional": Optional, "Union": Union, "List": list, "Dict": dict, "Any": Any, "dict": dict[str, Any]} | NAMES
WIDENED = {
    ("TrainerConfig", "logger"): str | list[str],
    ("SkyRLLoraConfig", "target_modules"): str | list[str],
    ("SkyRLLoraConfig", "exclude_modules"): str | list[str] | None,
}
"""Fields that take what the table says and more."""
ADDED = {
    "TrainerConfig": {
        *("jax", "torch", "one_step_off", "max_steps", "eval_only", "init_from", "callbacks"),
        *("best_metric", "best_mode", "async_checkpoints", "max_dumps_to_keep", "save_model", "save_merged"),
        *("max_restarts", "log_interval"),
    },
    "FullyAsyncConfig": {"enabled", "staleness_policy"},
    "SkyRLGymConfig": {"others"},
    "EnvironmentConfig": {"reward"},
    "GSM8kLLMJudgeEnvConfig": {"max_concurrency", "instructions"},
    "GeneratorConfig": {
        "trajectory_timeout_s",
        "trajectory_retries",
        "retry_with_new_seed",
        "env_error_reward",
        "max_failed_fraction",
        "max_concurrent_trajectories",
        "trajectories_per_second",
        "generator_class",
    },
}
"""Fields that the table does not have."""


OTHER_DEFAULTS = {"SkyRLLoraConfig.lora_sync_path"}
"""Fields with a default of our own: other users may write to /tmp."""


def test_the_table_is_read_whole():
    assert (len(OWNERS), len(ROWS)) == (34, 254)


def of_table(read: Callable[[Row], object]) -> dict[str, object]:
    """Return the result of `read` for each row of the table, by its class and field."""
    return {f"{row.owner}.{row.field}": read(row) for row in ROWS}


def test_classes_have_the_fields_of_the_table_in_its_order():
    names = {owner: [field.name for field in fields(NAMES[owner])] for owner in OWNERS}
    declared = {owner: [name for name in names[owner] if name not in ADDED.get(owner, ())] for owner in OWNERS}
    assert declared == {owner: [row.field for row in ROWS if row.owner == owner] for owner in OWNERS}


def test_fields_have_the_types_of_the_table():
    hints = {owner: get_type_hints(NAMES[owner]) for owner in OWNERS}
    expected = of_table(lambda row: WIDENED.get((row.owner, row.field)) or eval(row.type, {}, TYPES))
    assert of_table(lambda row: hints[row.owner][row.field]) == expected


def default_of(row: Row) -> object:
    default = eval(row.default, {}, {"os": os, "copy": copy} | NAMES)
    return default() if default in (dict, list) or (is_dataclass(default) and isinstance(default, type)) else default


def with_type(value: object) -> tuple[type, object]:
    return type(value), value  # 0, 0.0 and False are equal


def test_fields_have_the_defaults_of_the_table():
    made = of_table(lambda row: with_type(getattr(NAMES[row.owner](), row.field)))
    expected = of_table(lambda row: with_type(default_of(row)))
    assert {name for name in made if made[name] != expected[name]} == OTHER_DEFAULTS


def test_every_field_says_what_it_means():
    said = {owner: set(meanings_of(NAMES[owner])) for owner in OWNERS}
    assert said == {owner: {field.name for field in fields(NAMES[owner])} for owner in OWNERS}


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


@cache
def expected() -> dict[str, dict[str, Any]]:
    """The whole tree, for each field that gets another value than its default."""
    return {path: expected_tree(path, another(path, row)) for path, row in PATHS}


@pytest.mark.full
def test_an_override_on_the_command_line_changes_its_field_and_no_other():
    values = {path: as_text(path, another(path, row)) for path, row in PATHS}
    assert {path: asdict(SkyRLTrainConfig.from_cli_overrides([text])) for path, text in values.items()} == expected()


def test_an_override_in_a_mapping_changes_its_field_and_no_other():
    values = {path: {path: another(path, row)} for path, row in PATHS}
    assert {path: asdict(SkyRLTrainConfig.from_cli_overrides(value)) for path, value in values.items()} == expected()


def test_every_class_is_built_from_a_mapping():
    built = {owner: NAMES[owner].from_dict_config(asdict(NAMES[owner]())) for owner in OWNERS}
    assert built == {owner: NAMES[owner]() for owner in OWNERS}
