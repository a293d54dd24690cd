"""Fields of a training configuration as options of the torch backend, for trainers and for servers."""

import json
import re

import peft
import pytest
import torch
import transformers

from skyrl.backends.skyrl_train_backend import SkyRLTrainBackendOverrides
from skyrl.backends.torch import TorchBackendConfig
from skyrl.config.machinery.help import describe_fields
from skyrl.config.machinery.uses import TORCH, Status, options_set, use_of
from skyrl.config.torch_options import STARTED_HERE, server_options
from skyrl.train.config import ConfigError, InferenceEngineConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.strategy.strategy import critic_adapter, policy_adapter
from skyrl.train.strategy.torch_backend import TorchStrategy
from skyrl.types import AdapterConfig, LoraConfig


def accepted_by_servers(path: str) -> bool:
    """Return True if options of a server follow from the field."""
    is_refused = use_of(SkyRLTrainConfig, path, TORCH).status is Status.REFUSED
    return not is_refused and bool(options_set(SkyRLTrainConfig, path))


pytestmark = pytest.mark.usefixtures("no_cluster")

LORA = "trainer.policy.model.lora."
FSDP = "trainer.policy.fsdp_config."
GPUS = "trainer.placement.policy_num_gpus_per_node"


@pytest.fixture
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def resolved(*given: str, gpus: int = 4) -> SkyRLTrainConfig:
    engines = f"generator.inference_engine.num_engines={gpus or 1}"
    return SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=torch", f"{GPUS}={gpus}", *given, engines]).resolve()


def options(*given: str, gpus: int = 4) -> TorchBackendConfig:
    return TorchBackendConfig(**TorchStrategy().rl_options(resolved(*given, gpus=gpus)))


def problems(*given: str) -> list[str]:
    """Return the settings that a configuration asks for in vain."""
    config = resolved(*given)
    return [*TorchStrategy().unsupported(config), *TorchStrategy().problems(config)]


def test_workers_are_as_many_as_gpus_and_0_is_the_cpu():
    assert (options(gpus=1).workers, options(gpus=1).num_workers) == ("in_process", 1)
    assert (options(gpus=2).workers, options(gpus=2).num_workers) == ("processes", 2)
    assert (options(gpus=0).device, options(gpus=0).num_workers) == ("cpu", 1)


NODES = "trainer.placement.policy_num_nodes"


def test_several_nodes_are_those_of_ray_with_as_many_workers_each_as_gpus():
    engines = "generator.inference_engine.num_engines=8"
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=torch", f"{NODES}=2", f"{GPUS}=4", engines])
    on_ray = TorchBackendConfig(**TorchStrategy().rl_options(config.resolve()))
    assert (on_ray.workers, on_ray.num_workers, on_ray.ray_workers_per_node) == ("ray", 8, 4)


