"""Training loop on examples or pairs: optimizer steps, with evaluations, checkpoints and exports in between.

Apart from its models, the state of a run is only the number of steps taken. This number determines the next rows and
the learning rate.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl.config.machinery.base import get_config_as_dict
from skyrl.config.sft import SFTConfig
from skyrl.train.callbacks import Callback, load_callbacks
from skyrl.train.checkpoints import CheckpointStore, begin_writing
from skyrl.train.data.epoch_order import SHUFFLE, EpochOrder, check_same_order
from skyrl.train.exports import Export
from skyrl.train.lr_schedules import adam_params, learning_rate_factor
from skyrl.train.places import Where
from skyrl.train.policies import Learner
from skyrl.train.ranking import Ranking
from skyrl.train.results import Result, result_in
from skyrl.train.run_identity import Fields, adapter_settings
from skyrl.train.run_loop import WAY_ON, Cadence, run_steps
from skyrl.train.sft.datasets import Dataset
from skyrl.train.sft.limits import check_lengths, check_token_ids
from skyrl.train.sft.methods import MODEL, Likelihood, Method
from skyrl.train.tracking.metrics import Metrics, Report

ANEW = "train anew with resume_from=none and a ckpt_path of its own"


class DataOrder:
    """Order of a run's rows. Its `state`, saved in checkpoints, identifies the order and the data.

    Computing the state hashes all tokens of the data, so create only one `DataOrder` per run.

    Args:
        config: Resolved configuration.
        train: Data sets to train on.

    Raises ConfigError if a data set would have no rows in an epoch because of its weight.
    """

    def __init__(self, config: SFTConfig, train: Sequence[Dataset[Any]]):
        sizes = [len(dataset.examples) for dataset in train]
        self.epochs = EpochOrder(sizes, config.batch_size, config.seed, config.train_dataset_weights)
        self.state: dict[str, Any] = {
            "batch_size": config.batch_size,
            "seed": config.seed,
            "shuffle of train_datasets": SHUFFLE,
            "rows of train_datasets": self.epochs.sizes,
            "rows of train_datasets in an epoch": self.epochs.counts,
            "contents of train_datasets": _fingerprint(train),
        }

    def check_same(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if `state`, from a checkpoint, belongs to another order or to other data."""
        check_same_order(state, self.state, ANEW)


def _fingerprint(datasets: Sequence[Dataset[Any]]) -> str:
    digest = hashlib.sha256()
    for dataset in datasets:
        for one in (one for example in dataset.examples for one in example.sequences):
            digest.update(np.int64(len(one.token_ids)).tobytes())
            digest.update(one.token_ids.tobytes() + one.mask.tobytes())
    return digest.hexdigest()


logger = logging.getLogger(__name__)

RESUME_MODES = {"": "none", "none": "none", "latest": "latest"}
FIELDS = Fields(ckpt_path="ckpt_path", own_folder="ckpt_path", resume_path="resume_from", anew="resume_from=none")
SUMMED_UP = ("/loss", "rewards/accuracies")
"""Suffixes of the metrics that the summary shows."""


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    steps: int
    """Total number of optimizer steps, including steps before the run was resumed."""
    resumed_from: int
    """Number of optimizer steps before the run was resumed."""
    trained_tokens: int
    """Number of tokens trained on since the run was resumed. A token counts each time it is trained on."""
    metrics: Metrics
    """Metrics of the last step and of its evaluation. Empty if no steps were left."""

    def __str__(self) -> str:
        begun = f" (resumed from {self.resumed_from})" if self.resumed_from else ""
        shown = [f"{name} {value:.4f}" for name, value in self.metrics.items() if name.endswith(SUMMED_UP)]
        return ", ".join([f"{self.steps} steps{begun}", f"{self.trained_tokens} tokens trained on", *shown])


