"""Rules about several fields: what is refused, with both values and a way out that works; what only warns."""

import re

import pytest

from skyrl.train.config import ConfigError, SkyRLTrainConfig

A = "trainer.algorithm."
P = "trainer.placement."
G = "generator."
E = "generator.inference_engine."
MEGATRON = "trainer.strategy=megatron"
CRITIC = "trainer.critic.model.path=m"
GAE = A + "advantage_estimator=gae"
APART = P + "colocate_all=false"
CORRECTED = A + "off_policy_correction.tis_ratio_type=token"
ASYNC = ["trainer.fully_async.enabled=true", "trainer.train_batch_size=256", APART, CORRECTED]

REFUSED = [
    # overrides, message, overrides that are a way out
    (
        ["trainer.policy_mini_batch_size=300"],
        "does not divide trainer.train_batch_size=1024; use a divisor such as 256",
        ["trainer.policy_mini_batch_size=256"],
    ),
    (
        ["trainer.train_batch_size=128"],
        "trainer.policy_mini_batch_size=256 does not divide trainer.train_batch_size=128; use a divisor such as 128",
        ["trainer.policy_mini_batch_size=128"],
    ),
    (
        [CRITIC, "trainer.critic_mini_batch_size=300"],
        "trainer.critic_mini_batch_size=300 does not divide",
        ["trainer.critic_mini_batch_size=256"],
    ),
    (
        ["trainer.micro_train_batch_size_per_gpu=7"],
        "micro_train_batch_size_per_gpu=7 does not divide the 1280 sequences of a rank of the policy",
        ["trainer.micro_train_batch_size_per_gpu=8"],
    ),
    (
        [
            "trainer.train_batch_size=6",
            "trainer.policy_mini_batch_size=6",
            G + "n_samples_per_prompt=1",
            P + "policy_num_gpus_per_node=4",
            P + "ref_num_gpus_per_node=4",
            E + "num_engines=4",
        ],
        "= 6 sequences do not divide over the 4 data-parallel ranks of the policy; use a multiple of 4",
        ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", G + "n_samples_per_prompt=4"],
    ),
    (
        [CRITIC, P + "critic_num_gpus_per_node=3"],
        "do not divide over the 3 data-parallel ranks of the critic",
        [P + "critic_num_gpus_per_node=4"],
    ),
    (
        [P + "ref_num_gpus_per_node=3"],
        "= 5120 sequences do not divide over the 3 data-parallel ranks of the ref",
        [P + "ref_num_gpus_per_node=2"],
    ),
    (
        ["trainer.policy.sequence_parallel_size=2"],
        "policy 1 devices (policy_num_nodes x policy_num_gpus_per_node), which do not divide into groups of 2",
        ["trainer.policy.sequence_parallel_size=1"],
    ),
    (
        [MEGATRON, "trainer.policy.megatron_config.tensor_model_parallel_size=2"],
        "give it 2 devices, or lower the size",
        [P + "policy_num_gpus_per_node=2", E + "num_engines=2"],
    ),
    ([GAE], "algorithm.advantage_estimator=gae and critic.model.path=None", [CRITIC]),
    (
        [A + "advantage_estimator=maxrl", A + "use_kl_in_reward=true", A + "use_kl_loss=false"],
        "advantage_estimator=maxrl and use_kl_in_reward=True",
        [A + "use_kl_in_reward=false"],
    ),
    (
        [A + "use_kl_in_reward=true", A + "use_kl_loss=false", A + "kl_ctrl.type=adaptive", A + "kl_ctrl.horizon=1024"],
        "kl_ctrl.horizon=1024 and steps of 5120 sequences",
        [A + "kl_ctrl.horizon=1025"],
    ),
    (
        ["trainer.policy.model.path=null", "trainer.ref.model.path=m"],
        "policy.model.path=None: there is no model to train",
        ["trainer.policy.model.path=m"],
    ),
    (["data.train_data=[]"], "data.train_data=[]: there is nothing to train on", ["data.train_data=[a.parquet]"]),
    (
        ["data.val_data=[]", "trainer.eval_interval=5"],
        "data.val_data=[], trainer.eval_interval=5 and trainer.eval_before_train=False",
        ["trainer.eval_interval=0"],
    ),
    (
        ["data.val_data=[]", "trainer.eval_before_train=true"],
        "there is nothing to evaluate on",
        ["data.val_data=[a.parquet]"],
    ),
    (
        [G + "n_samples_per_prompt=1"],
        "advantage_estimator=grpo compares the samples of a prompt",
        [A + "advantage_estimator=reinforce++"],
    ),
    ([A + "use_kl_in_reward=true"], "use_kl_in_reward=True and use_kl_loss=True", [A + "use_kl_loss=false"]),
    (
        [A + "kl_ctrl.type=adaptive"],
        "kl_ctrl.type=adaptive and use_kl_in_reward=False",
        [A + "use_kl_in_reward=true", A + "use_kl_loss=false"],
    ),
    (
        [G + "sampling_params.temperature=0"],
        "temperature=0 makes log-probabilities 0 or -inf",
        [G + "sampling_params.temperature=1"],
    ),
    (
        [A + "loss_reduction=seq_mean_token_sum_norm", G + "max_turns=2"],
        "loss_reduction=seq_mean_token_sum_norm and max_seq_len=None",
        [A + "max_seq_len=4096"],
    ),
    (
        [A + "use_tis=true"],
        "use_tis=True and tis_imp_ratio_cap=-1.0: a ratio is capped at more than 0",
        [A + "use_tis=false", A + "off_policy_correction.tis_ratio_type=token"],
    ),
    (
        [A + "use_tis=true", A + "tis_imp_ratio_cap=2", A + "off_policy_correction.tis_ratio_type=sequence"],
        "say different things; set use_tis=False",
        [A + "use_tis=false", A + "tis_imp_ratio_cap=-1"],
    ),
    (
        [A + "off_policy_correction.tis_ratio_type=token", G + "sampling_params.logprobs=null"],
        "generator.sampling_params.logprobs=None",
        [G + "sampling_params.logprobs=0"],
    ),
    (
        [A + "off_policy_correction.token_mask_is_threshold_low=0.5", G + "sampling_params.logprobs=null"],
        "generator.sampling_params.logprobs=None",
        [G + "sampling_params.logprobs=1"],
    ),
    (
        [A + "off_policy_correction.outlier_token_is_threshold_high=9", G + "sampling_params.logprobs=null"],
        "generator.sampling_params.logprobs=None",
        [G + "sampling_params.logprobs=1"],
    ),
    (
        [A + "off_policy_correction.sequence_mask_metric=geometric", A + "off_policy_correction.geo_mask_low=2"],
        "trainer.algorithm.off_policy_correction: geo_mask_low=2.0 is above geo_mask_high=1.01",
        [A + "off_policy_correction.geo_mask_high=3"],
    ),
    (
        [
            A + "off_policy_correction.token_mask_is_threshold_low=2",
            A + "off_policy_correction.token_mask_is_threshold_high=1",
        ],
        "token_mask_is_threshold_low=2.0 is above token_mask_is_threshold_high=1.0",
        [A + "off_policy_correction.token_mask_is_threshold_high=null"],
    ),
    (
        [A + "policy_loss_type=clip_cov", A + "off_policy_correction.sequence_mask_metric=product"],
        "policy_loss_type=clip_cov and off_policy_correction",
        [A + "policy_loss_type=regular"],
    ),
    (
        [A + "policy_loss_type=kl_cov", A + "off_policy_correction.token_mask_is_threshold_high=2"],
        "policy_loss_type=kl_cov and off_policy_correction",
        [A + "off_policy_correction.token_mask_is_threshold_high=null"],
    ),
    (
        [A + "policy_loss_type=clip_cov", A + "clip_cov.clip_cov_lb=9"],
        "clip_cov_lb=9.0 must be less than clip_cov_ub=5.0",
        [A + "clip_cov.clip_cov_ub=10"],
    ),
    (
        ["trainer.update_ref_every_epoch=true", A + "use_kl_loss=false"],
        "there is no reference",
        [A + "use_kl_loss=true"],
    ),
    (
        ["trainer.resume_mode=from_path"],
        "resume_mode=from_path and resume_path=None",
        ["trainer.resume_path=/c/global_step_12"],
    ),
    (
        ["trainer.resume_mode=from_path", "trainer.resume_path=/c/step12"],
        "a checkpoint is a folder named global_step_<number>",
        ["trainer.resume_path=/c/global_step_12/"],
    ),
    (
        ["trainer.resume_path=/c/global_step_12"],
        "resume_path=/c/global_step_12 is not read with resume_mode=latest",
        ["trainer.resume_mode=from_path"],
    ),
    (["trainer.jax.max_lora_rank=8"], "is not read with strategy=torch", ["trainer.strategy=jax"]),
    (
        ["trainer.flash_attn=false"],
        "use_sample_packing=True and flash_attn=False",
        ["trainer.use_sample_packing=false"],
    ),
    (
        [MEGATRON, CRITIC],
        "strategy=megatron and critic.model.path=m: Megatron trains no critic",
        ["trainer.strategy=torch"],
    ),
    (
        [MEGATRON, "trainer.ref.sequence_parallel_size=2"],
        "strategy=megatron and ref.sequence_parallel_size=2",
        ["trainer.ref.sequence_parallel_size=1"],
    ),
    (
        [
            MEGATRON,
            "trainer.policy.megatron_config.context_parallel_size=2",
            P + "policy_num_gpus_per_node=2",
            E + "num_engines=2",
            "trainer.use_sample_packing=false",
        ],
        "policy.megatron_config.context_parallel_size=2 and use_sample_packing=False",
        ["trainer.use_sample_packing=true"],
    ),
    (
        [MEGATRON, E + "weight_sync_backend=gloo"],
        "weight_sync_backend=gloo: Megatron sends weights with nccl",
        [E + "weight_sync_backend=nccl"],
    ),
    (
        ["trainer.policy.megatron_config.torch_profiler_config.enable=true"],
        "enable=True and save_path=None",
        ["trainer.policy.megatron_config.torch_profiler_config.save_path=/p"],
    ),
    (
        [APART, P + "ref_num_gpus_per_node=2"],
        "the reference has 1 x 2 devices and the policy 1 x 1",
        [P + "colocate_policy_ref=false"],
    ),
    (
        [P + "policy_num_gpus_per_node=2"],
        "the policy has 2 devices (policy_num_nodes x policy_num_gpus_per_node) and the engines 1",
        [E + "tensor_parallel_size=2"],
    ),
    (
        [E + "tensor_parallel_size=2", E + "distributed_executor_backend=mp", P + "policy_num_nodes=2"],
        "distributed_executor_backend=mp and 2 devices",
        [E + "distributed_executor_backend=ray"],
    ),
    ([E + "external_server_urls=[http://a]"], "engines that were started elsewhere", [APART]),
    ([E + "run_engines_locally=false", APART], "num_engines=1 and 0 remote_urls", [E + "remote_urls=[127.0.0.1:1]"]),
    ([E + "remote_urls=[127.0.0.1:1]"], "and run_engines_locally=True", [E + "run_engines_locally=false", APART]),
    (
        [E + "enable_http_endpoint=true", E + "async_engine=false", G + "batched=true"],
        "enable_http_endpoint=True and async_engine=False",
        [E + "async_engine=true"],
    ),
    (
        [E + "expert_parallel_size=3"],
        "expert_parallel_size=3 is not tensor_parallel_size x data_parallel_size = 1 x 1; set it to 1",
        [E + "expert_parallel_size=1"],
    ),
    ([E + "async_engine=false"], "batched=False and inference_engine.async_engine=False", [G + "batched=true"]),
    (
        [G + "batched=true", G + "chat_template_kwargs.a=1"],
        "batched=True and chat_template_kwargs={'a': 1}",
        [G + "batched=false"],
    ),
    (
        [G + "batched=true", G + "max_concurrent_trajectories=4"],
        "batched=True and max_concurrent_trajectories=4",
        [G + "batched=false"],
    ),
    (
        [G + "batched=true", G + "trajectories_per_second=4.0"],
        "batched=True and trajectories_per_second=4.0",
        [G + "batched=false"],
    ),
    (
        [G + "batched=true", G + "step_wise_trajectories=true"],
        "batched=True and step_wise_trajectories=True",
        [G + "batched=false"],
    ),
    (
        [G + "batched=true", G + "zero_reward_on_non_stop=true"],
        "batched=True and zero_reward_on_non_stop=True",
        [G + "zero_reward_on_non_stop=false"],
    ),
    ([G + "batched=true", G + "max_turns=2"], "batched=True, max_turns=2: a batch has one turn", [G + "max_turns=1"]),
    (
        [G + "step_wise_trajectories=true", G + "chat_template.name_or_path=t"],
        "step_wise_trajectories=True and chat_template.name_or_path=t",
        [G + "chat_template.name_or_path=null"],
    ),
    (
        [G + "step_wise_trajectories=true", G + "use_conversation_multi_turn=false"],
        "step_wise_trajectories=True and use_conversation_multi_turn=False",
        [G + "use_conversation_multi_turn=true"],
    ),
    (
        [G + "step_wise_trajectories=true", A + "advantage_estimator=reinforce++"],
        "steps share one advantage per trajectory; use grpo",
        [A + "advantage_estimator=rloo"],
    ),
    (
        [G + "chat_template.source=file"],
        "source=file and name_or_path=None",
        [G + "chat_template.name_or_path=/t.jinja"],
    ),
    (
        [G + "max_input_length=600"],
        "generator.max_input_length=600 and trainer.max_prompt_length=512 differ",
        ["trainer.max_prompt_length=600"],
    ),
    (
        [G + "max_input_length=100", G + "max_turns=2"],
        "generator.max_input_length=100 is less than trainer.max_prompt_length=512",
        [G + "max_input_length=1536"],
    ),
    (
        [G + "n_samples_per_prompt=1", A + "advantage_estimator=reinforce++", A + "dynamic_sampling.type=filter"],
        "dynamic_sampling.type=filter compares the samples of a prompt",
        [A + "dynamic_sampling.type=null"],
    ),
    (
        [G + "n_samples_per_prompt=1", A + "advantage_estimator=reinforce++", A + "zero_variance_filter=true"],
        "zero_variance_filter=True compares the samples",
        [G + "n_samples_per_prompt=2"],
    ),
    (
        [*ASYNC, "trainer.train_batch_size=512"],
        "train_batch_size=512 and policy_mini_batch_size=256 differ",
        ["trainer.train_batch_size=256"],
    ),
    (
        [*ASYNC, "trainer.fully_async.num_parallel_generation_workers=100"],
        "num_parallel_generation_workers=100 is not from policy_mini_batch_size=256 to",
        ["trainer.fully_async.num_parallel_generation_workers=256"],
    ),
    (
        [*ASYNC, "trainer.fully_async.max_staleness_steps=1"],
        "= 256 x 2: fewer starve a step, more wait; set it to 512",
        ["trainer.fully_async.num_parallel_generation_workers=512"],
    ),
    (
        [*ASYNC, A + "dynamic_sampling.type=replace"],
        "batches are not sampled again beside training",
        [A + "dynamic_sampling.type=null"],
    ),
    ([*ASYNC, "trainer.one_step_off=true"], "two ways to sample beside training", ["trainer.one_step_off=false"]),
    (["trainer.one_step_off=true", CORRECTED], "one_step_off=True and placement.colocate_all=True", [APART]),
    ([*ASYNC, P + "colocate_all=true"], "rollouts beside training need their own devices", [APART]),
    (
        [*ASYNC, G + "batched=true"],
        "trainer.fully_async.enabled=True and generator.batched=True",
        [G + "batched=false"],
    ),
    (
        [*ASYNC, E + "async_engine=false", G + "batched=true"],
        "engines sample while others train; set async_engine=True",
        [E + "async_engine=true", G + "batched=false"],
    ),
]
NAMES = [" ".join(re.sub(r"(trainer|generator)\.", "", override) for override in given) for given, _, _ in REFUSED]