def test_a_cluster_that_the_environment_names_is_used_for_gpus_and_not_for_the_cpu(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert (options(gpus=1).workers, options(gpus=1).num_workers) == ("ray", 1)
    assert (options(gpus=2).workers, options(gpus=2).num_workers) == ("ray", 2)
    assert options(gpus=2).ray_workers_per_node == 2
    assert options("trainer.torch={ray_strategy: SPREAD}", gpus=2).ray_workers_per_node == 0
    assert options(gpus=0).workers == "in_process"


@pytest.mark.parametrize("names", [[NODES, GPUS], [GPUS, NODES]])
def test_a_server_takes_nodes_and_gpus_in_any_order(names):
    given = {NODES: 2, GPUS: 0}
    config = SkyRLTrainBackendOverrides.model_validate({name: given[name] for name in names})
    assert (config.workers, config.num_workers, config.ray_workers_per_node, config.device) == ("ray", 2, 1, "cpu")


def test_models_trained_as_a_whole_are_sharded_and_adapters_have_the_base_model_on_each_worker():
    assert options().fsdp_size == -1
    assert options("trainer.policy.model.lora.rank=8").fsdp_size == 0


def test_a_size_that_is_given_is_kept_though_it_is_the_default():
    adapter = "trainer.policy.model.lora.rank=8"
    assert options(adapter, f"{FSDP}fsdp_size=-1").fsdp_size == -1
    assert options(adapter, f"{FSDP}fsdp_size=2").fsdp_size == 2


def test_resharding_is_the_configurations():
    assert options().reshard_after_forward
    assert not options(f"{FSDP}reshard_after_forward=false").reshard_after_forward


def test_a_number_of_ranks_to_reshard_over_divides_those_that_share():
    assert options(f"{FSDP}reshard_after_forward=2", f"{FSDP}fsdp_size=4").reshard_after_forward == 2
    for number in (3, 4):
        given = f"{FSDP}reshard_after_forward={number}", f"{FSDP}fsdp_size=4"
        with pytest.raises(ValueError, match=rf"reshard_after_forward={number} is no divisor .* the 4 ranks"):
            options(*given)
        (problem,) = problems(*given)
        assert problem.startswith(f"{FSDP}reshard_after_forward={number} is no divisor between 1 and the 4 rank(s)")


def test_weights_that_are_shared_may_be_in_the_hosts_memory():
    assert options(f"{FSDP}cpu_offload=true", f"{FSDP}fsdp_size=4").cpu_offload
    assert problems(f"{FSDP}cpu_offload=true", f"{FSDP}fsdp_size=4") == []
    with pytest.raises(ValueError, match=r"cpu_offload=True with fsdp_size=1: no weights are shared"):
        options(f"{FSDP}cpu_offload=true", f"{FSDP}fsdp_size=1")
    (problem,) = problems(f"{FSDP}cpu_offload=true", f"{FSDP}fsdp_size=1")
    assert problem.startswith(f"{FSDP}cpu_offload=True, and no ranks share weights")


def test_ranks_that_share_sequences_are_the_policys():
    assert options().sequence_parallel_size == 1
    assert options("trainer.policy.sequence_parallel_size=2").sequence_parallel_size == 2


def beside_the_policy(*given: str) -> list[str]:
    """Return the settings that a configuration, as it is given, asks for in vain."""
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=torch", f"{GPUS}=4", *given])
    return list(TorchStrategy().problems(config))


@pytest.mark.parametrize("model", ["critic", "ref"])
def test_critic_and_reference_may_say_what_the_policy_says_and_nothing_else(model):
    size, gpus = f"trainer.{model}.sequence_parallel_size", f"trainer.placement.{model}_num_gpus_per_node"
    assert not beside_the_policy("trainer.policy.sequence_parallel_size=2", f"{size}=2", f"{gpus}=4")
    (problem,) = beside_the_policy(f"{size}=2")
    assert (
        problem.startswith(f"{size}=2 is not trainer.policy.sequence_parallel_size=1: ") and "leave it out" in problem
    )
    (problem,) = beside_the_policy(f"{gpus}=2")
    assert problem.startswith(f"{gpus}=2 is not policy_num_gpus_per_node=4: ") and "leave it out" in problem


@pytest.mark.parametrize("model", ["critic", "ref"])
@pytest.mark.parametrize(("count", "policy"), [("num_gpus_per_node", 4), ("num_nodes", 2)])
def test_critic_and_reference_on_the_policys_workers_cannot_have_one_node_or_gpu_of_several(model, count, policy):
    several = f"trainer.placement.policy_{count}={policy}"
    assert beside_the_policy(several) == []
    (problem,) = beside_the_policy(several, f"trainer.placement.{model}_{count}=1")
    assert problem.startswith(f"trainer.placement.{model}_{count}=1 is not policy_{count}={policy}: ")


@pytest.mark.parametrize("model", ["critic", "ref"])
def test_critic_and_reference_may_have_the_one_worker_of_a_policy_on_the_cpu(model):
    assert beside_the_policy(f"{GPUS}=0", f"trainer.placement.{model}_num_gpus_per_node=1") == []


def test_a_server_takes_the_same_fields():
    given = {GPUS: 4, f"{FSDP}fsdp_size": 2, f"{FSDP}reshard_after_forward": False}
    given |= {"trainer.policy.model_config_kwargs": {"rope_theta": 5e5}, "trainer.policy.sequence_parallel_size": 2}
    config = SkyRLTrainBackendOverrides.model_validate(given)
    assert (config.workers, config.num_workers, config.fsdp_size) == ("processes", 4, 2)
    assert not config.reshard_after_forward and config.config_overrides == {"rope_theta": 5e5}
    assert config.sequence_parallel_size == 2


ENGINE = "generator.inference_engine."
URLS = {"urls": ["http://a:1"], "folder": "~/ckpts/lora"}
SERVED = {
    "trainer.placement.policy_num_nodes": (2, {"workers": "ray", "num_workers": 2, "ray_workers_per_node": 1}),
    "trainer.placement.policy_num_gpus_per_node": (2, {"workers": "processes", "num_workers": 2}),
    "trainer.policy.model.lora.rank": (8, {"max_lora_rank": 8}),
    "trainer.critic.model.lora.rank": (8, {"max_lora_rank": 8}),
    "trainer.policy.model.lora.lora_sync_path": ("/adapters", {}),
    "trainer.policy.model_config_kwargs": ({"rope_theta": 5e5}, {"config_overrides": {"rope_theta": 5e5}}),
    "trainer.rope_theta": (5e5, {"config_overrides": {"rope_theta": 5e5}}),
    "trainer.rope_scaling": ({"factor": 2}, {"config_overrides": {"rope_scaling": {"factor": 2}}}),
    f"{FSDP}fsdp_size": (2, {"fsdp_size": 2}),
    f"{FSDP}reshard_after_forward": (False, {"reshard_after_forward": False}),
    f"{FSDP}cpu_offload": (True, {"cpu_offload": True}),
    f"{FSDP}mixed_precision.param_dtype": ("bf16", {"dtype": "bfloat16"}),
    f"{FSDP}mixed_precision.reduce_dtype": ("bf16", {"reduce_dtype": "bfloat16", "float32_parts": True}),
    "trainer.policy.sequence_parallel_size": (2, {"sequence_parallel_size": 2}),
    "trainer.policy.use_torch_compile": (True, {"compile_scores": True}),
    "trainer.gradient_checkpointing": (True, {"gradient_checkpointing": True}),
    "trainer.bf16": (False, {"dtype": "float32"}),
    "trainer.use_sample_packing": (False, {"train_micro_batch_size": 1, "forward_micro_batch_size": 1}),
    "trainer.micro_train_batch_size_per_gpu": (3, {"train_micro_batch_size": 3}),
    "trainer.micro_forward_batch_size_per_gpu": (3, {"forward_micro_batch_size": 3}),
    "trainer.algorithm.value_head_prefix": ("score", {"value_head": "score"}),
    "trainer.policy.optimizer_config.offload_after_step": (False, {"offload_after_step": False}),
    "trainer.critic.optimizer_config.offload_after_step": (False, {"offload_after_step": False}),
    f"{ENGINE}model_dtype": ("bfloat16", {"dtype": "bfloat16"}),
    f"{ENGINE}enable_prefix_caching": (False, {"prefix_caching": False}),
    f"{ENGINE}enable_chunked_prefill": (False, {"chunked_prefill": False}),
    f"{ENGINE}max_num_batched_tokens": (8192, {"sample_max_num_batched_tokens": 8192}),
    f"{ENGINE}max_num_seqs": (7, {"sample_max_num_sequences": 7}),
    f"{ENGINE}gpu_memory_utilization": (0.5, {"gpu_memory_utilization": 0.5}),
    f"{ENGINE}run_engines_locally": (True, {}),
    f"{ENGINE}remote_urls": ([], {}),
    f"{ENGINE}external_server_urls": (["http://a:1"], {"engines": URLS}),
    f"{ENGINE}external_proxy_url": ("http://a:1", {"engines": URLS}),
    f"{ENGINE}num_engines": (2, {}),
    **{f"{ENGINE}{name}": (getattr(InferenceEngineConfig(), name), {}) for name in STARTED_HERE},
}
"""A value of each field that a server takes, and the options that it asks for."""


FOLLOWED = [field.path for field in describe_fields(SkyRLTrainConfig()) if accepted_by_servers(field.path)]


@pytest.mark.parametrize("path", FOLLOWED)
def test_a_server_takes_from_a_field_what_follows_from_it_and_nothing_else(path):
    value, wanted = SERVED[path]
    folder = SkyRLTrainConfig().trainer.policy.model.lora.lora_sync_path
    wanted = {name: {**each, "folder": folder} if name == "engines" else each for name, each in wanted.items()}
    assert server_options({path: value}, own={"num_workers": 4}) == wanted  # some need several workers


def test_fields_together_ask_a_server_for_what_they_ask_a_trainer_for():
    given = {f"{ENGINE}max_num_seqs": 7, f"{LORA}lora_sync_path": "/adapters", "trainer.torch.kv_cache_gib": 1}
    given |= {f"{ENGINE}external_proxy_url": "http://a:1"}
    config = SkyRLTrainBackendOverrides.model_validate({**given, "engines": {"max_loras": 3}, "max_lora_rank": 8})
    assert (config.sample_max_num_sequences, config.kv_cache_gib, config.max_lora_rank) == (7, 1, 8)
    engines = config.engines
    assert (engines.urls, engines.folder, engines.max_requests) == (("http://a:1",), "/adapters", 7)
    assert engines.max_loras == 3


@pytest.mark.parametrize(
    "field", ["trainer.strategy=fsdp", "trainer.flash_attn=True", "trainer.disable_fast_tokenizer=False"]
)
def test_a_server_takes_what_it_has_nothing_to_do_for(field):
    path, _, value = field.partition("=")
    assert server_options({path: value if value == "fsdp" else value == "True"}) == {}


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("trainer.epochs", 2, "about a run of a trainer, and a server has none"),
        ("trainer.policy.optimizer_config.lr", 1e-3, "with each optim_step"),
        ("trainer.policy.model.lora.alpha", 3, "each client of a server chooses its adapters"),
        ("trainer.policy.model.path", "a/model", "its --base-model"),
        ("trainer.algorithm.eps_clip_low", 0.3, "with each pass"),
        ("generator.sampling_params.temperature", 0.5, "with each sample"),
        ("generator.rope_theta", 1e4, "set trainer.rope_theta alone"),
        ("trainer.strategy", "jax", "start it with --backend jax"),
        ("trainer.strategy", "megatron", "it would need megatron-core"),
        ("trainer.ref.fsdp_config.cpu_offload", True, "share the policy's base weights"),
        ("data.train_data", ["a"], "about a run of a trainer"),
    ],
)
def test_a_server_refuses_a_field_that_it_cannot_honour_by_its_name_and_says_why(path, value, why):
    with pytest.raises(ValueError, match=rf"{re.escape(f'{path}={value}')}.*{why}"):
        SkyRLTrainBackendOverrides.model_validate({path: value})


