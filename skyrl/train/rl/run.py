"""A whole RL run: models, data, the loop around steps, and what it leaves behind.

`skyrl train rl` calls `train_rl`. Everything that decides how a run goes on is in its checkpoints, so that one that is
killed and resumed ends as if it had not been (bit for bit with `trainer.jax.deterministic` and a synchronous source).
"""

import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np

from skyrl.envs import check_settings, env_class
from skyrl.errors import StorageError
from skyrl.train.checkpoints import Checkpoint, CheckpointStore, identity_of
from skyrl.train.config import OptimizerConfig, SkyRLTrainConfig, get_config_as_dict
from skyrl.train.lr_schedules import learning_rate_factor
from skyrl.train.policies import Learner, Models
from skyrl.train.rl.batch import Array, Batch
from skyrl.train.rl.evaluate import evaluate
from skyrl.train.rl.prompts import TrainingPrompts, evaluation_prompts, training_prompts
from skyrl.train.rl.rollout_source import Source, SourceState, StalenessPolicy
from skyrl.train.rl.trainer import RLTrainer
from skyrl.train.rl.update import RewardShaping, Update, env_rewards
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.records import as_record
from skyrl.train.rollouts.rollouts import Rollouts, chat_of
from skyrl.train.rollouts.trajectory import Trajectory
from skyrl.train.run_loop import Cadence, run_steps
from skyrl.train.strategy.base_model import check_base_model, fit_context, load_tokenizer
from skyrl.train.strategy.registry import find_strategy
from skyrl.train.strategy.strategy import critic_adapter, policy_adapter
from skyrl.train.strategy.validate import validate
from skyrl.train.tracking.clients import RunInfo
from skyrl.train.tracking.dumps import EvalRow, dump_data_batch, dump_eval_results, dump_rollouts
from skyrl.train.tracking.metrics import Metrics, Report
from skyrl.train.tracking.reporting import reporting
from skyrl.utils.gc_tuning import collecting_seldom

log = logging.getLogger(__name__)

SHOWN = {"reward/avg_raw_reward": "reward", "eval/all/avg_score": "eval"}
"""Metrics beside the progress bar."""

BASE_MODEL = "trainer.policy.model.path"

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"


