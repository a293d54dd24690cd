"""Old names of fields: a rewrite of the keys that a user gave, with one warning; conflicts are refused."""

import warnings
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from skyrl.train.config import ConfigError, GeneratorConfig, SkyRLTrainConfig

MOVES = [
    ("model_dtype", "model_dtype", "float16"),
    ("run_engines_locally", "run_engines_locally", False),
    ("num_inference_engines", "num_engines", 4),
    ("backend", "backend", "vllm"),
    ("weight_sync_backend", "weight_sync_backend", "gloo"),
    ("weight_transfer_threshold_cuda_ipc_GB", "weight_transfer_threshold_cuda_ipc_GB", 2.0),
    ("inference_engine_tensor_parallel_size", "tensor_parallel_size", 2),
    ("inference_engine_pipeline_parallel_size", "pipeline_parallel_size", 2),
    ("inference_engine_expert_parallel_size", "expert_parallel_size", 2),
    ("inference_engine_data_parallel_size", "data_parallel_size", 2),
    ("async_engine", "async_engine", False),
    ("vllm_v1_disable_multiproc", "vllm_v1_disable_multiproc", False),
    ("enable_prefix_caching", "enable_prefix_caching", False),
    ("enable_chunked_prefill", "enable_chunked_prefill", False),
    ("max_num_batched_tokens", "max_num_batched_tokens", 10),
    ("enforce_eager", "enforce_eager", False),
    ("fully_sharded_loras", "fully_sharded_loras", True),
    ("enable_ray_prometheus_stats", "enable_ray_prometheus_stats", True),
    ("gpu_memory_utilization", "gpu_memory_utilization", 0.5),
    ("max_num_seqs", "max_num_seqs", 10),
    ("remote_inference_engine_urls", "remote_urls", ["127.0.0.1:8001"]),
    ("enable_http_endpoint", "enable_http_endpoint", True),
    ("http_endpoint_host", "http_endpoint_host", "0.0.0.0"),
    ("http_endpoint_port", "http_endpoint_port", 9000),
    ("served_model_name", "served_model_name", "m"),
    ("engine_init_kwargs", "engine_init_kwargs", {"a": 1}),
    ("override_existing_update_group", "override_existing_update_group", "enable"),
    ("external_proxy_url", "external_proxy_url", "http://p"),
    ("external_server_urls", "external_server_urls", ["http://s"]),
]


@pytest.mark.parametrize(("old", "new", "value"), MOVES, ids=[old for old, _, _ in MOVES])
def test_an_old_key_means_the_new_one(old, new, value):
    with pytest.warns(DeprecationWarning, match=f"generator.{old} is generator.inference_engine.{new}"):
        config = SkyRLTrainConfig.from_cli_overrides({f"generator.{old}": value})
    assert config == SkyRLTrainConfig.from_cli_overrides({f"generator.inference_engine.{new}": value})


def test_many_old_keys_warn_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SkyRLTrainConfig.from_cli_overrides({f"generator.{old}": value for old, _, value in MOVES})
    assert [warning.category for warning in caught] == [DeprecationWarning]


def test_todays_keys_do_not_warn():
    SkyRLTrainConfig.from_cli_overrides({f"generator.inference_engine.{new}": value for _, new, value in MOVES})


def test_old_keys_go_beside_new_ones_for_other_fields():
    with pytest.warns(DeprecationWarning):
        config = SkyRLTrainConfig.from_cli_overrides(
            ["generator.num_inference_engines=2", "generator.inference_engine.max_num_seqs=8", "trainer.epochs=2"]
        )
    engine = config.generator.inference_engine
    assert (engine.num_engines, engine.max_num_seqs, config.trainer.epochs) == (2, 8, 2)


def test_a_part_of_an_old_key_can_be_set():
    with pytest.warns(DeprecationWarning):
        config = SkyRLTrainConfig.from_cli_overrides(["generator.engine_init_kwargs.seed=1"])
    assert config.generator.inference_engine.engine_init_kwargs == {"seed": 1}


@pytest.mark.parametrize("given", [{"num_inference_engines": 2}, OmegaConf.create({"num_inference_engines": 2})])
def test_old_keys_are_read_from_a_section_alone_and_from_omegaconf(given):
    with pytest.warns(DeprecationWarning):
        assert GeneratorConfig.from_dict_config(given).inference_engine.num_engines == 2


def test_an_old_file_is_read(tmp_path):
    (tmp_path / "old.yaml").write_text("generator: {num_inference_engines: 2, sampling_params: {top_p: 0.5}}\n")
    with pytest.warns(DeprecationWarning):
        config = SkyRLTrainConfig.from_file(tmp_path / "old.yaml", ["generator.inference_engine.max_num_seqs=4"])
    engine = config.generator.inference_engine
    assert (engine.num_engines, engine.max_num_seqs, config.generator.sampling_params.top_p) == (2, 4, 0.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["generator.num_inference_engines=2", "generator.inference_engine.num_engines=2"],
            "generator: num_inference_engines and inference_engine.num_engines are both set; leave out the old one",
        ),
        (
            ["generator.backend=vllm", "generator.inference_engine={backend: vllm}"],
            "backend and inference_engine.backend are both set",
        ),
        (
            ["trainer.remove_microbatch_padding=true", "trainer.use_sample_packing=true"],
            "trainer: remove_microbatch_padding and use_sample_packing are the same and both set",
        ),
        (
            ["generator.model_name=a", "trainer.policy.model.path=b"],
            "model_name=a is not trainer.policy.model.path=b",
        ),
        (["generator.model_name=a"], "is not trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct"),
    ],
)
def test_an_old_key_that_says_something_else_than_the_new_one_is_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        SkyRLTrainConfig.from_cli_overrides(overrides)
    assert message in str(error.value)


def test_the_old_name_of_the_model_is_dropped_where_it_is_the_policy():
    with pytest.warns(DeprecationWarning, match=r"generator\.model_name is trainer\.policy\.model\.path"):
        config = SkyRLTrainConfig.from_cli_overrides(["generator.model_name=a", "trainer.policy.model.path=a"])
    assert asdict(config) == asdict(SkyRLTrainConfig.from_cli_overrides(["trainer.policy.model.path=a"]))


def test_a_bad_value_of_an_old_key_is_named_by_its_new_one():
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ConfigError, match=r"generator\.inference_engine\.num_engines=x: give a whole number"),
    ):
        SkyRLTrainConfig.from_cli_overrides(["generator.num_inference_engines=x"])


def test_the_newer_name_of_sample_packing_is_read():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.remove_microbatch_padding=false"])
    assert config.trainer.use_sample_packing is False