def test_an_adapter_is_as_it_is_asked_for():
    given = [f"{LORA}rank=8", f"{LORA}target_modules=.*q_proj", f"{LORA}init_method=gaussian"]
    assert problems(*given) == []
    wanted = {"rank": 8, "alpha": 16, "seed": 42, "train_unembed": False}
    assert policy_adapter(resolved(*given)) == AdapterConfig(
        **wanted, target_modules=".*q_proj", init_method="gaussian"
    )
    assert type(policy_adapter(resolved(f"{LORA}rank=8"))) is LoraConfig
    critic = "trainer.critic.model.lora."
    assert critic_adapter(resolved(f"{critic}rank=8", f"{critic}exclude_modules=.*mlp.*")) == AdapterConfig(
        **wanted, exclude_modules=".*mlp.*"
    )


@pytest.mark.parametrize(
    ("target", "exclude"),
    [
        (["q_proj", "down_proj"], None),
        (["layers.1.mlp.up_proj", "v_proj"], None),
        (["k_proj", "o_proj"], ["0.self_attn.o_proj"]),
    ],
)
def test_lists_select_the_modules_that_peft_selects(target, exclude, tiny_model):
    given = [f"{LORA}rank=2", f"{LORA}target_modules=[{','.join(target)}]"]
    given += [] if exclude is None else [f"{LORA}exclude_modules=[{','.join(exclude)}]"]
    adapter = policy_adapter(resolved(*given))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=target, exclude_modules=exclude))
    prefix, ending = "base_model.model.", ".lora_A.weight"
    wanted = {
        name.removeprefix(prefix).removesuffix(ending)
        for name in peft.get_peft_model_state_dict(theirs)
        if name.endswith(ending)
    }
    assert {name for name in linear if adapter.selects(name, "attn")} == wanted != set()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rank=8", "target_modules=("], r"lora\.target_modules=\(: it is no regular expression"),
        (["rank=8", "init_method=pissa"], r"lora\.init_method=pissa: .*'kaiming' or 'gaussian'"),
        (
            ["init_method=gaussian"],
            r"init_method=gaussian and trainer\.policy\.model\.lora\.rank=0: there is no",
        ),
    ],
)
def test_an_adapter_that_there_is_not_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        policy_adapter(resolved(*(f"{LORA}{each}" for each in given)))