class Run:
    """A run that is set up. `open` makes one; close it with the stack that it was made in.

    Args:
        config: Resolved and validated.
        models: Where its models are.
        trainer: What takes steps.
        prompts: Training data.
        evaluation: Prompts that are evaluated on; none where there is no evaluation.
        rollouts: What samples them.
        store: Of checkpoints.
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
    ):
        self.config = config
        self.trainer = trainer
        self._models = models
        self.prompts = prompts
        self._evaluation = evaluation
        self._rollouts = rollouts
        self._store = store

    @property
    def global_step(self) -> int:
        """Steps taken."""
        return self.trainer.global_step

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return self.steps_per_epoch * self.config.trainer.epochs

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, whose last rows are left out where they fill no batch."""
        return self.prompts.order.steps_per_epoch

    @property
    def run_id(self) -> str:
        """Of this run, also when it is resumed."""
        return self._store.run_id

    async def train(self, report: Report) -> None:
        """Take all steps that are left. `report` gets the metrics of each, and of evaluations, with its number."""
        settings = self.config.trainer
        cadence = Cadence(
            evaluation=settings.eval_interval,
            has_evaluation=bool(self._evaluation),
            before_first=settings.eval_before_train,
            export=settings.hf_save_interval,
            checkpoint=settings.ckpt_interval,
            checkpoint_epochs=True,
        )
        await run_steps(self, cadence, report)

    async def step(self) -> Metrics:
        """One step of the trainer, and dumps of what it trained on if they are asked for."""
        settings = self.config.trainer
        metrics, batch = await self.trainer.step()
        if settings.dump_data_batch:
            rollouts = [as_record(item) for item in batch.trajectories]
            _kept(dump_rollouts, settings.export_path, self.global_step, rollouts)
            _kept(dump_data_batch, settings.export_path, self.global_step, _arrays(batch), {"uids": batch.row_uids})
        return metrics | {"trainer/epoch": self.global_step / self.steps_per_epoch}

    async def end_epoch(self) -> None:
        """Renew the reference if that is asked for: it becomes the policy as it is now."""
        if not self.config.trainer.update_ref_every_epoch:
            return
        folder = tempfile.mkdtemp(prefix="skyrl-reference-")
        try:
            await self.trainer.policy.save(f"{folder}/policy")
            reference = self.trainer.update.reference or self._models.learner(REFERENCE)
            await reference.load(f"{folder}/policy")
            self.trainer.update.reference = reference
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def evaluate(self) -> Metrics:
        """Metrics of the policy on the evaluation prompts."""
        settings = self.config.trainer
        metrics, trajectories = await evaluate(self._rollouts, self._evaluation, settings.eval_batch_size)
        if settings.dump_eval_results:
            prompts = {prompt.instance_id: prompt for prompt in self._evaluation}
            rows = [_eval_row(item, prompts[item.id.instance_id]) for item in trajectories if item.failure is None]
            _kept(dump_eval_results, settings.export_path, self.trainer.global_step, rows, metrics)
        return metrics

    async def export(self) -> None:
        """Write the models in Hugging Face format."""
        folder = Path(self.config.trainer.export_path) / f"global_step_{self.trainer.global_step}"
        for name, model in self._trained().items():
            await model.export(str(folder / name))

    async def save(self) -> None:
        """Write a checkpoint."""
        trainer, update = self.trainer, self.trainer.update
        source, waiting = trainer.source.state().as_json()
        state = {
            "source": source,
            "policy_steps": update.policy_steps,
            "critic_steps": update.critic_steps,
            "kl_coefficient": update.kl_controller.value,
            "generators": [update.generator.bit_generator.state, trainer.generator.bit_generator.state],
        }
        with self._store.saving(trainer.global_step, state, waiting) as folder:
            for name, model in self._trained().items():
                await model.save(str(folder / name))

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Be what the checkpoint's run was."""
        trainer, update, state = self.trainer, self.trainer.update, checkpoint.state
        for name, model in self._trained().items():
            await model.load(checkpoint.model_path(name))
        if (checkpoint.path / REFERENCE).is_dir():
            update.reference = self._models.learner(REFERENCE)
            await update.reference.load(checkpoint.model_path(REFERENCE))
        trainer.source.restore(SourceState.from_json(state["source"], checkpoint.rollouts), checkpoint.step)
        update.policy_steps, update.critic_steps = state["policy_steps"], state["critic_steps"]
        update.kl_controller.value = state["kl_coefficient"]
        for generator, saved in zip((update.generator, trainer.generator), state["generators"], strict=True):
            generator.bit_generator.state = saved
        trainer.global_step = checkpoint.step

    def _trained(self) -> dict[str, Learner]:
        models = {POLICY: self.trainer.policy, CRITIC: self.trainer.critic, REFERENCE: self.trainer.update.reference}
        return {name: model for name, model in models.items() if model is not None}


async def open_run(config: SkyRLTrainConfig, stack: ExitStack, shape_rewards: RewardShaping = env_rewards) -> Run:
    """Set up models and data, from a checkpoint if the configuration says so. `stack` frees what it takes.

    Raises ConfigError for what cannot be run.
    """
    validate(config)
    settings = config.trainer
    assert settings.policy.model.path is not None  # or the configuration would not have resolved
    env_class(config.environment.env_class)
    fit_context(config, check_base_model(settings.policy.model.path, BASE_MODEL))
    load = find_strategy(config).rl_loader(config)
    tokenizer = load_tokenizer(settings.policy.model.path, BASE_MODEL)
    chat = chat_of(config.generator, tokenizer)
    prompts, evaluation = training_prompts(config, chat), evaluation_prompts(config, chat)
    check_settings(config.environment.skyrl_gym, (*prompts.env_classes, *(each.env_class for each in evaluation)))
    store = CheckpointStore(settings.ckpt_path, identity=identity_of(config), max_to_keep=settings.max_ckpts_to_keep)
    checkpoint = store.resume(settings.resume_mode, settings.resume_path)
    models = stack.enter_context(load())
    policy = models.policy(POLICY, settings.seed)
    critic = models.learner(CRITIC) if settings.has_critic else None
    rollouts = Rollouts(config.generator, config.environment, tokenizer, policy)
    total = prompts.order.steps_per_epoch * settings.epochs
    update = Update(config, policy, critic, _schedule(config, total), shape_rewards)
    trainer = RLTrainer(config, policy, critic, _source(config, rollouts, prompts), update)
    run = Run(config, models, trainer, prompts, evaluation, rollouts, store)
    if checkpoint is not None:
        await run.restore(checkpoint)
        log.info("going on from %s", checkpoint.path)
    else:
        await policy.create(policy_adapter(config))
        if critic is not None:
            await critic.create(critic_adapter(config), value_head=True)
    await policy.publish(trainer.global_step)
    return run


