"""Supervised fine-tuning: one optimizer step after another; evaluation, checkpoints and exports in between.

What a run is made of beside the learner is one number, its steps: order of the data and learning rate follow from it.
"""

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl.errors import ConfigError
from skyrl.train.checkpoints import CheckpointStore, Fields
from skyrl.train.config.sft import SFTConfig
from skyrl.train.data.epoch_order import SHUFFLE, EpochOrder, check_same_order
from skyrl.train.lr_schedules import adam_params, learning_rate_factor
from skyrl.train.policies import Learner
from skyrl.train.run_loop import Cadence, run_steps
from skyrl.train.sft.batches import scoring_data, training_data
from skyrl.train.sft.datasets import Dataset
from skyrl.train.tracking.metrics import Metrics, Report

logger = logging.getLogger(__name__)

LOSS = "cross_entropy"
RESUME_MODES = {"": "none", "latest": "latest"}
FIELDS = Fields(ckpt_path="ckpt_path", own_folder="ckpt_path", resume_path="resume_from", anew="resume_from=''")
MODEL = "policy"
"""The learner's folder in a checkpoint and in an export."""


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    steps: int
    """Optimizer steps taken, those before it was resumed too."""
    resumed_from: int
    """Optimizer steps that were taken before it was resumed."""
    trained_tokens: int
    """Tokens that were trained on since then, counted each time."""
    metrics: Metrics
    """Of the last step, with the losses of the last evaluation; empty if there was nothing left to do."""

    def __str__(self) -> str:
        begun = f" (resumed from {self.resumed_from})" if self.resumed_from else ""
        losses = [f"{name} {value:.4f}" for name, value in self.metrics.items() if name.endswith("/loss")]
        return ", ".join([f"{self.steps} steps{begun}", f"{self.trained_tokens} tokens trained on", *losses])