def sharded(given: list[str]) -> SkyRLTrainConfig:
    """With the documented strategy, unless another one is given."""
    return SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=torch", *given])


@pytest.mark.parametrize(("given", "message", "_way_out"), REFUSED, ids=NAMES)
def test_what_cannot_be_done_is_refused_with_its_values(given, message, _way_out):
    with pytest.raises(ConfigError) as error:
        sharded(given).resolve()
    assert message in str(error.value)


@pytest.mark.parametrize(("given", "_message", "way_out"), REFUSED, ids=NAMES)
def test_the_way_out_leads_out(given, _message, way_out):
    sharded([*given, *way_out]).resolve()


def test_all_broken_rules_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        sharded([GAE, A + "use_kl_in_reward=true", E + "num_engines=2"]).resolve()
    assert len(str(error.value).splitlines()) == 3


def test_a_message_begins_with_the_section_it_is_about():
    with pytest.raises(ConfigError, match=r"^trainer: algorithm\.advantage_estimator=gae"):
        SkyRLTrainConfig.from_cli_overrides([GAE]).resolve()


WARNED = [
    ([A + "policy_loss_type=cispo"], "cispo_eps_clip_low=0.0 and cispo_eps_clip_high=5.0 clip the ratio to [1, 6]"),
    ([A + "policy_loss_type=gspo", A + "loss_reduction=sequence_mean"], "clips almost nothing"),
    (
        [A + "policy_loss_type=gspo", A + "eps_clip_low=3e-4", A + "eps_clip_high=4e-4"],
        "policy_loss_type=gspo is defined with loss_reduction=sequence_mean, not token_mean",
    ),
    ([A + "temperature=0.5"], "trainer.algorithm.temperature=0.5 and generator.sampling_params.temperature=1.0"),
    (
        [G + "sampling_params.stop=[a]", G + "append_eos_token_after_stop_str_in_multi_turn=false"],
        "leaves turns without an end-of-sequence token",
    ),
    (
        [option for option in ASYNC if option != CORRECTED],
        "trainer.fully_async.enabled=True without trainer.algorithm.off_policy_correction",
    ),
    (["trainer.one_step_off=true"], "trainer.one_step_off=True without trainer.algorithm.off_policy_correction"),
    ([A + "use_kl_loss=true", A + "kl_estimator_type=k1"], "its gradient is 0 on average"),
    ([G + "sampling_params.top_p=0.9"], "generator.sampling_params.top_p=0.9: the policy that samples is not the one"),
    (
        [G + "max_turns=5", G + "max_input_length=1000"],
        "generator.max_input_length=1000 with generator.max_turns=5: after a prompt of trainer.max_prompt_length=512",
    ),
]


