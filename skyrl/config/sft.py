"""Supervised fine-tuning, and preference optimization: data, optimizer, evaluation, checkpoints and logging."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from skyrl.config.generator import ChatTemplateConfig
from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import OneOrMore, one_of
from skyrl.config.models import ModelConfig, OptimizerConfig
from skyrl.config.rules.renames import renamed
from skyrl.config.strategies import STRATEGIES, default_strategy
from skyrl.config.trainer import Trackers, all_or_some

ADAPTER_LR, WHOLE_LR = 1e-4, 1e-5
"""Default learning rates: for training adapters, and for training all weights. The first is ten times the second.

Source: https://thinkingmachines.ai/blog/lora."""

PREFERENCE_ADAPTER_LR, PREFERENCE_WHOLE_LR = 5e-6, 5e-7
"""Default learning rates of preference optimization, in the same order.

Source: https://github.com/huggingface/trl/blob/main/trl/scripts/dpo.py.
"""

LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo")
SMOOTHED = ("sigmoid", "robust")
"""Losses that read label_smoothing."""
TRAIN_ON_WHAT = ("last_assistant_message", "last_assistant_turn", "all_assistant_messages", "all_tokens")


@dataclass
class SFTConfig(BaseConfig):
    """Configuration of supervised fine-tuning."""

    _learning_rates = (ADAPTER_LR, WHOLE_LR)

    model: ModelConfig = field(default_factory=lambda: ModelConfig.at("Qwen/Qwen3-0.6B"))
    """The model that is trained, and its adapters."""

    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the model. If optimizer_config.lr is unset, it is 1e-4 with adapters and 1e-5 for all weights."""

    strategy: Annotated[str, one_of(*STRATEGIES)] = "fsdp2"
    """Backend of the run: torch (other names: fsdp2, fsdp), or jax. megatron is not supported yet. Unset: torch if it
    sees a GPU; otherwise jax."""

    jax: dict[str, Any] = field(default_factory=dict)
    """Options of the JAX backend."""

    torch: dict[str, Any] = field(default_factory=dict)
    """Options of the torch backend, with strategy torch. Another name of this section is fsdp2."""

    train_datasets: OneOrMore = field(default_factory=list)
    """Data to train on: .parquet, .json, .jsonl or .csv files, or data sets of the Hugging Face hub (name, or
    name:split). They contain conversations, Alpaca rows or tokens."""

    train_dataset_weights: list[PositiveFloat] | None = None
    """Relative share of each data set in an epoch. None: each row occurs once per epoch."""

    eval_datasets: OneOrMore = field(default_factory=list)
    """Data sets for evaluation."""

    eval_dataset_names: list[str] | None = None
    """Name of each evaluation data set in metrics. None: the last part of its path, without the file suffix."""

    messages_key: str = "messages"
    """Column that contains the conversation."""

    tools_key: str = "tools"
    """Column that contains the tools: a list of JSON schemas, or such a list as JSON text."""

    system_key: str = "system"
    """Column that contains a system message. It is prepended to the conversation."""

    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """The template that turns messages into text."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables that the chat template receives, such as enable_thinking."""

    train_on_what: Annotated[str, one_of(*TRAIN_ON_WHAT)] = "last_assistant_message"
    """Part of a conversation to train on: last_assistant_message, last_assistant_turn (all assistant messages after the
    last user message), all_assistant_messages, or all_tokens."""

    max_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a row. Longer rows are truncated at the end. None: no limit."""

    batch_size: PositiveInt = 4
    """Number of rows in a step."""

    num_epochs: PositiveInt | None = None
    """Number of passes over the data. None: 1, or as many as num_steps requires."""

    num_steps: PositiveInt | None = None
    """Number of optimizer steps. None: num_epochs passes."""

    eval_interval: NonNegativeInt = 0
    """Number of steps between evaluations. The last step is also evaluated. 0: only the last step."""

    eval_before_train: bool = False
    """Evaluate before the first step."""

    ckpt_path: str = ""
    """Folder for checkpoints, or an s3://, gs:// or az:// URL of a bucket."""

    ckpt_interval: NonNegativeInt = 0
    """Number of steps between checkpoints. There is also a checkpoint after the last step. 0: neither."""

    max_ckpts_to_keep: Annotated[int, AfterValidator(all_or_some)] = -1
    """Number of newest checkpoints to keep. -1: all."""

    best_metric: str | None = None
    """Evaluation metric that selects the best checkpoint, such as eval/NAME/loss. The best checkpoint is kept in
    addition to the newest ones. None: evaluations are not compared."""

    best_mode: Annotated[str, one_of("max", "min")] = "min"
    """Best value of best_metric: the highest (max) or the lowest (min)."""

    async_checkpoints: bool = False
    """Write a checkpoint in the background during the next steps. The next checkpoint waits until it is written."""

    resume_from: str = "latest"
    """Checkpoint from which the run starts: a path, or latest for the newest one in ckpt_path (if there is none, a new
    run starts). none or empty: a new run."""

    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts after a loss of the backend, for example because a worker died. A restart continues
    from the newest checkpoint. 0: the run ends. Without ckpt_interval
    and resume_from=latest, the run also ends."""

    hf_save_interval: NonNegativeInt = 0
    """Number of steps between exports in Hugging Face format. An adapter is also exported in PEFT format. There is also
    an export after the last step. 0: no exports."""

    export_path: str = ""
    """Folder for exports, or an s3://, gs:// or az:// URL of a bucket."""

    save_model: bool = True
    """Save the model of a finished run: an adapter in PEFT format, or a fully trained model in Hugging Face format. It
    is saved in the folder "model" of the first of these that is set: export_path, ckpt_path, run_name."""

    save_merged: bool = False
    """Save the whole model with the adapter merged into it, in Hugging Face format, instead of the adapter."""

    seed: NonNegativeInt = 42
    """Seed of data order and initialisation."""

    project_name: str = "skyrl_sft"
    """Name of the project in the tracker."""

    run_name: str = "skyrl_sft_run"
    """Name of the run in the tracker."""

    logger: Trackers = "console"
    """Trackers that receive metrics: wandb, mlflow, swanlab, tensorboard or console. Local files always have them."""

    log_interval: PositiveInt = 1
    """Number of steps between two that are printed and logged. Local files and other trackers get every step."""

    eval_only: bool = False
    """Evaluate on eval_datasets and exit. Evaluates the first of these that exists: the checkpoint of resume_from, the
    checkpoint of init_from, the base model."""

    init_from: str = ""
    """Checkpoint with the initial weights of a new run. Only weights are loaded, so data, order and optimizer may
    differ."""

    callbacks: OneOrMore = field(default_factory=list)
    """Callbacks. Each is the module:Class of a subclass of skyrl.train.callbacks.Callback."""

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return renamed(given, "fsdp2", "torch")

    @property
    def example(self) -> str:
        """Example of a command line that trains on a file of the user."""
        return "skyrl train sft model.path=Qwen/Qwen3-0.6B model.lora.rank=32 train_datasets=chat.jsonl"

    @property
    def restarts(self) -> int:
        """Maximum number of restarts of this run. 0 if the run does not resume from its newest checkpoint."""
        return self.max_restarts if self.ckpt_interval and self.resume_from == "latest" and not self.eval_only else 0

    @property
    def loss(self) -> str:
        """Name of the loss. A run can resume only from a checkpoint of a run with the same loss."""
        return "cross_entropy"

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self.num_steps or (self.num_epochs or 1) * steps_per_epoch

    def derive(self) -> None:
        if not self.is_given("strategy"):
            self.fill_in("strategy", default_strategy())
        if not self.optimizer_config.is_given("lr"):
            adapter, whole = self._learning_rates
            self.optimizer_config.fill_in("lr", adapter if self.model.lora.rank else whole)
        for name in ("ckpt_path", "export_path"):
            setattr(self, name, os.path.expanduser(getattr(self, name)))
        if self.eval_dataset_names is None:
            self.eval_dataset_names = [Path(path).stem for path in self.eval_datasets]

    def problems(self) -> Iterator[str]:
        if not self.model.path:
            yield "model.path=None: there is no model; give a folder or the id of one"
        if not self.train_datasets and not self.eval_only:
            yield f"train_datasets=[]: there is nothing to train on; name a file or a data set, such as: {self.example}"
        weights = self.train_dataset_weights
        if weights is not None and len(weights) != len(self.train_datasets):
            yield (
                f"train_dataset_weights={weights}: there are {len(self.train_datasets)} train_datasets; give a weight "
                "for each"
            )
        names = self.eval_dataset_names or []
        if len(names) != len(self.eval_datasets) or len(set(names)) != len(names):
            yield f"eval_dataset_names={names}: give each of the {len(self.eval_datasets)} eval_datasets its own name"
        if self.num_epochs is not None and self.num_steps is not None:
            yield f"num_epochs={self.num_epochs} and num_steps={self.num_steps} both say how long; leave out one"
        if not self.eval_datasets and (self.eval_interval or self.eval_before_train or self.eval_only):
            option = next((f"{name}=true" for name in ("eval_only", "eval_before_train") if getattr(self, name)), None)
            option = option or f"eval_interval={self.eval_interval}"
            yield f"{option}: there are no eval_datasets; name a file, or leave it out"
        for interval, folder in (("ckpt_interval", "ckpt_path"), ("hf_save_interval", "export_path")):
            if getattr(self, interval) and not getattr(self, folder):
                yield f"{interval}={getattr(self, interval)}: there is nowhere to write to; set {folder}"
        if self.best_metric and not (self.ckpt_path and self.eval_datasets and self.eval_interval):
            yield (
                f"best_metric={self.best_metric}, ckpt_path={self.ckpt_path}, eval_datasets={self.eval_datasets}, "
                f"eval_interval={self.eval_interval}: there is nothing to compare, or nowhere to keep the best; set "
                "all four"
            )
        resumes = self.resume_from == "latest" if self.eval_only else self.resume_from not in ("", "none")
        if resumes and self.is_given("resume_from") and not self.ckpt_path:
            yield f"resume_from={self.resume_from}: there is no folder for this run's own checkpoints; set ckpt_path"


