"""Every way of RL learns: from random weights, to be right about words that it was not trained on."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from kinds import make_pupil, task_rows

from skyrl.envs.tasks.arithmetic_data import write_rows
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.batch import Batch
from skyrl.train.rl.run import open_run, train_rl
from skyrl.train.rl.update import Metrics
from tests.rays import actors, ray_cluster

SCORE = "eval/all/avg_score"
"""Metric: mean reward of sampled answers to held-out words."""
HELD_OUT, PROMPTS, SAMPLES = 96, 16, 8
SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3)]
ALGORITHM = "trainer.algorithm."


BACKENDS = {
    "jax": "{warm_up: false, train_tile_tokens: 256, sample_max_num_sequences: 128}",
    "torch": "{train_tile_tokens: 1024, sample_max_num_sequences: 128}",
}


def configured(
    folder: Path, seed: int, *overrides: str, env: str = "InKind", steps: int = 30, strategy: str = "jax"
) -> SkyRLTrainConfig:
    """A run of one epoch, in which no word comes twice; evaluated on others before and after."""
    rows = task_rows(HELD_OUT + steps * PROMPTS, seed)
    write_rows(folder / "heldout.jsonl", rows[:HELD_OUT])
    write_rows(folder / "train.jsonl", rows[HELD_OUT:])
    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"data.train_data=[{folder}/train.jsonl]",
            f"data.val_data=[{folder}/heldout.jsonl]",
            f"environment.env_class=kinds:{env}",
            f"trainer.strategy={strategy}",
            f"trainer.{strategy}={BACKENDS[strategy]}",
            "trainer.gradient_checkpointing=false",
            f"trainer.policy.model.path={make_pupil(folder / 'model', seed)}",
            "trainer.policy.optimizer_config.lr=1e-2",
            f"trainer.train_batch_size={PROMPTS}",
            f"trainer.policy_mini_batch_size={PROMPTS}",
            f"trainer.critic_mini_batch_size={PROMPTS}",
            "trainer.micro_train_batch_size_per_gpu=128",
            "trainer.micro_forward_batch_size_per_gpu=128",
            f"trainer.eval_interval={steps}",
            "trainer.ckpt_interval=0",
            f"trainer.ckpt_path={folder}/checkpoints",
            f"trainer.export_path={folder}/exports",
            f"trainer.seed={seed}",
            "trainer.logger=[]",
            f"{ALGORITHM}use_kl_loss=false",
            f"generator.n_samples_per_prompt={SAMPLES}",
            "generator.sampling_params.max_generate_length=1",
            "generator.eval_sampling_params.temperature=1.0",
            *overrides,
        ]
    ).resolve()


def run(config: SkyRLTrainConfig) -> list[Metrics]:
    """The metrics of a run: of the evaluation before it, then of its steps."""
    reports: list[Metrics] = []
    asyncio.run(train_rl(config, lambda metrics, step: reports.append(metrics)))
    return reports


def assert_learned(reports: list[Metrics], least: float) -> None:
    """The score rises from that of random weights to more than 1/3, which is the most without reading the word."""
    assert least > 1 / 3
    assert reports[0][SCORE] < 0.3
    assert reports[-1][SCORE] > least


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, *SEEDS[1:]])
def test_grpo_learns(tmp_path, seed):
    assert_learned(run(configured(tmp_path, seed, steps=40)), least=0.75)


@pytest.mark.full
def test_grpo_learns_with_torch(tmp_path):
    assert_learned(run(configured(tmp_path, 0, steps=40, strategy="torch")), least=0.75)


@pytest.mark.slow
def test_grpo_learns_on_two_workers_of_a_ray_cluster_that_the_environment_names(tmp_path, monkeypatch):
    gpus = ("trainer.placement.policy_num_gpus_per_node=2", "generator.inference_engine.num_engines=2")
    shares = [f"trainer.micro_{which}_batch_size_per_gpu=64" for which in ("train", "forward")]
    whole = "trainer.policy.fsdp_config.fsdp_size=1"
    with ray_cluster({}) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        config = configured(tmp_path, 0, *gpus, *shares, whole, steps=40, strategy="torch")
        assert_learned(run(config), least=0.75)
    assert actors() == []


@pytest.mark.slow
def test_ppo_learns_with_a_critic_on_two_torch_workers(tmp_path):
    """Each has half of the micro-batches."""
    given = (f"{ALGORITHM}advantage_estimator=gae", f"trainer.critic.model.path={make_pupil(tmp_path / 'model', 0)}")
    workers = (
        "trainer.torch={train_tile_tokens: 256, sample_max_num_sequences: 128, num_workers: 2, workers: processes}"
    )
    critic = "trainer.critic.optimizer_config.lr=1e-2"
    assert_learned(run(configured(tmp_path, 0, *given, critic, workers, steps=40, strategy="torch")), least=0.6)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_learns(tmp_path, seed):
    assert_learned(run(configured(tmp_path, seed, f"{ALGORITHM}advantage_estimator=rloo")), least=0.75)


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_learns_and_its_critic_to_tell_what_words_are_worth(tmp_path, seed):
    config = configured(
        tmp_path,
        seed,
        f"{ALGORITHM}advantage_estimator=gae",
        f"trainer.critic.model.path={tmp_path}/model",
        "trainer.critic.optimizer_config.lr=1e-2",
        "generator.sampling_params.max_generate_length=2",
        env="Graded",
        steps=40,
    )
    reports, first, last = asyncio.run(run_with_critic(config))
    assert_learned(reports, least=0.6)
    assert first > 0.8 and last < 0.4


async def run_with_critic(config: SkyRLTrainConfig) -> tuple[list[Metrics], float, float]:
    """A run's evaluations, and the part of the variance of returns that its critic leaves open at first and at last."""
    with ExitStack() as stack:
        opened = await open_run(config, stack)
        reports = [await opened.evaluate()]
        first = left_open(*await opened.trainer.step())
        await opened.train(lambda metrics, step: reports.append(metrics))
        return reports, first, left_open(*await opened.trainer.step())


