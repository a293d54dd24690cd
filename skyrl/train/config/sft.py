"""Supervised fine-tuning, and preference optimization: data, optimizer, evaluation, checkpoints and logging."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from skyrl.train.config.generator import ChatTemplateConfig
from skyrl.train.config.machinery.base import BaseConfig
from skyrl.train.config.machinery.fields import OneOrMore, one_of
from skyrl.train.config.models import ModelConfig, OptimizerConfig
from skyrl.train.config.strategies import STRATEGIES, default_strategy
from skyrl.train.config.trainer import Trackers, all_or_some

ADAPTER_LR, WHOLE_LR = 1e-4, 1e-5
"""Learning rates by default: with adapters about ten times that of all weights.

Source: https://thinkingmachines.ai/blog/lora."""

PREFERENCE_ADAPTER_LR, PREFERENCE_WHOLE_LR = 5e-6, 5e-7
"""The same of preference optimization. Source: https://github.com/huggingface/trl/blob/main/trl/scripts/dpo.py."""

LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo")
SMOOTHED = ("sigmoid", "robust")
"""Losses that read label_smoothing."""
TRAIN_ON_WHAT = ("last_assistant_message", "last_assistant_turn", "all_assistant_messages", "all_tokens")


@dataclass
class SFTConfig(BaseConfig):
    """Everything that supervised fine-tuning can be told."""

    _learning_rates = (ADAPTER_LR, WHOLE_LR)

    model: ModelConfig = field(default_factory=lambda: ModelConfig.at("Qwen/Qwen3-0.6B"))
    """The model that is trained, and its adapters."""

    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimizer. optimizer_config.lr left out: 1e-4 with adapters, 1e-5 for all weights."""

    strategy: Annotated[str, one_of(*STRATEGIES)] = "fsdp2"
    """Strategy: jax, fsdp2 (or fsdp, which is the same), or megatron, which is not served. Left out: fsdp2 where
    torch sees a GPU, else jax."""

    jax: dict[str, Any] = field(default_factory=dict)
    """Options of the JAX backend."""

    fsdp2: dict[str, Any] = field(default_factory=dict)
    """Options of the torch backend, with strategy fsdp2."""

    train_datasets: OneOrMore = field(default_factory=list)
    """Data to train on: conversations, Alpaca rows or tokens in .parquet, .json or .jsonl files, or data sets of the
    Hugging Face hub (name, or name:split)."""

    train_dataset_weights: list[PositiveFloat] | None = None
    """Share of each data set in the rows of an epoch, up to a common factor. None: each row is there once."""

    eval_datasets: OneOrMore = field(default_factory=list)
    """Data sets whose loss is measured."""

    eval_dataset_names: list[str] | None = None
    """Names of those in metrics. None: their last parts without the ending of a file."""

    messages_key: str = "messages"
    """Column of conversations."""

    tools_key: str = "tools"
    """Column of tools: a list of JSON schemas, or JSON of one."""

    system_key: str = "system"
    """Column of system messages, which are put in front of conversations."""

    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """The template that turns messages into text."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    train_on_what: Annotated[str, one_of(*TRAIN_ON_WHAT)] = "last_assistant_message"
    """Part of a conversation to train on: last_assistant_message, last_assistant_turn (all since the last user
    message), all_assistant_messages, or all_tokens."""

    max_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a row at most; what is behind is cut off. None: any number."""

    batch_size: PositiveInt = 4
    """Rows of a step."""

    num_epochs: PositiveInt | None = None
    """Passes over the data. None: 1, or as far as num_steps goes."""

    num_steps: PositiveInt | None = None
    """Optimizer steps. None: num_epochs passes."""

    eval_interval: NonNegativeInt = 0
    """Steps between evaluations; there is one after the last step too. 0: only that."""

    eval_before_train: bool = False
    """Evaluate before the first step."""

    ckpt_path: str = ""
    """Folder for checkpoints, or s3://, gs:// or az:// of a bucket."""

    ckpt_interval: NonNegativeInt = 0
    """Steps between checkpoints; there is one after the last step too. 0: none at all."""

    max_ckpts_to_keep: Annotated[int, AfterValidator(all_or_some)] = -1
    """Newest checkpoints that are kept. -1: all."""

    best_metric: str | None = None
    """Metric of evaluations, such as eval/NAME/loss, of whose best there is a checkpoint, which is kept besides the
    newest. None: they are not compared."""

    best_mode: Annotated[str, one_of("max", "min")] = "min"
    """The best value of best_metric: the highest (max) or the lowest."""

    async_checkpoints: bool = False
    """Write checkpoints while the next steps are taken, until there is another one."""

    resume_from: str = "latest"
    """Start of training: latest from the newest checkpoint in ckpt_path (anew if there is none), none (or empty) anew,
    or the path of a checkpoint."""

    hf_save_interval: NonNegativeInt = 0
    """Steps between exports in Hugging Face format, of adapters in PEFT's too; there is one after the last step as
    well. 0: none at all."""

    export_path: str = ""
    """Folder for exports, or s3://, gs:// or az:// of a bucket."""

    save_model: bool = True
    """Leave the model of a finished run in the folder model of export_path, else of ckpt_path, else of run_name: an
    adapter in PEFT's format, or a model of which all weights are trained in Hugging Face format."""

    save_merged: bool = False
    """Leave the whole model with the adapter merged into it, in Hugging Face format, in the place of the adapter."""

    seed: NonNegativeInt = 42
    """Seed of data order and initialisation."""

    project_name: str = "skyrl_sft"
    """Project in the tracker."""

    run_name: str = "skyrl_sft_run"
    """Run in the tracker."""

    logger: Trackers = "console"
    """Trackers of metrics beside the local files: one or several of wandb, mlflow, swanlab, tensorboard, console."""

    eval_only: bool = False
    """Measure the losses of eval_datasets and end: those of the checkpoint that resume_from names, else of init_from,
    else of the model."""

    init_from: str = ""
    """Checkpoint whose weights a new run begins with. Nothing else is taken from it: data, order and optimizer may be
    others."""

    callbacks: OneOrMore = field(default_factory=list)
    """Callbacks, each module:Class of a subclass of skyrl.train.callbacks.Callback."""

    @property
    def example(self) -> str:
        """A command line that trains, with a file of a user's own."""
        return "skyrl train sft model.path=Qwen/Qwen3-0.6B model.lora.rank=32 train_datasets=chat.jsonl"

    @property
    def loss(self) -> str:
        """Name of what is minimized, which a checkpoint and the run that goes on from it share."""
        return "cross_entropy"

    def steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
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
    """Everything that direct preference optimization can be told: that, and its loss."""

    _learning_rates = (PREFERENCE_ADAPTER_LR, PREFERENCE_WHOLE_LR)

    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimizer. optimizer_config.lr left out: 5e-6 with adapters, 5e-7 for all weights."""

    train_datasets: OneOrMore = field(default_factory=list)
    """Data to train on: rows with prompt, chosen and rejected, in .parquet, .json or .jsonl files, or data sets of the
    Hugging Face hub (name, or name:split)."""

    project_name: str = "skyrl_dpo"
    """Project in the tracker."""

    run_name: str = "skyrl_dpo_run"
    """Run in the tracker."""

    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference: the larger, the nearer to it the policy stays. With ipo its tau."""

    loss_type: Annotated[str, one_of(*LOSS_TYPES)] = "sigmoid"
    """Loss of a pair: sigmoid (DPO), robust (DPO without bias where labels are wrong), hinge (SLiC), or ipo (of means
    over tokens)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that chosen and rejected are the wrong way round. Only sigmoid and robust read it."""

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
