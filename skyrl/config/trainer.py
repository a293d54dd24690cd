"""The trainer: strategy, batch sizes, checkpoints, evaluation and logging."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt

from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.inference import ONE_VALUE
from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import OneOrMore, known_name, one_of
from skyrl.config.machinery.uses import JAX, TORCH, of_trainers, refused, sets, where_available
from skyrl.config.models import CriticConfig, PlacementConfig, PolicyConfig, RefConfig
from skyrl.config.rules.renames import renamed
from skyrl.config.rules.trainer import trainer_problems
from skyrl.config.strategies import STRATEGIES, default_strategy
from skyrl.config.trackers import TRACKERS, usable_trackers


def all_or_some(count: int) -> int:
    """Return the number of items to keep. Raises ValueError unless it is at least 1, or -1 for all."""
    if count == -1 or count >= 1:
        return count
    raise ValueError("give a number from 1, or -1 to keep all of them")


def _trackers(names: str | list[str]) -> str | list[str]:
    for name in [names] if isinstance(names, str) else names:
        known_name(name, tuple(TRACKERS))
    return names


Trackers = Annotated[str | list[str], AfterValidator(_trackers)]
"""Name of a tracker, or a list of names."""


@dataclass
class FullyAsyncConfig(BaseConfig):
    """Rollouts that run concurrently with training."""

    enabled: bool = False
    """Run rollouts concurrently with training. False: the two alternate."""

    max_staleness_steps: NonNegativeInt = 4
    """Maximum number of optimizer steps by which the sampling policy may lag behind the trained policy."""

    num_parallel_generation_workers: PositiveInt = 768
    """Number of prompts that are sampled concurrently."""

    staleness_policy: Annotated[str, one_of("block", "drop", "mask")] = "block"
    """Treatment of slow prompts. block: training waits for them. drop: a prompt that becomes too stale is dropped.
    mask: a late prompt is kept, but its tokens that are too stale are masked in the loss."""


@dataclass
class TrainerConfig(BaseConfig):
    """Training of the policy."""

    placement: Annotated[
        PlacementConfig, refused("one process runs all models on the device that it finds; leave it out", JAX)
    ] = field(default_factory=PlacementConfig)
    """GPUs of each model."""

    sequence_parallel_backend: Annotated[str, one_of("ulysses"), ONE_VALUE] = "ulysses"
    """Method that splits sequences over ranks: ulysses."""

    strategy: Annotated[str, one_of(*STRATEGIES)] = "fsdp2"
    """Backend of the run: torch (other names: fsdp2, fsdp), or jax. megatron is not supported yet. Unset: torch if it
    sees a GPU; otherwise jax."""

    jax: Annotated[
        dict[str, Any],
        refused("these are options of the JAX backend; set trainer.torch, or trainer.strategy=jax", TORCH),
    ] = field(default_factory=dict)
    """Options of the JAX backend, with strategy jax."""

    torch: Annotated[
        dict[str, Any],
        refused("these are options of the torch backend; set trainer.jax, or trainer.strategy=torch", JAX),
    ] = field(default_factory=dict)
    """Options of the torch backend, with strategy torch. Another name of this section is fsdp2."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model that is trained."""

    ref: RefConfig = field(default_factory=RefConfig)
    """The reference model. The policy's KL divergence is measured from it."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The model that estimates values."""

    algorithm: Annotated[
        AlgorithmConfig,
        of_trainers("clients of a server send losses and their settings with each pass; leave it out"),
    ] = field(default_factory=AlgorithmConfig)
    """The RL algorithm."""

    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    """Rollouts that run concurrently with training."""

    one_step_off: bool = False
    """While the current batch is trained on, sample the next batch. Its samples are from weights that are one step old.
    """

    gradient_checkpointing: Annotated[bool, sets("gradient_checkpointing")] = True
    """Recompute activations in the backward pass instead of keeping them. Unset, with strategy jax: recompute only as
    many as memory requires."""

    gradient_checkpointing_use_reentrant: Annotated[
        bool,
        refused("this is an option of torch; leave it out", JAX),
        refused("FSDP2 and adapter hooks need the non-reentrant variant; leave it at False", TORCH),
    ] = False
    """Use torch's reentrant variant of gradient checkpointing."""

    seed: NonNegativeInt = 42
    """Seed of data order, initialisation and sampling."""

    resume_mode: Annotated[str | None, one_of(None, "none", "latest", "from_path")] = "latest"
    """Checkpoint from which the run starts. none: a new run. latest: the newest of this run. from_path: resume_path."""

    resume_path: str | None = None
    """Checkpoint for resume_mode=from_path. It is a folder named global_step_<number>."""

    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts after a loss of the backend, for example because a worker died. A restart continues
    from the newest checkpoint. 0: the run ends. With another resume_mode than
    latest, the run also ends."""

    log_path: str = "/tmp/skyrl-logs"
    """Folder for a copy of the log, in the file <project_name>/<run_name>.log. Unset: no copy, only standard error."""

    ckpt_path: str = field(default_factory=lambda: os.path.expanduser("~/ckpts/"))
    """Folder for checkpoints, or an s3://, gs:// or az:// URL of a bucket. A given path is used as it is; the default
    path gets a subfolder project_name/run_name."""

    max_ckpts_to_keep: Annotated[int, AfterValidator(all_or_some)] = -1
    """Number of newest checkpoints to keep. -1: all."""

    ckpt_interval: int = 10
    """Number of steps between checkpoints. 0 or less: a checkpoint after each epoch only."""

    hf_save_interval: int = -1
    """Number of steps between exports in Hugging Face format. An adapter is also exported in PEFT format. 0 or less: no
    exports."""

    export_path: str = field(default_factory=lambda: os.path.expanduser("~/exports/"))
    """Folder for exports and dumps, or an s3://, gs:// or az:// URL of a bucket. A given path is used as it is; the
    default path gets a subfolder project_name/run_name."""

    bf16: Annotated[bool, where_available(JAX, TORCH), sets("dtype")] = True
    """Compute in bfloat16, where that is available."""

    epochs: PositiveInt = 1
    """Number of passes over the data."""

    update_epochs_per_batch: PositiveInt = 1
    """Number of passes over each batch."""

    train_batch_size: PositiveInt = 1024
    """Number of prompts in a training step."""

    policy_mini_batch_size: PositiveInt = 256
    """Number of prompts in an optimizer step of the policy."""

    critic_mini_batch_size: PositiveInt = 256
    """Number of prompts in an optimizer step of the critic."""

    micro_train_batch_size_per_gpu: Annotated[PositiveInt, sets("train_micro_batch_size")] = 1
    """Number of sequences per GPU in a forward and backward pass. Unset, with strategy jax: as many as fill a tile."""

    micro_forward_batch_size_per_gpu: Annotated[PositiveInt, sets("forward_micro_batch_size")] = 1
    """Number of sequences per GPU in a forward-only pass. Unset, with strategy jax: as many as fill a tile."""

    update_ref_every_epoch: bool = False
    """After each epoch, make the current policy the new reference."""

    use_sample_packing: Annotated[bool, sets("train_micro_batch_size", "forward_micro_batch_size")] = True
    """Pack sequences without padding, where that is available."""

    eval_batch_size: PositiveInt = 1024
    """Number of prompts that are evaluated in one batch."""

    eval_before_train: bool = True
    """Also evaluate before the first step, if eval_interval is above 0. Unset: only if there are validation data."""

    eval_interval: int = 5
    """Number of steps between evaluations. 0 or less, or unset without validation data: no evaluations."""

    max_prompt_length: PositiveInt = 512
    """Maximum number of tokens of a prompt. Rows with longer prompts are skipped."""

    flash_attn: Annotated[bool, where_available(JAX, TORCH)] = True
    """Use FlashAttention, where that is available."""

    disable_fast_tokenizer: Annotated[
        bool,
        refused(
            "tokenizers are read from tokenizer.json; a slow tokenizer would need other files, and transformers in "
            "every process; leave it at False",
            JAX,
            TORCH,
        ),
    ] = False
    """Load the slow tokenizer, which is written in Python."""

    project_name: str = "skyrl"
    """Name of the project in the tracker."""

    run_name: str = "test_run"
    """Name of the run in the tracker, and in the default paths of checkpoints and exports."""

    logger: Trackers = "wandb"
    """Trackers that receive metrics: wandb, mlflow, swanlab, tensorboard or console. Local files always have them. The
    console is used if none of the given trackers is usable, or if this field is unset and wandb is not usable."""

    log_interval: PositiveInt = 1
    """Number of steps between two that are printed and logged. Local files and other trackers get every step."""

    dump_data_batch: bool = False
    """Write every training batch and its rollouts to export_path."""

    dump_eval_results: bool = True
    """Write results of evaluations to export_path."""

    rope_scaling: Annotated[dict[str, Any] | None, sets("config_overrides")] = None
    """Scaling of rotary embeddings. None: the model's."""

    rope_theta: Annotated[PositiveFloat | None, sets("config_overrides")] = None
    """Base of rotary embeddings. None: the model's."""

    max_steps: PositiveInt | None = None
    """Number of steps of the run. None: all steps of the epochs. If epochs is unset, the data are repeated as needed.
    If both are set, the run ends at the smaller of the two limits."""

    eval_only: bool = False
    """Evaluate and exit. Evaluates the checkpoint of resume_mode, or the model if there is no checkpoint."""

    init_from: str | None = None
    """Checkpoint with the initial weights of a new run. Only weights are loaded, so data, algorithm, batch sizes and
    optimizer may differ."""

    callbacks: OneOrMore = field(default_factory=list)
    """Callbacks. Each is the module:Class of a subclass of skyrl.train.callbacks.Callback."""

    best_metric: str | None = None
    """Evaluation metric that selects the best checkpoint, such as eval/all/avg_score. The best checkpoint is kept in
    addition to the newest ones. None: evaluations are not compared."""

    best_mode: Annotated[str, one_of("max", "min")] = "max"
    """Best value of best_metric: the highest (max) or the lowest (min)."""

    async_checkpoints: bool = False
    """Write a checkpoint in the background during the next steps. It has the state of the step in its name. The next
    checkpoint waits until it is written."""

    save_model: bool = True
    """Save the policy of a finished run in the folder "model" of export_path: an adapter in PEFT format, or a fully
    trained model in Hugging Face format."""

    save_merged: bool = False
    """Save the whole policy with the adapter merged into it, in Hugging Face format, instead of the adapter."""

    max_dumps_to_keep: Annotated[int, AfterValidator(all_or_some)] = -1
    """Number of newest steps whose batches, rollouts and evaluations are kept in export_path. -1: all."""

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return renamed(renamed(given, "remove_microbatch_padding", "use_sample_packing"), "fsdp2", "torch")

    @property
    def has_critic(self) -> bool:
        """True if there is a critic."""
        return self.critic.model.path is not None

    @property
    def models(self) -> list[str]:
        """Names of this run's models: policy, and critic and ref if the run has them."""
        return ["policy", *["critic"] * self.has_critic, *["ref"] * self.algorithm.uses_reference]

    @property
    def apart(self) -> list[str]:
        """Names of the models (critic, ref) that do not share the policy's ranks."""
        placement = self.placement
        with_policy = {"policy", *["ref"] * placement.colocate_policy_ref}
        return [] if placement.colocate_all else [name for name in self.models if name not in with_policy]

    @property
    def is_distributed(self) -> bool:
        """True if models run on ranks with GPUs, and separate engines sample."""
        return STRATEGIES[self.strategy].is_distributed

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the whole run."""
        whole = self.epochs * steps_per_epoch
        if self.max_steps is None:
            return whole
        return min(self.max_steps, whole) if self.is_given("epochs") else self.max_steps

    def gpus(self, model: str) -> int:
        """Return the number of GPUs of a model (policy, critic or ref). On the CPU, each node counts as 1."""
        placement = self.placement
        return getattr(placement, f"{model}_num_nodes") * max(1, getattr(placement, f"{model}_num_gpus_per_node"))

    @property
    def has_teacher(self) -> bool:
        """True if the reference and the policy have different base models. Requires a resolved configuration."""
        return self.ref.model.path not in (None, self.policy.model.path)

    def model_parallel_size(self, model: str) -> int:
        """Return the number of ranks that work on the same sequences, for a model (policy, critic or ref)."""
        owner = getattr(self, model)
        if self.strategy == "megatron" and model != "critic":  # Megatron supports no critic
            return owner.megatron_config.model_parallel_size
        return owner.sequence_parallel_size

    def derive(self) -> None:
        if not self.is_given("strategy"):
            self.fill_in("strategy", default_strategy())
        if not self.is_given("logger"):
            self.fill_in("logger", *usable_trackers(self.logger))
        if self.fully_async.enabled and not self.is_given(
            "train_batch_size"
        ):  # a step of fully asynchronous training is one mini-batch
            self.fill_in("train_batch_size", self.policy_mini_batch_size)
        if self.ref.model.path is None:
            self.ref.model.path = self.policy.model.path
        if self.ckpt_path == TrainerConfig().ckpt_path:  # otherwise a run could resume from another run's checkpoints
            self.ckpt_path = os.path.join(self.ckpt_path, self.project_name, self.run_name)
        if self.export_path == TrainerConfig().export_path:
            self.export_path = os.path.join(self.export_path, self.project_name, self.run_name)
        for name in ("ckpt_path", "export_path"):
            setattr(self, name, os.path.expanduser(getattr(self, name)))

    def problems(self) -> Iterator[str]:
        yield from trainer_problems(self)