class SFTTrainer:
    """Trains a learner on data sets.

    Args:
        config: Resolved.
        learner: What is trained; it exists, with the weights that a new run begins with.
        train: Data sets that are trained on, as `load_datasets` gives them.
        evaluation: Data sets whose loss is measured.
        report: Gets the metrics of each step with its number, and of the evaluation before the first.

    Raises ConfigError for rows that are longer than the backend takes or have tokens that the model does not know,
    weights that leave a data set no row in an epoch, and a `ckpt_path` that is on no disk.
    """

    def __init__(
        self,
        config: SFTConfig,
        learner: Learner,
        train: Sequence[Dataset],
        evaluation: Sequence[Dataset] = (),
        *,
        report: Report = lambda metrics, step: None,
    ):
        self._config = config
        self._learner = learner
        self._train = train
        self._evaluation = evaluation
        self._checkpoints = _store(config) if config.ckpt_path else None
        self._report = report
        info = learner.info()
        self._check_lengths(info.max_context_length)
        self._check_token_ids(info.vocab_size)
        sizes = [len(dataset.examples) for dataset in train]
        self.order = EpochOrder(sizes, config.batch_size, config.seed, config.train_dataset_weights)
        self._state: dict[str, Any] = {
            "batch_size": config.batch_size,
            "seed": config.seed,
            "shuffle of train_datasets": SHUFFLE,
            "rows of train_datasets": self.order.sizes,
            "rows of train_datasets in an epoch": self.order.counts,
            "contents of train_datasets": _fingerprint(train),
        }
        self.total_steps = config.steps(self.order.steps_per_epoch)
        """Optimizer steps of the whole run."""
        self.steps_per_epoch = self.order.steps_per_epoch
        self.global_step = 0
        """Optimizer steps taken."""
        self._is_ready = False

    @property
    def run_id(self) -> str | None:
        """Of this run, also when it is resumed; None if it has no checkpoints."""
        return None if self._checkpoints is None else self._checkpoints.run_id

    async def run(self) -> Summary:
        """Train to the end, after `resume` if that was not called before.

        Raises as `resume` does, and StorageError if a checkpoint cannot be written.
        """
        if not self._is_ready:
            await self.resume()
        config, resumed_from, trained_tokens = self._config, self.global_step, 0
        last: Metrics = {}

        def told(metrics: Metrics, step: int) -> None:
            nonlocal last, trained_tokens
            if step:
                last = metrics
                trained_tokens += int(metrics["data/trained_tokens"])
            self._report(metrics, step)

        cadence = Cadence(
            evaluation=config.eval_interval,
            has_evaluation=bool(self._evaluation),
            before_first=config.eval_before_train,
            export=config.hf_save_interval,
            checkpoint=config.ckpt_interval,
        )
        await run_steps(self, cadence, told)
        summary = Summary(self.global_step, resumed_from, trained_tokens, last)
        logger.info("%s", summary)
        return summary

    async def step(self) -> Metrics:
        """One optimizer step, and its metrics: the loss is the mean over the batch's trained tokens, in nats."""
        begun = time.monotonic()
        step = self.global_step
        batch = [self._train[dataset].examples[row] for dataset, row in self.order.batch(step)]
        output = await self._learner.forward_backward(training_data(batch), LOSS)
        optimizer = self._config.optimizer_config
        adam = adam_params(optimizer, learning_rate_factor(optimizer, step, self.total_steps))
        stepped = await self._learner.optim_step(adam)
        self.global_step += 1
        return {
            "trainer/global_step": float(self.global_step),
            "trainer/epoch": self.global_step / self.steps_per_epoch,
            "policy/loss": output.metrics["loss:sum"],
            "policy/lr": adam.learning_rate,
            "policy/grad_norm": stepped["skyrl.ai/grad_norm"],
            "data/tokens": float(sum(len(example.token_ids) for example in batch)),
            "data/trained_tokens": float(sum(example.trained_tokens for example in batch)),
            "timing/step": time.monotonic() - begun,
        }

    async def evaluate(self) -> Metrics:
        """`eval/{name}/loss` of each evaluation data set: the mean over all its trained tokens, in nats."""
        metrics: Metrics = {}
        for dataset in self._evaluation:
            total, size = 0.0, self._config.batch_size
            for start in range(0, len(dataset.examples), size):
                data = scoring_data(dataset.examples[start : start + size])
                total += (await self._learner.forward(data, LOSS)).metrics["loss:sum"]
            metrics[f"eval/{dataset.name}/loss"] = total / sum(one.trained_tokens for one in dataset.examples)
        return metrics

    async def end_epoch(self) -> None:
        """Nothing: a model that is fine-tuned has no reference."""

    async def export(self) -> None:
        """Write the model in Hugging Face format."""
        folder = os.path.join(self._config.export_path, f"global_step_{self.global_step}", MODEL)
        await self._learner.export(folder)

    async def save(self) -> None:
        """Write a checkpoint, where there is a folder for them."""
        if self._checkpoints is not None:
            with self._checkpoints.saving(self.global_step, self._state) as folder:
                await self._learner.save(str(folder / MODEL))

    async def resume(self) -> int | None:
        """Be where the run was at the checkpoint that `resume_from` names. Returns its step; None to begin anew.

        Raises ConfigError if the checkpoint is of another model, of other data, or of another order of them, or another
        run is using `ckpt_path`, and StorageError if the checkpoint is missing or damaged.
        """
        self._is_ready = True
        wanted = self._config.resume_from
        if self._checkpoints is None:
            return None
        found = self._checkpoints.resume(RESUME_MODES.get(wanted, "from_path"), wanted)
        if found is None:
            return None
        check_same_order(found.state, self._state, "leave out resume_from")
        await self._learner.load(found.model_path(MODEL))
        self.global_step = found.step
        return found.step

    def _check_lengths(self, limit: int) -> None:
        """Raises ConfigError for a row that has more than `limit` tokens to predict from."""
        for dataset in (*self._train, *self._evaluation):
            longest = max(len(example.token_ids) for example in dataset.examples)
            if longest - 1 > limit:
                raise ConfigError(
                    f"max_length={self._config.max_length}: a row of {dataset.name} has {longest} tokens, and the "
                    f"backend takes {limit + 1}; set max_length={limit + 1}, or raise "
                    f"{self._config.strategy}.max_context_length as far as the model goes"
                )

    def _check_token_ids(self, vocab_size: int) -> None:
        """Raises ConfigError for a row with a token that is not in the model's vocabulary."""
        for dataset in (*self._train, *self._evaluation):
            for number, example in enumerate(dataset.examples):
                unknown = example.token_ids[(example.token_ids < 0) | (example.token_ids >= vocab_size)]
                if unknown.size:
                    raise ConfigError(
                        f"{dataset.name}, row {dataset.row(number)}: token id {unknown[0]} is outside the vocabulary "
                        f"[0, {vocab_size}) of model.path={self._config.model.path}; use the tokenizer of this model"
                    )


def _store(config: SFTConfig) -> CheckpointStore:
    model = config.model
    identity = {
        "loss": LOSS,
        "model.path": model.path,
        "model.lora.rank": model.lora.rank,
        "model.lora.alpha": model.lora.alpha,
    }
    return CheckpointStore(config.ckpt_path, identity=identity, max_to_keep=config.max_ckpts_to_keep, fields=FIELDS)


def _fingerprint(datasets: Sequence[Dataset]) -> str:
    digest = hashlib.sha256()
    for dataset in datasets:
        for example in dataset.examples:
            digest.update(np.int64(len(example.token_ids)).tobytes())
            digest.update(example.token_ids.tobytes() + example.mask.tobytes())
    return digest.hexdigest()