def test_values_of_the_models_own_configuration_are_replaced():
    kwargs = "trainer.policy.model_config_kwargs={max_position_embeddings: 99}"
    given = ["trainer.rope_theta=5e5", "trainer.rope_scaling={rope_type: linear, factor: 2}", kwargs]
    assert problems(*given) == []
    assert options(*given).config_overrides == {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2},
        "max_position_embeddings": 99,
    }
    assert TorchStrategy().longest_context(resolved(*given)) == 99
    assert options().config_overrides == {}


def test_rollouts_with_other_positions_than_training_are_refused():
    (problem,) = problems("trainer.rope_theta=5e5", "generator.rope_theta=1e4")
    assert problem.startswith("generator.rope_theta=10000.0 is not trainer.rope_theta=500000.0: ")
    assert problems("generator.rope_theta=1e4") != []


def test_layers_are_computed_again_as_documented_unless_it_is_switched_off():
    assert options().gradient_checkpointing
    assert not options("trainer.gradient_checkpointing=false").gradient_checkpointing


def test_gradients_are_added_up_in_the_format_that_fsdp_asks_for():
    field = f"{FSDP}mixed_precision.reduce_dtype"
    assert [options(f"{field}={name}").reduce_dtype for name in ("bf16", "fp32")] == ["bfloat16", "float32"]
    assert options().float32_parts and not options(f"{LORA}rank=8").float32_parts
    assert problems(f"{field}=bf16") == [] == problems(f"{field}=fp32", f"{LORA}rank=8")
    (problem,) = problems(f"{field}=bf16", f"{LORA}rank=8")
    assert problem.startswith(f"{field}=bf16 and an adapter ") and "leave it out" in problem