class SFTTrainer:
    """Trains a learner on data sets.

    Args:
        config: Resolved configuration.
        learner: The model to train. For a new run, the caller creates it with the initial weights before `run`.
        train: Training data sets, as `load_datasets` returns them.
        evaluation: Evaluation data sets.
        report: Called after each step with the step's metrics and number. Also called after an evaluation before the
            first step, with the metrics of this evaluation and 0.
        method: Training method. None: the likelihood of examples.
        callbacks: Callbacks of the run. None: those in the configuration.
        order: Order of the training data. None: a new one is created.

    Raises ConfigError for rows that exceed the backend's maximum length, tokens outside the vocabulary, a data set that
    would have no rows in an epoch because of its weight, and a `ckpt_path` in an unsupported kind of bucket.
    """

    def __init__(
        self,
        config: SFTConfig,
        learner: Learner,
        train: Sequence[Dataset[Any]],
        evaluation: Sequence[Dataset[Any]] = (),
        *,
        report: Report = lambda metrics, step: None,
        method: Method | None = None,
        callbacks: Sequence[Callback] | None = None,
        order: DataOrder | None = None,
    ):
        self._config = config
        self._callbacks = callbacks
        self._learner = learner
        self._method = method or Likelihood(learner)
        self._train = train
        self._evaluation = evaluation
        self._checkpoints = checkpoint_store(config) if config.ckpt_path else None
        self._report = report
        info = learner.info()
        check_lengths((*train, *evaluation), config, info.max_context_length)
        check_token_ids((*train, *evaluation), config, info.vocab_size)
        self._data = order or DataOrder(config, train)
        self.order = self._data.epochs
        self.total_steps = config.steps(self.order.steps_per_epoch)
        """Number of optimizer steps of the whole run."""
        self.steps_per_epoch = self.order.steps_per_epoch
        self.global_step = 0
        """Number of optimizer steps taken."""
        self._begun_at = 0
        self._is_ready = False

    @property
    def can_save(self) -> bool:
        """Always False. A step changes the model from its start, so no checkpoint can be saved during a step."""
        return False

    @property
    def way_on(self) -> str:
        """Text for messages that says how to resume from the newest checkpoint."""
        return WAY_ON if self._config.resume_from == "latest" else f"with resume_from=latest {WAY_ON}"

    @property
    def run_id(self) -> str | None:
        """Id of this run. A run keeps it when it is resumed. None if the run has no checkpoints."""
        return None if self._checkpoints is None else self._checkpoints.run_id

    async def run(self) -> Summary:
        """Train to the end. Calls `resume` first if it has not been called.

        Raises the errors of `resume`, StorageError if a checkpoint cannot be written, and Interrupted after a signal.
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
            beside=config.async_checkpoints,
        )
        callbacks = self._callbacks
        if callbacks is None:
            callbacks = load_callbacks(config.callbacks, "callbacks")
        await run_steps(self, cadence, told, callbacks)
        summary = Summary(self.global_step, resumed_from, trained_tokens, last)
        logger.info("%s", summary)
        return summary

    async def step(self) -> Metrics:
        """Take one optimizer step. Returns its metrics."""
        begun = time.monotonic()
        step = self.global_step
        batch = [self._train[dataset].examples[row] for dataset, row in self.order.batch(step)]
        metrics = await self._method.forward_backward(batch)
        optimizer = self._config.optimizer_config
        adam = adam_params(optimizer, learning_rate_factor(optimizer, step, self.total_steps))
        stepped = await self._learner.optim_step(adam)
        self.global_step += 1
        return {
            "trainer/global_step": float(self.global_step),
            "trainer/epoch": self.global_step / self.steps_per_epoch,
            **metrics,
            "policy/lr": adam.learning_rate,
            "policy/grad_norm": stepped["skyrl.ai/grad_norm"],
            "data/tokens": float(sum(len(one.token_ids) for example in batch for one in example.sequences)),
            "data/trained_tokens": float(sum(example.trained_tokens for example in batch)),
            "timing/step": time.monotonic() - begun,
        }

    async def evaluate(self) -> Metrics:
        """Evaluate the model on each evaluation data set with the training method."""
        return await self._method.evaluate(self._evaluation, self._config.batch_size)

    async def end_epoch(self) -> None:
        """Do nothing, because the reference model does not change between epochs."""

    @property
    def has_export(self) -> bool:
        """True if the export of the current step is complete."""
        return self._export.is_complete

    async def export(self) -> None:
        """Write the adapter, if any, in PEFT format. Write the model in Hugging Face format if it can be merged."""
        await self._export.write()

    @property
    def _export(self) -> Export:
        adapted = [MODEL] if self._config.model.lora.rank else []
        return Export(self._config.export_path, self.global_step, {MODEL: self._learner}, adapted, MODEL)

    async def leave_model(self) -> None:
        """Write the final model, unless `save_model` is false."""
        if self._config.save_model:
            await result_of(self._config).write(self._learner, keep_earlier=self._begun_at == 0)

    def improves(self, metrics: Metrics) -> bool:
        """Return True if these metrics of an evaluation are the best so far by `best_metric`."""
        return self._checkpoints is not None and self._checkpoints.judge(self.global_step, metrics)

    async def save(self) -> "asyncio.Task[Where] | None":
        """Start to write a checkpoint. Returns the task that writes it, or None if the run has no checkpoints."""
        if self._checkpoints is None:
            return None
        return begin_writing(
            self._checkpoints.saving(self.global_step, self._data.state),
            lambda folder: [self._learner.begin_save(str(folder / MODEL)), *self._method.begin_save(folder)],
            self._checkpoints.title_of(self.global_step),
        )

    def places(self) -> dict[str, Where]:
        """Return the paths of the run's outputs, by description."""
        config, places, store = self._config, dict[str, Where](), self._checkpoints
        if config.save_model:
            result = result_of(config)
            places[result.title] = result.where
        if store is not None:
            places["newest checkpoint"] = store.place.shown(store.folder_of(self.global_step))
            if (best := store.best) is not None:
                places["best checkpoint"] = store.place.shown(store.folder_of(best.step))
        if config.export_path:
            places["newest export"] = self._export.where
        return places

    async def resume(self) -> int | None:
        """Restore the run from the checkpoint that `resume_from` selects. Returns its step, or None for a new run.

        Raises ConfigError if the checkpoint has another model, other data or another order of the data, or if another
        run is using `ckpt_path`. Raises StorageError if the checkpoint is missing or damaged.
        """
        self._is_ready = True
        wanted = self._config.resume_from
        if self._checkpoints is None:
            return None
        found = self._checkpoints.resume(*resume_mode(wanted))
        if found is None:
            return None
        self._data.check_same(found.state)
        await self._learner.load(found.model_path(MODEL))
        await self._method.restore(found)
        self.global_step = found.step
        self._begun_at = found.step
        return found.step