async def train_rl(
    config: SkyRLTrainConfig,
    report: Report = lambda metrics, step: None,
    shape_rewards: RewardShaping = env_rewards,
) -> Run:
    """Train as a resolved configuration says. Returns the run, whose backend is closed.

    Metrics go to `metrics.jsonl` in the run's checkpoints and to its trackers, and to `report`. `shape_rewards` makes
    the rewards to train with of those that the environment gave.
    """
    with ExitStack() as stack:
        run = await open_run(config, stack, shape_rewards)
        settings, step = config.trainer, run.trainer.global_step
        info = RunInfo(settings.project_name, settings.run_name, run.run_id, get_config_as_dict(config))
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

        if step == run.total_steps:
            log.info("all %d steps were taken before; raise trainer.epochs to go on", step)
        try:
            await run.train(told)
        finally:
            await run.trainer.source.close()
        log.info("%d steps are taken; checkpoints and metrics.jsonl are in %s", run.total_steps, settings.ckpt_path)
        return run


def _kept(dump: Callable[..., Path], *arguments: Any) -> None:
    """Write a dump; a disk that refuses it is no reason to stop training."""
    try:
        dump(*arguments)
    except StorageError as error:
        log.warning("%s", error)


def _arrays(batch: Batch) -> dict[str, Array]:
    tokens = batch.padded([row.token_ids[1:] for row in batch.rows], np.int32)
    arrays = {"target_tokens": tokens, "filled": batch.filled, "mask": batch.mask, "rewards": batch.rewards}
    logprobs = batch.rollout_logprobs
    return arrays if logprobs is None else {**arrays, "rollout_logprobs": logprobs}


def _eval_row(trajectory: Trajectory, prompt: Prompt) -> EvalRow:
    said = [turn.action for turn in trajectory.turns]
    return EvalRow(
        list(trajectory.messages) or list(prompt.messages),
        said[0] if len(said) == 1 else said,
        trajectory.reward,
        trajectory.stop_reason,
        prompt.env_class,
        prompt.extras,
        prompt.extras.get("data_source"),
    )


def _source(config: SkyRLTrainConfig, rollouts: Rollouts, prompts: TrainingPrompts) -> Source:
    settings, parallel = config.trainer, config.trainer.fully_async
    staleness = parallel.max_staleness_steps if parallel.enabled else int(settings.one_step_off)
    batch = settings.train_batch_size
    return Source(
        rollouts,
        prompts,
        batch,
        workers=parallel.num_parallel_generation_workers if parallel.enabled else batch * (staleness + 1),
        max_failed_fraction=config.generator.max_failed_fraction,
        steps=prompts.order.steps_per_epoch * settings.epochs,
        max_staleness_steps=staleness,
        synchronous=not parallel.enabled,
        staleness_policy=cast(StalenessPolicy, parallel.staleness_policy) if parallel.enabled else "block",
    )


def _schedule(config: SkyRLTrainConfig, steps: int) -> Callable[[OptimizerConfig, int], float]:
    """Learning rates over all optimizer steps of a run of so many steps."""
    settings = config.trainer

    def factor(optimizer: OptimizerConfig, step: int) -> float:
        is_policy = optimizer is settings.policy.optimizer_config
        mini = settings.policy_mini_batch_size if is_policy else settings.critic_mini_batch_size
        per_step = math.ceil(settings.train_batch_size / mini) * settings.update_epochs_per_batch
        return learning_rate_factor(optimizer, step, steps * per_step)

    return factor