def test_base_weights_are_in_the_format_that_fsdp_asks_for():
    field = f"{FSDP}mixed_precision.param_dtype"
    assert [options(f"{field}={name}").dtype for name in ("bf16", "fp32")] == ["bfloat16", "float32"]
    assert problems(f"{field}=fp32", "trainer.bf16=false") == []
    (problem,) = problems(f"{field}=fp32", "trainer.bf16=true")
    assert problem.startswith(f"{field}=fp32 and trainer.bf16, which asks for bfloat16: ")


def test_a_snapshot_of_memory_lists_the_tensors_of_the_process(tmp_path):
    held = torch.ones(1237, 1)
    views = [held[:5], held.view(1237)]
    TorchStrategy().record_memory(tmp_path / "memory" / "one.prof")
    found = json.loads((tmp_path / "memory" / "one.json").read_text())
    mine = [group for group in found["tensors"] if 1237 in group["shape"]]
    assert [(group["dtype"], group["count"], group["bytes"]) for group in mine] == [("float32", 1, 4948)], views


def test_sequences_that_are_not_packed_are_computed_one_by_one():
    apart = options("trainer.use_sample_packing=false")
    assert (apart.train_micro_batch_size, apart.forward_micro_batch_size) == (1, 1)
    batched = ["trainer.use_sample_packing=false", "trainer.micro_train_batch_size_per_gpu=2"]
    (problem,) = problems(*batched, "trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64")
    assert problem.startswith("trainer.use_sample_packing=False and trainer.micro_train_batch_size_per_gpu=2: ")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("trainer.gradient_checkpointing_use_reentrant=true", "non-reentrant"),
        ("trainer.policy.record_memory=true", "a snapshot is of the trainer's own process"),
        ("trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16", "base weights are in bf16 or fp32"),
        ("trainer.policy.fsdp_config.mixed_precision.reduce_dtype=fp16", "gradients are added up in bf16 or fp32"),
        ("trainer.policy.fsdp_config.mixed_precision.buffer_dtype=bf16", "buffers keep the format"),
        ("trainer.policy.fsdp_config.wrap_policy={transformer_layer_cls_to_wrap: Block}", "a separate FSDP unit"),
        ("generator.inference_engine.fully_sharded_loras=true", "name a Python that has vLLM"),
        ("generator.inference_engine.engine_init_kwargs={a: 1}", "the policy's workers sample"),
        ("generator.inference_engine.enforce_eager=false", "without vLLM servers that are started here"),
        ("generator.inference_engine.vllm_v1_disable_multiproc=false", "a separate process for the model"),
        ("generator.inference_engine.enable_ray_prometheus_stats=true", "serves metrics at its own /metrics"),
        ("generator.inference_engine.weight_sync_backend=gloo", "whole models alike, reach engines as files"),
        ("trainer.critic.model.lora.lora_sync_path=there", "a critic is not sampled"),
        ("trainer.ref.fsdp_config.cpu_offload=true", "share the policy's base weights"),
        ("trainer.critic.fsdp_config.fsdp_size=2", "share the policy's base weights"),
        ("trainer.critic.model_config_kwargs={a: 1}", "share the policy's base weights"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(given, why):
    (problem,) = problems(given)
    assert problem.startswith(given.split("=")[0]) and why in problem


def test_supervised_training_offloads_unless_it_is_told_not_to():
    given = ["strategy=torch", "train_datasets=[a]"]
    assert "offload_after_step" not in TorchStrategy().sft_options(SFTConfig.from_cli_overrides(given).resolve())
    stays = SFTConfig.from_cli_overrides([*given, "optimizer_config.offload_after_step=false"]).resolve()
    assert TorchStrategy().sft_options(stays)["offload_after_step"] is False


def test_a_mean_of_gradients_is_refused_because_trainers_weight_their_losses():
    with pytest.raises(ConfigError, match=r"^trainer.torch.gradient_reduction=mean: trainers weight .* leave it out"):
        TorchStrategy().rl_backend_config(resolved("trainer.torch.gradient_reduction=mean"))
    options = SFTConfig.from_cli_overrides(["strategy=torch", "torch.gradient_reduction=mean"])
    with pytest.raises(ConfigError, match=r"^torch.gradient_reduction=mean"):
        TorchStrategy().sft_backend_config(options)


def test_the_documented_default_runs_on_one_worker_with_all_weights_shared_by_it_alone():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=torch"]).resolve()
    assert config.trainer.placement.colocate_all
    assert [*TorchStrategy().unsupported(config), *TorchStrategy().problems(config)] == []
    given = TorchBackendConfig(**TorchStrategy().rl_options(config))
    assert (given.workers, given.num_workers, given.device) == ("in_process", 1, None)


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ("model_dtype=float32", "dtype", "float32"),
        ("enable_prefix_caching=false", "prefix_caching", False),
        ("enable_chunked_prefill=false", "chunked_prefill", False),
        ("max_num_batched_tokens=64", "sample_max_num_batched_tokens", 64),
        ("gpu_memory_utilization=0.5", "gpu_memory_utilization", 0.5),
    ],
)
def test_options_of_engines_are_those_of_the_sampler_unless_engines_were_started_elsewhere(given, option, value):
    field = f"generator.inference_engine.{given}"
    assert getattr(options(field, gpus=1), option) == value
    external = "generator.inference_engine.external_proxy_url=http://localhost:1"
    more = ["trainer.policy.model.lora.rank=8", "trainer.placement.colocate_all=false"]
    told = TorchStrategy().problems(resolved(field, external, *more, gpus=1))
    assert any("elsewhere: theirs is as they were started" in each for each in told)
