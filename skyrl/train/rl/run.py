"""A complete RL run: models, data, the training loop, and outputs.

`skyrl train rl` calls `train_rl`. Checkpoints contain all state of a run, so a killed and resumed run ends with the
same result as an uninterrupted one. The two results are bit-identical if the backend's option `deterministic` is set,
the number of workers is the same, and the source of rollouts is synchronous.
"""

import asyncio
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from skyrl.config import OptimizerConfig, SkyRLTrainConfig, get_config_as_dict
from skyrl.errors import StorageError
from skyrl.train.callbacks import Callback, load_callbacks
from skyrl.train.checkpoints import Checkpoint, CheckpointStore, begin_writing
from skyrl.train.exports import Export
from skyrl.train.lr_schedules import learning_rate_factor
from skyrl.train.places import Where, place_of
from skyrl.train.policies import Learner, Models
from skyrl.train.results import result_in
from skyrl.train.rl.batch import Array, Batch
from skyrl.train.rl.evaluate import eval_rows, evaluate
from skyrl.train.rl.prompts import TrainingPrompts, evaluation_prompts, training_prompts
from skyrl.train.rl.rollout_source import SourceState
from skyrl.train.rl.setup import Setup, check_environments, serve_endpoint, source_of
from skyrl.train.rl.trainer import RLTrainer, SamplingState
from skyrl.train.rl.update import RewardShaping, Update, env_rewards
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.records import as_state
from skyrl.train.rollouts.rollouts import Rollouts
from skyrl.train.run_loop import WAY_ON, Cadence, run_steps
from skyrl.train.strategy.registry import find_strategy
from skyrl.train.strategy.strategy import create_critic, create_policy
from skyrl.train.tracking.clients import RunInfo
from skyrl.train.tracking.dumps import dump_data_batch, dump_eval_results, dump_rollouts, remove_old_dumps
from skyrl.train.tracking.metrics import Metrics, Report
from skyrl.train.tracking.reporting import closing_summary, reporting
from skyrl.train.tracking.tracker import METRICS_FILE
from skyrl.types import LoraConfig
from skyrl.utils.gc_tuning import collecting_seldom

log = logging.getLogger(__name__)

SHOWN = {"reward/avg_raw_reward": "reward", "eval/all/avg_score": "eval"}
"""Metrics that are shown beside the progress bar, with their labels."""

MEMORY = "memory"
"""Folder beside the checkpoints, for snapshots of the device's memory."""

INIT_FROM = "trainer.init_from"

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
"""Folder names of models in checkpoints and exports."""