def checked_order(config: SFTConfig, train: Sequence[Dataset[Any]]) -> DataOrder:
    """Return the order of a run's data. If there is a checkpoint to resume from, check the order against it.

    Raises the errors of `SFTTrainer.resume`, so that they occur before a model is loaded.
    """
    order = DataOrder(config, train)
    if config.ckpt_path and (found := checkpoint_store(config).find(*resume_mode(config.resume_from))) is not None:
        logger.info("going on from %s", found.title)
        order.check_same(found.state)
    return order


def resume_mode(resume_from: str) -> tuple[str, str]:
    """Return the mode and path with which `CheckpointStore.find` finds the checkpoint to resume from."""
    return RESUME_MODES.get(resume_from, "from_path"), resume_from


def result_of(config: SFTConfig) -> Result:
    """Return the destination of the final model."""
    folder = config.export_path or config.ckpt_path or config.run_name
    return result_in(folder, config.model.lora.rank, config.save_merged)


def checkpoint_store(config: SFTConfig) -> CheckpointStore:
    """Return the checkpoint store of a run. Its folder is `ckpt_path`."""
    model = config.model
    identity = {
        "loss": config.loss,
        "model.path": model.path,
        "model.lora.rank": model.lora.rank,
        "model.lora.alpha": model.lora.alpha,
        **{f"model.lora.{name}": value for name, value in adapter_settings(model.lora).items()},
    }
    return CheckpointStore(
        config.ckpt_path,
        identity=identity,
        max_to_keep=config.max_ckpts_to_keep,
        ranking=Ranking.of("best_metric", config.best_metric, config.best_mode),
        fields=FIELDS,
        settings=get_config_as_dict(config),
    )