@pytest.mark.parametrize(("given", "message"), WARNED, ids=[" ".join(given) for given, _ in WARNED])
def test_what_is_probably_not_meant_warns(given, message):
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        SkyRLTrainConfig.from_cli_overrides(given).resolve()
    assert len(caught) == 1


@pytest.mark.parametrize(
    "given",
    [
        [A + "policy_loss_type=cispo", A + "cispo.cispo_eps_clip_low=1", A + "cispo.cispo_eps_clip_high=4"],
        [A + "policy_loss_type=my.module:loss", A + "advantage_estimator=my.module:advantage"],
        [GAE, CRITIC],
        ["trainer.strategy=fsdp"],
        ["trainer.strategy=jax", "trainer.jax.max_lora_rank=8", E + "num_engines=3"],
        [A + "off_policy_correction.token_mask_is_threshold_low=0.5"],
        [G + "max_turns=3", G + "max_input_length=4096"],
        [G + "max_turns=5"],
        [A + "use_kl_loss=false", A + "use_kl_in_reward=true", A + "kl_estimator_type=k1"],
        ["trainer.logger=[wandb, console]"],
        ASYNC,
        [*ASYNC, "trainer.strategy=jax", P + "colocate_all=true"],
        ["data.val_data=[]", "trainer.eval_interval=0", "trainer.eval_before_train=false"],
        [A + "kl_estimator_type=my.module:estimator"],
    ],
    ids=str,
)
def test_what_can_be_done_is_accepted_in_silence(given):
    SkyRLTrainConfig.from_cli_overrides(given).resolve()
