"""Training by examples: one optimizer step after another; evaluation, checkpoints and exports in between.

What a run is made of beside the learner is one number, its steps: order of the data and learning rate follow from it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl.train.callbacks import Callback, load_callbacks
from skyrl.train.checkpoints import CheckpointStore, begin_writing
from skyrl.train.config.machinery.base import get_config_as_dict
from skyrl.train.config.sft import SFTConfig
from skyrl.train.interruption import Interruption
from skyrl.train.lr_schedules import adam_params, learning_rate_factor
from skyrl.train.places import Where, place_of
from skyrl.train.policies import Learner
from skyrl.train.ranking import Ranking
from skyrl.train.results import Result, result_in
from skyrl.train.run_identity import Fields, adapter_settings
from skyrl.train.run_loop import WAY_ON, Cadence, run_steps
from skyrl.train.sft.data_order import DataOrder
from skyrl.train.sft.datasets import Dataset
from skyrl.train.sft.limits import check_lengths, check_token_ids
from skyrl.train.sft.methods import MODEL, Likelihood, Method
from skyrl.train.tracking.metrics import Metrics, Report

logger = logging.getLogger(__name__)

RESUME_MODES = {"": "none", "none": "none", "latest": "latest"}
FIELDS = Fields(ckpt_path="ckpt_path", own_folder="ckpt_path", resume_path="resume_from", anew="resume_from=none")
ADAPTER = "policy_adapter"
"""The folder of its adapter in an export."""
SUMMED_UP = ("/loss", "rewards/accuracies")
"""Ends of the names of metrics in the summary."""


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
    """Metrics of the last step, with the losses of the last evaluation; empty if there was nothing left to do."""

    def __str__(self) -> str:
        begun = f" (resumed from {self.resumed_from})" if self.resumed_from else ""
        shown = [f"{name} {value:.4f}" for name, value in self.metrics.items() if name.endswith(SUMMED_UP)]
        return ", ".join([f"{self.steps} steps{begun}", f"{self.trained_tokens} tokens trained on", *shown])


class SFTTrainer:
    """Trains a learner on data sets.

    Args:
        config: Resolved.
        learner: What is trained; it exists, with the weights that a new run begins with.
        train: Data sets that are trained on, as `load_datasets` gives them.
        evaluation: Data sets whose loss is measured.
        report: Gets the metrics of each step with its number, and of the evaluation before the first.
        method: How it is trained. None: by the likelihood of examples.
        callbacks: That are told of its steps. None: those that the configuration names.
        order: Of the training data, if it was made before.

    Raises ConfigError for rows that are longer than the backend takes or have tokens that the model does not know,
    weights that leave a data set no row in an epoch, and a `ckpt_path` in no bucket that is served.
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
        """Optimizer steps of the whole run."""
        self.steps_per_epoch = self.order.steps_per_epoch
        self.global_step = 0
        """Optimizer steps taken."""
        self._begun_at = 0
        self._is_ready = False

    @property
    def can_save(self) -> bool:
        """False in a step: it changes the model from its beginning."""
        return False

    @property
    def way_on(self) -> str:
        """Way to resume from the newest checkpoint, in words."""
        return WAY_ON if self._config.resume_from == "latest" else f"with resume_from=latest {WAY_ON}"

    @property
    def run_id(self) -> str | None:
        """Id of this run, also when it is resumed; None if it has no checkpoints."""
        return None if self._checkpoints is None else self._checkpoints.run_id

    async def run(self, interruption: Interruption | None = None) -> Summary:
        """Train to the end, after `resume` if that was not called before.

        Raises as `resume` does, StorageError if a checkpoint cannot be written, and Interrupted.
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
        await run_steps(self, cadence, told, callbacks, interruption)
        summary = Summary(self.global_step, resumed_from, trained_tokens, last)
        logger.info("%s", summary)
        return summary

    async def step(self) -> Metrics:
        """One optimizer step, and its metrics."""
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
        """Measure the model on each evaluation data set, as its method does."""
        return await self._method.evaluate(self._evaluation, self._config.batch_size)

    async def end_epoch(self) -> None:
        """Do nothing: the reference model does not change between epochs."""

    async def export(self) -> None:
        """Write the model in Hugging Face format, and its adapter in PEFT's if it has one."""
        place = place_of(self._config.export_path)
        folder = place.folder / f"global_step_{self.global_step}"
        await self._learner.export(str(folder / MODEL))
        if self._config.model.lora.rank:
            await self._learner.export_adapter(str(folder / ADAPTER))
        await asyncio.to_thread(place.send, folder)

    async def leave_model(self) -> None:
        """Write the model of the finished run, unless `save_model` is false."""
        if self._config.save_model:
            await result_of(self._config).write(self._learner, keep_earlier=self._begun_at == 0)

    def improves(self, metrics: Metrics) -> bool:
        """Return True if those of an evaluation are the best so far by `best_metric`."""
        return self._checkpoints is not None and self._checkpoints.judge(self.global_step, metrics)

    async def save(self) -> "asyncio.Task[Where] | None":
        """Begin to write a checkpoint, where there is a folder for them. Returns what ends with its own."""
        if self._checkpoints is None:
            return None
        return begin_writing(
            self._checkpoints.saving(self.global_step, self._data.state),
            lambda folder: [self._learner.begin_save(str(folder / MODEL)), *self._method.begin_save(folder)],
            self._checkpoints.title_of(self.global_step),
        )

    def places(self) -> dict[str, Where]:
        """Folders and files that a run leaves, by what is there."""
        config, places, store = self._config, dict[str, Where](), self._checkpoints
        if config.save_model:
            result = result_of(config)
            places[result.title] = result.where
        if store is not None:
            places["newest checkpoint"] = store.place.shown(store.folder_of(self.global_step))
            if (best := store.best) is not None:
                places["best checkpoint"] = store.place.shown(store.folder_of(best.step))
        if config.export_path:
            exports = place_of(config.export_path)
            places["newest export"] = exports.shown(exports.folder / f"global_step_{self.global_step}")
        return places

    async def resume(self) -> int | None:
        """Be where the run was at the checkpoint that `resume_from` names. Returns its step; None to begin anew.

        Raises ConfigError if the checkpoint is of another model, of other data, or of another order of them, or another
        run is using `ckpt_path`, and StorageError if the checkpoint is missing or damaged.
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
    """Return the order of a run's data, checked against the checkpoint that it resumes from, if there is one.

    Raises as `SFTTrainer.resume`, before a model is loaded.
    """
    order = DataOrder(config, train)
    if config.ckpt_path and (found := checkpoint_store(config).find(*resume_mode(config.resume_from))) is not None:
        order.check_same(found.state)
    return order


def resume_mode(resume_from: str) -> tuple[str, str]:
    """Mode and path that a checkpoint is found by."""
    return RESUME_MODES.get(resume_from, "from_path"), resume_from


def result_of(config: SFTConfig) -> Result:
    """The model that a finished run leaves."""
    folder = config.export_path or config.ckpt_path or config.run_name
    return result_in(folder, config.model.lora.rank, config.save_merged)


def checkpoint_store(config: SFTConfig) -> CheckpointStore:
    """Checkpoints of a run, in its `ckpt_path`."""
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
