"""Overrides: from the command line, mappings, OmegaConf containers and files; what they keep, and what is refused."""

from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from skyrl.train.config import ConfigError, GeneratorConfig, SFTConfig, SkyRLTrainConfig, TrainerConfig


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        SkyRLTrainConfig.from_cli_overrides(overrides)
    return str(error.value)


def test_a_lora_rank_alone_keeps_the_path_of_the_policy():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.model.lora.rank=32"])
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"


def test_a_weight_decay_alone_keeps_the_learning_rate_of_the_critic():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.critic.optimizer_config.weight_decay=0.1"])
    assert config.trainer.critic.optimizer_config.lr == 5e-6


def test_a_megatron_argument_alone_keeps_the_other_default_arguments():
    config = SkyRLTrainConfig.from_cli_overrides(
        ["trainer.policy.megatron_config.transformer_config_kwargs.recompute_num_layers=4"]
    )
    assert config.trainer.policy.megatron_config.transformer_config_kwargs == {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 4,
    }


def test_an_evaluation_temperature_alone_keeps_the_length_of_training():
    config = SkyRLTrainConfig.from_cli_overrides(
        ["generator.eval_sampling_params.temperature=0.7", "generator.sampling_params.max_generate_length=2048"]
    ).resolve()
    assert config.generator.eval_sampling_params is not None
    assert config.generator.eval_sampling_params.max_generate_length == 2048
    assert config.generator.eval_sampling_params.temperature == 0.7


def test_an_evaluation_top_p_alone_keeps_evaluation_greedy():
    config = SkyRLTrainConfig.from_cli_overrides(["generator.eval_sampling_params.top_p=0.9"])
    assert config.generator.eval_sampling_params is not None
    assert config.generator.eval_sampling_params.temperature == 0


@pytest.mark.parametrize("value", [None, "None", "null", "1e5", "[a]", "{a: b}", "true", "007", "é", " padded ", "a=b"])
def test_values_of_a_mapping_never_become_text(value):
    config = SkyRLTrainConfig.from_cli_overrides({"generator.inference_engine.served_model_name": value})
    assert config.generator.inference_engine.served_model_name == value


def test_a_mapping_may_be_nested():
    config = SkyRLTrainConfig.from_cli_overrides({"trainer": {"epochs": 2, "policy": {"model": {"path": "m"}}}})
    assert (config.trainer.epochs, config.trainer.policy.model.path) == (2, "m")


def test_a_name_with_a_dot_inside_a_value_is_one_name():
    config = SkyRLTrainConfig.from_cli_overrides({"generator.chat_template_kwargs": {"a.b": 1}})
    assert config.generator.chat_template_kwargs == {"a.b": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("2", 2.0), ("3E-4", 3e-4), (".5", 0.5)],
)
def test_numbers_are_written_as_people_write_them(text, value):
    config = SkyRLTrainConfig.from_cli_overrides([f"trainer.policy.optimizer_config.lr={text}"])
    assert config.trainer.policy.optimizer_config.lr == value


@pytest.mark.parametrize("text", ["123", "007", "1e5", "true", "on", "2024-01-01", "12:30", "@x", "", "%s"])
def test_a_string_field_gets_the_text_as_it_is(text):
    assert SkyRLTrainConfig.from_cli_overrides([f"trainer.run_name={text}"]).trainer.run_name == text


@pytest.mark.parametrize("text", ["null", "~"])
def test_null_is_none_and_not_a_name(text):
    assert SkyRLTrainConfig.from_cli_overrides([f"trainer.resume_mode={text}"]).trainer.resume_mode is None
    assert f"trainer.run_name={text}: give text" in refusal(f"trainer.run_name={text}")


def test_lists_and_mappings_are_written_as_yaml():
    config = SkyRLTrainConfig.from_cli_overrides(
        ["data.train_data=[a.parquet, b.jsonl]", "trainer.placement={policy_num_nodes: 2, colocate_all: false}"]
    )
    assert config.data.train_data == ["a.parquet", "b.jsonl"]
    assert (config.trainer.placement.policy_num_nodes, config.trainer.placement.colocate_all) == (2, False)


def test_values_of_open_mappings_are_read_as_yaml():
    config = SkyRLTrainConfig.from_cli_overrides(
        [
            "generator.inference_engine.engine_init_kwargs.rate=1e-6",
            "generator.inference_engine.engine_init_kwargs.b=[1]",
        ]
    )
    assert config.generator.inference_engine.engine_init_kwargs == {"rate": 1e-6, "b": [1]}