@dataclass
class DPOConfig(SFTConfig):
    """Configuration of direct preference optimization. It extends that of supervised fine-tuning."""

    _learning_rates = (PREFERENCE_ADAPTER_LR, PREFERENCE_WHOLE_LR)

    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the model. If optimizer_config.lr is unset, it is 5e-6 with adapters and 5e-7 for all weights."""

    train_datasets: OneOrMore = field(default_factory=list)
    """Data to train on: .parquet, .json, .jsonl or .csv files, or data sets of the Hugging Face hub (name, or
    name:split). Each row has prompt, chosen and rejected."""

    project_name: str = "skyrl_dpo"
    """Name of the project in the tracker."""

    run_name: str = "skyrl_dpo_run"
    """Name of the run in the tracker."""

    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference. A larger value keeps the policy closer to it. For ipo, this is tau."""

    loss_type: Annotated[str, one_of(*LOSS_TYPES)] = "sigmoid"
    """Loss of a pair: sigmoid (DPO), robust (DPO, unbiased if some labels are wrong), hinge (SLiC), or ipo (uses means
    over tokens)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed probability that the labels chosen and rejected are swapped. Only sigmoid and robust read it."""

    @property
    def example(self) -> str:
        return "skyrl train dpo model.path=Qwen/Qwen3-0.6B model.lora.rank=32 train_datasets=pairs.jsonl"

    @property
    def loss(self) -> str:
        return f"dpo_{self.loss_type}"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            yield (
                f"label_smoothing={self.label_smoothing}: loss_type={self.loss_type} does not read it; use one of "
                f"{', '.join(SMOOTHED)}, or leave it at 0"
            )
        for name in ("train_on_what", "messages_key"):
            if self.is_given(name):
                yield f"{name}={getattr(self, name)}: of preferences the answers are trained on; leave it out"