class Run:
    """A run that is set up. `open_run` creates it.

    Args:
        config: Resolved and validated configuration.
        models: The run's models on a backend.
        trainer: Trainer that runs the steps.
        prompts: Training data.
        evaluation: Prompts for evaluation. Empty if the run has no evaluations.
        rollouts: Sampler of trajectories.
        store: Store of checkpoints.
        callbacks: Callbacks of the run.
    """

    def __init__(
        self,
        config: SkyRLTrainConfig,
        models: Models,
        trainer: RLTrainer,
        prompts: TrainingPrompts,
        evaluation: list[Prompt],
        rollouts: Rollouts,
        store: CheckpointStore,
        callbacks: Sequence[Callback] = (),
        reference: Models | None = None,
    ):
        self.config = config
        self.trainer = trainer
        self._reference_models, self._has_own = reference or models, reference is not None
        self._is_base = False
        """True if the reference is an untrained base model, so it need not be saved."""
        self.prompts = prompts
        self._evaluation = evaluation
        self._rollouts = rollouts
        self._store = store
        settings = config.trainer
        self._result = result_in(settings.export_path, settings.policy.model.lora.rank, settings.save_merged)
        self._begun_at = 0
        """Number of steps that were completed before this process resumed the run."""
        self._callbacks = callbacks

    @property
    def global_step(self) -> int:
        """Number of completed steps."""
        return self.trainer.global_step

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.config.trainer.steps(self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch. Last rows that do not fill a batch are left out."""
        return self.prompts.order.steps_per_epoch

    @property
    def run_id(self) -> str:
        """Id of this run. A run keeps it when it is resumed."""
        return self._store.run_id

    @property
    def can_save(self) -> bool:
        """True while a step is sampling or after its sampling failed. The models are as the last step left them."""
        return self.trainer.is_sampling

    @property
    def way_on(self) -> str:
        """Text for messages that says how to resume from the newest checkpoint."""
        return WAY_ON if self.config.trainer.resume_mode == "latest" else f"with trainer.resume_mode=latest {WAY_ON}"

    async def train(self, report: Report) -> None:
        """Run all remaining steps. `report` receives the step number and the metrics of each step and evaluation."""
        settings = self.config.trainer
        cadence = Cadence(
            evaluation=settings.eval_interval,
            has_evaluation=bool(self._evaluation),
            before_first=settings.eval_before_train,
            export=settings.hf_save_interval,
            checkpoint=settings.ckpt_interval,
            checkpoint_epochs=True,
            beside=settings.async_checkpoints,
        )
        await run_steps(self, cadence, report, self._callbacks)

    async def step(self) -> Metrics:
        """Run one step of the trainer. If dumps are configured, write the step's data."""
        settings = self.config.trainer
        try:
            metrics, batch = await self.trainer.step()
        finally:
            if self.trainer.is_sampling:  # it has failed, or is dropped
                await self.trainer.source.close()
        if settings.dump_data_batch:
            rollouts = [as_state(item) for item in batch.trajectories]
            _kept(dump_rollouts, settings.export_path, self.global_step, rollouts)
            arrays = _arrays(batch) | self.trainer.update.arrays
            _kept(dump_data_batch, settings.export_path, self.global_step, arrays, {"uids": batch.row_uids})
            self._remove_old_dumps()
        return metrics | {"trainer/epoch": self.global_step / self.steps_per_epoch}

    def _remove_old_dumps(self) -> None:
        settings = self.config.trainer
        if settings.max_dumps_to_keep != -1:
            remove_old_dumps(settings.export_path, self.global_step, settings.max_dumps_to_keep)

    async def end_epoch(self) -> None:
        """Replace the reference by the current policy, if `update_ref_every_epoch` is set."""
        if not self.config.trainer.update_ref_every_epoch:
            return
        folder = tempfile.mkdtemp(prefix="skyrl-reference-")
        try:
            await self.trainer.policy.save(f"{folder}/policy")
            reference = self.trainer.update.reference or self._reference_models.learner(REFERENCE)
            await reference.load(f"{folder}/policy")
            self.trainer.update.reference, self._is_base = reference, False
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def evaluate(self) -> Metrics:
        """Evaluate the policy on the evaluation prompts. Returns metrics."""
        settings = self.config.trainer
        metrics, trajectories = await evaluate(self._rollouts, self._evaluation, settings.eval_batch_size)
        if settings.dump_eval_results:
            rows = eval_rows(self._evaluation, trajectories)
            _kept(dump_eval_results, settings.export_path, self.trainer.global_step, rows, metrics)
            self._remove_old_dumps()
        return metrics

    @property
    def has_export(self) -> bool:
        """True if the export of the current step is complete."""
        return self._export.is_complete

    async def export(self) -> None:
        """Write the policy's adapter, if it has one, in PEFT format. Write all models whose adapters can be merged in
        Hugging Face format."""
        await self._export.write()

    @property
    def _export(self) -> Export:
        settings = self.config.trainer
        adapted = [POLICY, REFERENCE] if settings.policy.model.lora.rank else []
        adapted += [CRITIC] if settings.critic.model.lora.rank else []
        return Export(settings.export_path, self.global_step, self._trained(), adapted, POLICY)

    async def leave_model(self) -> None:
        """Write the policy of the finished run, unless `trainer.save_model` is false."""
        if self.config.trainer.save_model:
            await self._result.write(self.trainer.policy, keep_earlier=self._begun_at == 0)

    def improves(self, metrics: Metrics) -> bool:
        """Return True if these metrics of an evaluation are the best so far by `best_metric`."""
        return self._store.judge(self.global_step, metrics)

    async def save(self) -> "asyncio.Task[Where]":
        """Start to write a checkpoint of the current state. Returns a task that ends with its path or URL."""
        trainer, update = self.trainer, self.trainer.update
        sampling = trainer.state()
        source, waiting = sampling.source.as_json()
        state = {
            "source": source,
            "policy_steps": update.policy_steps,
            "critic_steps": update.critic_steps,
            "kl_coefficient": update.kl_controller.value,
            "generators": [update.generator.bit_generator.state, sampling.generator],
        }
        if self.config.trainer.policy.record_memory:
            self._record_memory()
        return begin_writing(
            self._store.saving(trainer.global_step, state, waiting),
            lambda folder: [model.begin_save(str(folder / name)) for name, model in self._trained().items()],
            self._store.title_of(trainer.global_step),
        )

    def _record_memory(self) -> None:
        path = self._store.folder / MEMORY / f"global_step_{self.global_step}.prof"
        try:
            find_strategy(self.config).record_memory(path)
        except OSError as error:  # as a dump
            log.warning("%s cannot be written: %s", path, error)

    async def begin(self, initial: Checkpoint | None) -> None:
        """Create the models. If there is a checkpoint, the policy gets its weights.

        Without a teacher, the KL divergence is then measured from these weights.
        """
        settings, trainer = self.config.trainer, self.trainer
        if initial is None:
            await create_policy(trainer.policy, self.config)
        else:
            await trainer.policy.load(initial.model_path(POLICY), optimizer=False)
            if settings.algorithm.uses_reference and not settings.has_teacher:
                trainer.update.reference = self._reference_models.learner(REFERENCE)
                await trainer.update.reference.load(initial.model_path(POLICY), optimizer=False)
            log.info("beginning with the weights of %s", initial.title)
        if trainer.critic is not None:
            await create_critic(trainer.critic, self.config)

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state that a checkpoint contains."""
        self._begun_at = checkpoint.step
        trainer, update, state = self.trainer, self.trainer.update, checkpoint.state
        for name, model in self._trained().items():
            await model.load(checkpoint.model_path(name))
        if (checkpoint.path / REFERENCE).is_dir():
            update.reference = self._reference_models.learner(REFERENCE)
            await update.reference.load(checkpoint.model_path(REFERENCE))
        source = SourceState.from_json(state["source"], checkpoint.rollouts)
        update.generator.bit_generator.state, generator = state["generators"]
        trainer.restore(SamplingState(source, generator), checkpoint.step)
        update.policy_steps, update.critic_steps = state["policy_steps"], state["critic_steps"]
        update.kl_controller.value = state["kl_coefficient"]

    async def create_reference(self) -> None:
        """If the reference has separate workers and was not loaded, create it with the weights of its base model."""
        if self._has_own and self.trainer.update.reference is None:
            self._is_base, self.trainer.update.reference = True, self._reference_models.learner(REFERENCE)
            await self.trainer.update.reference.create(LoraConfig(rank=1))

    def summary(self) -> str:
        """Return the final message of a finished run. It has the number of steps and the paths of the outputs."""
        before = f", {self._begun_at} of them before this run was resumed" if self._begun_at else ""
        return closing_summary(f"{self.global_step} of {self.total_steps} steps are taken{before}", self.places())

    def places(self) -> dict[str, Where]:
        """Return the paths of the run's outputs, by description."""
        settings = self.config.trainer
        store, exports, best = self._store, place_of(settings.export_path), self._store.best
        return {
            **({self._result.title: self._result.where} if settings.save_model else {}),
            "newest checkpoint": store.place.shown(store.folder_of(self.global_step)),
            **({} if best is None else {"best checkpoint": store.place.shown(store.folder_of(best.step))}),
            "metrics": store.folder / METRICS_FILE,
            "newest export": self._export.where,
            "evaluations": exports.shown(exports.folder / "dumped_evals"),
            "rollouts": exports.shown(exports.folder / "dumped_rollouts"),
            "training batches": exports.shown(exports.folder / "dumped_data"),
        }

    def _trained(self) -> dict[str, Learner]:
        """Return the models that have trained weights, by name. A teacher is not one of them."""
        reference = None if self._is_base else self.trainer.update.reference
        models = {POLICY: self.trainer.policy, CRITIC: self.trainer.critic, REFERENCE: reference}
        return {name: model for name, model in models.items() if model is not None}


async def open_run(config: SkyRLTrainConfig, stack: ExitStack, shape_rewards: RewardShaping = env_rewards) -> Run:
    """Set up models and data, and resume from a checkpoint if configured. `stack` releases the resources.

    Raises ConfigError for invalid settings.
    """
    settings = config.trainer
    setup = Setup.of(config)
    callbacks = load_callbacks(settings.callbacks, "trainer.callbacks")
    prompts, evaluation = training_prompts(config, setup.chat), evaluation_prompts(config, setup.chat)
    await check_environments(config, [*prompts.rows, *evaluation])
    store = setup.store
    checkpoint = store.resume(settings.resume_mode, settings.resume_path)
    if checkpoint is not None:
        log.info("going on from %s", checkpoint.title)
        prompts.order.check(checkpoint.state["source"]["order"])  # before models are loaded
    initial = store.initial(settings.init_from, INIT_FROM) if settings.init_from and checkpoint is None else None
    models = stack.enter_context(setup.load())
    policy = models.policy(POLICY, settings.seed)
    critic_models = models if setup.load_critic is None else stack.enter_context(setup.load_critic())
    critic = critic_models.learner(CRITIC) if settings.has_critic else None
    rollouts = Rollouts(config.generator, config.environment, setup.tokenizer, policy)
    total = settings.steps(prompts.order.steps_per_epoch)
    update = Update(config, policy, critic, _schedule(config, total), shape_rewards)
    reference = None if setup.load_reference is None else stack.enter_context(setup.load_reference())
    trainer = RLTrainer(config, policy, critic, source_of(config, rollouts, prompts, total), update)
    run = Run(config, models, trainer, prompts, evaluation, rollouts, store, callbacks, reference)
    if checkpoint is not None:
        await run.restore(checkpoint)
    else:
        await run.begin(initial)
    await run.create_reference()
    await policy.publish(trainer.global_step)
    serve_endpoint(config, policy, store.folder / "endpoint", stack)
    return run


async def train_rl(
    config: SkyRLTrainConfig,
    report: Report = lambda metrics, step: None,
    shape_rewards: RewardShaping = env_rewards,
) -> Run:
    """Train with a resolved configuration. Returns the run after closing its backend.

    Metrics are written to `metrics.jsonl` in `trainer.ckpt_path`, and passed to the trackers and to `report`.
    `shape_rewards` returns the rewards to train with, computed from a batch with the environment's rewards.
    """
    with ExitStack() as stack:
        run = await open_run(config, stack, shape_rewards)
        settings, step = config.trainer, run.trainer.global_step
        info = RunInfo(
            settings.project_name, settings.run_name, run.run_id, get_config_as_dict(config), settings.log_interval
        )
        record = stack.enter_context(
            reporting(
                settings.ckpt_path,
                settings.logger,
                info,
                total_steps=run.total_steps,
                resumed_step=step or None,
                shown=SHOWN,
            )
        )
        stack.enter_context(collecting_seldom())

        def told(metrics: Metrics, step: int) -> None:
            record(metrics, step)
            report(metrics, step)

        if step >= run.total_steps:
            log.info("all %d steps were taken before; raise %s to go on", run.total_steps, _limit(run))
        try:
            await run.train(told)
        finally:
            await run.trainer.source.close()
    return run


def _limit(run: Run) -> str:
    """Return the names of the settings that determine the number of steps."""
    settings = run.config.trainer
    names = ["trainer.max_steps"] if run.total_steps == settings.max_steps else []
    if settings.max_steps is None or (
        settings.is_given("epochs") and run.total_steps == run.steps_per_epoch * settings.epochs
    ):
        names.append("trainer.epochs")
    return " and ".join(names)


def _kept(dump: Callable[..., Where], *arguments: Any) -> None:
    """Write a dump. If this fails, log it and continue."""
    try:
        dump(*arguments)
    except StorageError as error:
        log.warning("%s", error)


def _arrays(batch: Batch) -> dict[str, Array]:
    tokens = batch.padded([row.token_ids[1:] for row in batch.rows], np.int32)
    arrays = {"target_tokens": tokens, "filled": batch.filled, "mask": batch.mask, "rewards": batch.rewards}
    arrays["first_token"] = np.array([row.token_ids[0] for row in batch.rows], np.int32)
    logprobs = batch.rollout_logprobs
    return arrays if logprobs is None else {**arrays, "rollout_logprobs": logprobs}


def _schedule(config: SkyRLTrainConfig, steps: int) -> Callable[[OptimizerConfig, int], float]:
    """Return the learning rate schedule over all optimizer steps of a run, as `Update` takes it."""
    settings = config.trainer

    def factor(optimizer: OptimizerConfig, step: int) -> float:
        is_policy = optimizer is settings.policy.optimizer_config
        mini = settings.policy_mini_batch_size if is_policy else settings.critic_mini_batch_size
        per_step = math.ceil(settings.train_batch_size / mini) * settings.update_epochs_per_batch
        return learning_rate_factor(optimizer, step, steps * per_step)

    return factor