def test_the_later_of_two_overrides_counts():
    assert SkyRLTrainConfig.from_cli_overrides(["trainer.epochs=2", "trainer.epochs=3"]).trainer.epochs == 3


def test_null_removes_an_optional_section():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.fsdp_config.mixed_precision.param_dtype=fp32"])
    again = config.with_overrides({"trainer": {"policy": {"fsdp_config": {"mixed_precision": None}}}})
    assert config.trainer.policy.fsdp_config.mixed_precision is not None
    assert again.trainer.policy.fsdp_config.mixed_precision is None


def test_overrides_leave_the_original_as_it_was():
    config = SkyRLTrainConfig()
    config.with_overrides({"trainer": {"policy": {"megatron_config": {"optimizer_config_kwargs": {"a": 1}}}}})
    assert config == SkyRLTrainConfig()


def test_a_configuration_shares_nothing_with_the_mapping_it_came_from():
    given = {"data": {"train_data": ["a"]}, "generator": {"chat_template_kwargs": {"tools": ["b"]}}}
    config = SkyRLTrainConfig.from_dict_config(given)
    given["data"]["train_data"].append("c")
    given["generator"]["chat_template_kwargs"]["tools"].append("c")
    assert (config.data.train_data, config.generator.chat_template_kwargs) == (["a"], {"tools": ["b"]})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.epoch=2", "trainer.epoch: TrainerConfig has no field 'epoch'; did you mean trainer.epochs?"),
        ("trainer.policy.model.lora.rnk=2", "did you mean trainer.policy.model.lora.rank?"),
        (
            "trainer.lr=1",
            "did you mean trainer.policy.optimizer_config.lr or trainer.critic.optimizer_config.lr?",
        ),
        ("zzz=2", "zzz: SkyRLTrainConfig has no field 'zzz'; it has data, trainer, generator, environment"),
        ("trainer.epochs=1.5", "trainer.epochs=1.5: give a whole number"),
        ("trainer.epochs=true", "trainer.epochs=true: give a whole number"),
        ("trainer.epochs=0", "trainer.epochs=0: give a number above 0"),
        ("trainer.seed=abc", "trainer.seed=abc: give a whole number"),
        ("trainer.seed=-1", "trainer.seed=-1: give 0 or more"),
        ("trainer.bf16=yes", "trainer.bf16=yes: give true or false"),
        ("trainer.policy.optimizer_config.lr=fast", "optimizer_config.lr=fast: give a number, such as 0.1"),
        ("trainer.policy.optimizer_config.lr=.nan", "optimizer_config.lr=.nan: give a finite number"),
        ("trainer.max_ckpts_to_keep=0", "trainer.max_ckpts_to_keep=0: give a number from 1, or -1 to keep all"),
        (
            "trainer.strategy=fdsp2",
            "trainer.strategy=fdsp2: known: torch, fsdp2, fsdp, megatron, jax; did you mean fsdp2?",
        ),
        ("trainer.logger=[console, wandbb]", "did you mean wandb?"),
        ("data.train_data=[a, 3]", "data.train_data=[a, 3]: [1] give text"),
        (
            "trainer.policy=3",
            "trainer.policy=3: holds fields of PolicyConfig; set those, such as trainer.policy.model=...",
        ),
        ("trainer.policy=null", "trainer.policy=null: holds fields of PolicyConfig"),
        ("generator.sampling_params.logprobs=2", "logprobs=2: give 1 or less"),
        ("generator.sampling_params.top_k=0", "top_k=0: give a number of tokens from 1, or -1 for all"),
        ("trainer.policy.fsdp_config.fsdp_size=-2", "fsdp_size=-2: give a number of ranks from 1, -1 for all of them"),
        ("+trainer.extra=1", "subclass its config class"),
        ("++trainer.epochs=1", "write trainer.epochs=value for a field that exists"),
        ("~trainer.epochs", "fields are not added or removed with + or ~"),
        ("--trainer.epochs=1", "write trainer.epochs=value, without dashes"),
        ("trainer.epochs", "'trainer.epochs' has no value; write key.path=value"),
        ("trainer.placement={a: 1, a: 2}", "duplicate key 'a'"),
        ("trainer.rope_scaling=&a {b: *a}", "trainer.rope_scaling=&a {b: *a}: a value contains itself; write it out"),
    ],
)
def test_a_bad_override_is_refused_with_a_way_out(override, message):
    assert message in refusal(override)


def test_all_bad_overrides_are_named_at_once():
    message = refusal("trainer.epoch=2", "trainer.seed=abc", "data.val_data=3")
    assert all(name in message for name in ("trainer.epoch:", "trainer.seed=abc", "data.val_data=3"))


