"""The trainer: strategy, batch sizes, checkpoints, evaluation and logging."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt

from skyrl.train.config.algorithm import AlgorithmConfig
from skyrl.train.config.machinery.base import BaseConfig
from skyrl.train.config.machinery.fields import known_name, one_of
from skyrl.train.config.models import CriticConfig, PlacementConfig, PolicyConfig, RefConfig
from skyrl.train.config.rules.renames import renamed
from skyrl.train.config.rules.trainer import trainer_problems
from skyrl.train.config.strategies import DEFAULT_STRATEGY, STRATEGIES
from skyrl.train.tracking.clients import TRACKERS


def all_or_some(count: int) -> int:
    """A count of things to keep: from 1, or -1 for all. Raises ValueError for another."""
    if count == -1 or count >= 1:
        return count
    raise ValueError("give a number from 1, or -1 to keep all of them")


def _trackers(names: str | list[str]) -> str | list[str]:
    for name in [names] if isinstance(names, str) else names:
        known_name(name, tuple(TRACKERS))
    return names


Trackers = Annotated[str | list[str], AfterValidator(_trackers)]
"""One or several names of trackers."""


@dataclass
class FullyAsyncConfig(BaseConfig):
    """Rollouts that run beside training."""

    enabled: bool = False
    """Whether rollouts run beside training rather than in turn with it."""

    max_staleness_steps: NonNegativeInt = 4
    """Optimizer steps by which the policy that sampled a rollout may lag behind."""

    num_parallel_generation_workers: PositiveInt = 768
    """Prompts that are sampled at once."""

    staleness_policy: Annotated[str, one_of("block", "drop", "mask")] = "block"
    """What becomes of slow prompts. block: they are waited for. drop: they are left out once they are too old. mask:
    they come late, and tokens that are too old are not trained on."""


@dataclass
class TrainerConfig(BaseConfig):
    """How the policy is trained."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """GPUs of each model."""

    sequence_parallel_backend: Annotated[str, one_of("ulysses")] = "ulysses"
    """How ranks share sequences: ulysses."""

    strategy: Annotated[str, one_of(*STRATEGIES)] = "fsdp2"
    """What computes: fsdp2 (or fsdp, which is the same), megatron, or jax. Left out: jax, which is what is served."""

    jax: dict[str, Any] = field(default_factory=dict)
    """Options of the JAX backend, with strategy jax."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model that is trained."""

    ref: RefConfig = field(default_factory=RefConfig)
    """The model from which the policy's KL divergence is measured."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The model that estimates values."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The RL algorithm."""

    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    """Rollouts that run beside training."""

    one_step_off: bool = False
    """Whether the next batch is sampled while one is trained on, by weights that are one step old."""

    gradient_checkpointing: bool = True
    """Whether activations are computed again in the backward pass rather than kept. Left out, with strategy jax: as few
    as leave room for the rest."""

    gradient_checkpointing_use_reentrant: bool = False
    """Whether that uses torch's reentrant variant."""

    seed: NonNegativeInt = 42
    """Seed of data order, initialisation and sampling."""

    resume_mode: Annotated[str | None, one_of(None, "none", "latest", "from_path")] = "latest"
    """Where training starts: none anew, latest from the newest checkpoint of this run, from_path from resume_path."""

    resume_path: str | None = None
    """Checkpoint, a folder named global_step_<number>, for resume_mode=from_path."""

    log_path: str = "/tmp/skyrl-logs"
    """Folder for the logs of workers and engines."""

    ckpt_path: str = field(default_factory=lambda: os.path.expanduser("~/ckpts/"))
    """Folder for checkpoints. One that is given is used as it is; the default gets project_name/run_name below it."""

    max_ckpts_to_keep: Annotated[int, AfterValidator(all_or_some)] = -1
    """Newest checkpoints that are kept. -1: all."""

    ckpt_interval: int = 10
    """Steps between checkpoints. 0 or less: none in between."""

    hf_save_interval: int = -1
    """Steps between exports in Hugging Face format. 0 or less: none."""

    export_path: str = field(default_factory=lambda: os.path.expanduser("~/exports/"))
    """Folder for exports and dumps. One that is given is used as it is; the default gets project_name/run_name below
    it."""

    bf16: bool = True
    """Whether models compute in bfloat16, where that is available."""

    epochs: PositiveInt = 1
    """Passes over the data."""

    update_epochs_per_batch: PositiveInt = 1
    """Passes over each batch."""

    train_batch_size: PositiveInt = 1024
    """Prompts of a training step."""

    policy_mini_batch_size: PositiveInt = 256
    """Prompts of an optimizer step of the policy."""

    critic_mini_batch_size: PositiveInt = 256
    """Prompts of an optimizer step of the critic."""

    micro_train_batch_size_per_gpu: PositiveInt = 1
    """Sequences of which a GPU computes gradients at once. Left out, with strategy jax: as many as fill a tile."""

    micro_forward_batch_size_per_gpu: PositiveInt = 1
    """Sequences that a GPU scores at once. Left out, with strategy jax: as many as fill a tile."""

    update_ref_every_epoch: bool = False
    """Whether the policy becomes the reference after each epoch."""

    use_sample_packing: bool = True
    """Whether sequences are packed without padding, where that is available."""

    eval_batch_size: PositiveInt = 1024
    """Prompts that are evaluated at once."""

    eval_before_train: bool = True
    """Whether to evaluate before the first step too, where eval_interval is above 0."""

    eval_interval: int = 5
    """Steps between evaluations. 0 or less: none."""

    max_prompt_length: PositiveInt = 512
    """Tokens of a prompt at most; rows with longer ones are left out."""

    flash_attn: bool = True
    """Whether attention uses FlashAttention, where that is available."""

    disable_fast_tokenizer: bool = False
    """Whether to load the tokenizer that is written in Python."""

    project_name: str = "skyrl"
    """Project in the tracker."""

    run_name: str = "test_run"
    """Run in the tracker, and what its checkpoints belong to."""

    logger: Trackers = "wandb"
    """Where metrics go beside the local files: one or several of wandb, mlflow, swanlab, tensorboard, console. To the
    console where none of them can be used."""

    dump_data_batch: bool = False
    """Whether every training batch is written to export_path."""

    dump_eval_results: bool = True
    """Whether results of evaluations are written to export_path."""

    rope_scaling: dict[str, Any] | None = None
    """Scaling of rotary embeddings. None: the model's."""

    rope_theta: PositiveFloat | None = None
    """Base of rotary embeddings. None: the model's."""

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return renamed(given, "remove_microbatch_padding", "use_sample_packing")

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.critic.model.path is not None

    @property
    def models(self) -> list[str]:
        """The models of this run: policy, and critic and ref where there are any."""
        return ["policy", *["critic"] * self.has_critic, *["ref"] * self.algorithm.uses_reference]

    @property
    def is_distributed(self) -> bool:
        """Whether models are on ranks with GPUs of their own, and engines on others sample."""
        return STRATEGIES[self.strategy].is_distributed

    def gpus(self, model: str) -> int:
        """GPUs of policy, critic or ref."""
        placement = self.placement
        return getattr(placement, f"{model}_num_nodes") * getattr(placement, f"{model}_num_gpus_per_node")

    def model_parallel_size(self, model: str) -> int:
        """Ranks of policy, critic or ref that work on the same sequences."""
        owner = getattr(self, model)
        if self.strategy == "megatron" and model != "critic":  # which Megatron has none of
            return owner.megatron_config.model_parallel_size
        return owner.sequence_parallel_size

    def derive(self) -> None:
        if not self.is_given("strategy"):
            self.fill_in("strategy", DEFAULT_STRATEGY)
        if self.ref.model.path is None:
            self.ref.model.path = self.policy.model.path
        if self.ckpt_path == TrainerConfig().ckpt_path:  # or one run would go on from another's checkpoints
            self.ckpt_path = os.path.join(self.ckpt_path, self.project_name, self.run_name)
        if self.export_path == TrainerConfig().export_path:
            self.export_path = os.path.join(self.export_path, self.project_name, self.run_name)
        for name in ("ckpt_path", "export_path"):
            setattr(self, name, os.path.expanduser(getattr(self, name)))

    def problems(self) -> Iterator[str]:
        yield from trainer_problems(self)
