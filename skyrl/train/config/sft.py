"""Supervised fine-tuning: data, optimizer, evaluation, checkpoints and logging."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from skyrl.train.config.generator import ChatTemplateConfig
from skyrl.train.config.machinery.base import BaseConfig
from skyrl.train.config.machinery.fields import one_of
from skyrl.train.config.models import ModelConfig, OptimizerConfig
from skyrl.train.config.strategies import DEFAULT_STRATEGY, STRATEGIES
from skyrl.train.config.trainer import Trackers, all_or_some

ADAPTER_LR, WHOLE_LR = 1e-4, 1e-5
"""Learning rates by default: with adapters about ten times that of all weights.

Source: https://thinkingmachines.ai/blog/lora."""

TRAIN_ON_WHAT = ("last_assistant_message", "last_assistant_turn", "all_assistant_messages", "all_tokens")


@dataclass
class SFTConfig(BaseConfig):
    """Everything that supervised fine-tuning can be told."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="Qwen/Qwen3-0.6B"))
    """The model that is trained, and its adapters."""

    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimizer. optimizer_config.lr left out: 1e-4 with adapters, 1e-5 for all weights."""

    strategy: Annotated[str, one_of(*STRATEGIES)] = DEFAULT_STRATEGY
    """What computes: jax, which is the one that is served, fsdp2, fsdp or megatron."""

    jax: dict[str, Any] = field(default_factory=dict)
    """Options of the JAX backend."""

    train_datasets: list[str] = field(default_factory=list)
    """What is trained on: conversations, Alpaca rows or tokens in .parquet, .json or .jsonl files, or data sets of the
    Hugging Face hub (name, or name:split)."""

    train_dataset_weights: list[PositiveFloat] | None = None
    """Share of each data set in the rows of an epoch, up to a common factor. None: each row is there once."""

    eval_datasets: list[str] = field(default_factory=list)
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
    """What of a conversation is trained on: last_assistant_message, last_assistant_turn (all since the last user
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
    """Whether to evaluate before the first step."""

    ckpt_path: str = ""
    """Folder for checkpoints."""

    ckpt_interval: NonNegativeInt = 0
    """Steps between checkpoints; there is one after the last step too. 0: none at all."""

    max_ckpts_to_keep: Annotated[int, AfterValidator(all_or_some)] = -1
    """Newest checkpoints that are kept. -1: all."""

    resume_from: str = ""
    """Where training starts: empty anew, latest from the newest checkpoint in ckpt_path (anew if there is none), or the
    path of a checkpoint."""

    hf_save_interval: NonNegativeInt = 0
    """Steps between exports in Hugging Face format; there is one after the last step too. 0: none at all."""

    export_path: str = ""
    """Folder for exports."""

    seed: NonNegativeInt = 42
    """Seed of data order and initialisation."""

    project_name: str = "skyrl_sft"
    """Project in the tracker."""

    run_name: str = "skyrl_sft_run"
    """Run in the tracker."""

    logger: Trackers = "console"
    """Where metrics go beside the local files: one or several of wandb, mlflow, swanlab, tensorboard, console."""

    def steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        return self.num_steps or (self.num_epochs or 1) * steps_per_epoch

    def derive(self) -> None:
        if not self.optimizer_config.is_given("lr"):
            self.optimizer_config.fill_in("lr", ADAPTER_LR if self.model.lora.rank else WHOLE_LR)
        for name in ("ckpt_path", "export_path"):
            setattr(self, name, os.path.expanduser(getattr(self, name)))
        if self.eval_dataset_names is None:
            self.eval_dataset_names = [Path(path).stem for path in self.eval_datasets]

    def problems(self) -> Iterator[str]:
        if not self.model.path:
            yield "model.path=None: there is no model; give a folder or the id of one"
        if not self.train_datasets:
            yield "train_datasets=[]: there is nothing to train on; name a file or a data set"
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
        if not self.eval_datasets and (self.eval_interval or self.eval_before_train):
            option = "eval_before_train=true" if self.eval_before_train else f"eval_interval={self.eval_interval}"
            yield f"{option}: there are no eval_datasets; name a file, or leave it out"
        for interval, folder in (("ckpt_interval", "ckpt_path"), ("hf_save_interval", "export_path")):
            if getattr(self, interval) and not getattr(self, folder):
                yield f"{interval}={getattr(self, interval)}: there is nowhere to write to; set {folder}"
        if self.resume_from and not self.ckpt_path:
            yield f"resume_from={self.resume_from}: there is no folder for this run's own checkpoints; set ckpt_path"