def test_a_plus_in_a_mapping_is_refused():
    with pytest.raises(ConfigError, match="subclass its config class"):
        SkyRLTrainConfig.from_cli_overrides({"+trainer.extra": 1})


@pytest.mark.parametrize("value", ["3", 3.0, True, None])
def test_a_value_of_another_type_in_a_mapping_is_refused(value):
    with pytest.raises(ConfigError, match=r"trainer\.epochs=.*: give a whole number"):
        SkyRLTrainConfig.from_dict_config({"trainer": {"epochs": value}})


def test_one_string_is_no_list_of_overrides():
    with pytest.raises(ConfigError, match=r"give a list of 'key\.path=value'"):
        SkyRLTrainConfig.from_cli_overrides("trainer.epochs=2")


def test_an_omegaconf_container_is_a_mapping_with_its_interpolations_resolved():
    container = OmegaConf.create({"epochs": 3, "run_name": "run-${epochs}", "policy": {"model": {"lora": {"rank": 8}}}})
    trainer = TrainerConfig.from_dict_config(container)
    assert (trainer.epochs, trainer.run_name, trainer.policy.model.lora.rank) == (3, "run-3", 8)
    assert trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"


def test_omegaconf_lists_inside_a_mapping_become_lists():
    stop = OmegaConf.create(["</answer>"])
    generator = GeneratorConfig.from_dict_config({"sampling_params": {"stop": stop}})
    assert type(generator.sampling_params.stop) is list and generator.sampling_params.stop == ["</answer>"]


YAML = "trainer:\n  epochs: 2\n  policy:\n    optimizer_config: {lr: 1e-5}\n"
TOML = "[trainer]\nepochs = 2\npolicy.optimizer_config.lr = 1e-5\n"
JSON = '{"trainer": {"epochs": 2, "policy": {"optimizer_config": {"lr": 1e-5}}}}'


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML), ("a.json", JSON)])
def test_a_file_is_laid_over_the_defaults_and_overrides_over_it(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = SkyRLTrainConfig.from_file(tmp_path / name, ["trainer.epochs=5"])
    expected = SkyRLTrainConfig()
    expected.trainer.epochs = 5
    expected.trainer.policy.optimizer_config.lr = 1e-5
    assert config == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "", "unknown kind of file; write .yaml, .yml, .json or .toml"),
        ("a.yaml", "[1]", "holds a list; write a mapping"),
        ("a.yaml", "a: [", "expected the node content"),
        ("a.toml", "a", "Expected '='"),
        ("a.yaml", "trainer: {epochs: 1, epochs: 2}", "duplicate key 'epochs'"),
    ],
)
def test_a_file_that_holds_no_configuration_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        SkyRLTrainConfig.from_file(tmp_path / name)
    assert message in str(error.value) and name in str(error.value)


def test_an_empty_file_is_the_defaults(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert asdict(SkyRLTrainConfig.from_file(tmp_path / "a.yaml")) == asdict(SkyRLTrainConfig())


@pytest.mark.parametrize(
    "field", ["data.train_data", "data.val_data", "trainer.callbacks", "sft train_datasets", "sft eval_datasets"]
)
def test_a_single_name_stands_for_a_list_of_it(field):
    kind, _, path = field.rpartition(" ")
    cls = SFTConfig if kind else SkyRLTrainConfig
    one, several = (cls.from_cli_overrides([f"{path}={value}"]) for value in ("rows.jsonl", "[rows.jsonl]"))
    assert one == several
    assert asdict(one) == asdict(cls.from_dict_config(_nested(path, "rows.jsonl")))


def _nested(path: str, value: object) -> dict:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("value", ["3", "true", "", "null", "[rows.jsonl", "{rows: 1}", "1.5"])
def test_what_is_no_name_is_no_list_of_one(value):
    assert "data.train_data=" in refusal(f"data.train_data={value}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_data=3", "data.train_data=3: give a list, such as [a, b]"),
        ("generator.sampling_params.stop=a", "stop=a: give a list, such as [a, b]"),
        ("trainer.jax=3", "trainer.jax=3: give a mapping, such as {name: value}"),
        ("trainer.policy.fsdp_config.reshard_after_forward=x", "=x: give true or false or a whole number"),
        ("trainer.algorithm.gamma=2", "gamma=2: give 1 or less"),
        ("trainer.run_name=[a]", "trainer.run_name=[a]: give text"),
    ],
)
def test_types_are_told_in_the_words_of_the_command_line(override, message):
    assert message in refusal(override)