def left_open(metrics: Metrics, batch: Batch) -> float:
    """The critic's squared error on a batch, before it is trained on it, over the variance of the returns.

    With gamma and lambda 1, as they are by default, the return of each token is the reward of its answer.
    """
    returns = np.repeat(batch.rewards.sum(1), batch.mask.sum(1))
    return 2 * metrics["critic/loss"] / float(returns.var())


@pytest.mark.parametrize("seed", SEEDS)
def test_dapo_learns_from_prompts_whose_answers_differ(tmp_path, seed):
    options = [
        f"{ALGORITHM}dynamic_sampling.type=filter",
        f"{ALGORITHM}eps_clip_low=0.2",
        f"{ALGORITHM}eps_clip_high=0.28",
        f"{ALGORITHM}loss_reduction=token_mean",
        "generator.apply_overlong_filtering=true",
        "generator.sampling_params.max_generate_length=2",
        "trainer.policy.optimizer_config.lr=5e-3",
        "trainer.policy_mini_batch_size=8",
        "trainer.micro_train_batch_size_per_gpu=64",
    ]
    reports = run(configured(tmp_path, seed, *options, env="Ended", steps=16))
    assert_learned(reports, least=0.55)
    steps = reports[1:]
    assert max(step["generate/sample_batches"] for step in steps) > 1
    assert max(step["policy/ratio_max"] for step in steps) > 1.28


@pytest.mark.parametrize("seed", SEEDS)
def test_step_wise_rows_learn_to_answer_what_a_turn_is_told(tmp_path, seed):
    options = [
        "generator.step_wise_trajectories=true",
        "generator.max_turns=2",
        f"{ALGORITHM}use_entropy_loss=true",
        f"{ALGORITHM}entropy_loss_coef=0.02",
    ]
    reports = run(configured(tmp_path, seed, *options, env="Told", steps=40))
    assert_learned(reports, least=0.6)
    assert all(step["generate/batch_num_seq"] == 2 * PROMPTS * SAMPLES for step in reports[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_rollouts_beside_training_learn(tmp_path, seed):
    options = [
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.fully_async.num_parallel_generation_workers=16",
        f"{ALGORITHM}off_policy_correction.tis_ratio_type=token",
    ]
    reports = run(configured(tmp_path, seed, *options, steps=40))
    assert_learned(reports, least=0.8)
    assert max(step["async/staleness_max"] for step in reports[1:]) == 1
