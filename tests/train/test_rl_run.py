"""Whole RL runs on a tiny model: they go through, resume as if nothing had happened, and keep what they should."""

import asyncio
import contextlib
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from short_runs import on

from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.errors import ConfigError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.run import Run, open_run, train_rl
from tests.backends.driver import training_state

STEPS = 4


class Killed(Exception):
    """Error that ends a run in the middle."""


@pytest.fixture
def data(tmp_path) -> Path:
    rows = prompts(24, seed=0)
    write_rows(tmp_path / "train.jsonl", rows[:16])
    write_rows(tmp_path / "validation.jsonl", rows[16:])
    return tmp_path


def prompts(count: int, seed: int) -> list[dict]:
    return [{"prompt": row["prompt"]} for row in arithmetic_rows(count, seed=seed, largest=9)]


def configured(data: Path, tiny_model: Path, *overrides: str, strategy: str = "torch") -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"data.train_data=[{data}/train.jsonl]",
            f"data.val_data=[{data}/validation.jsonl]",
            "environment.env_class=rewarding:Hashed",
            *on(strategy),
            f"trainer.policy.model.path={tiny_model}",
            "trainer.policy.model.lora.rank=4",
            "trainer.policy.optimizer_config.lr=1e-2",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.critic_mini_batch_size=2",
            "trainer.micro_train_batch_size_per_gpu=3",
            "trainer.eval_interval=2",
            "trainer.ckpt_interval=1",
            f"trainer.ckpt_path={data}/checkpoints",
            f"trainer.export_path={data}/exports",
            "trainer.logger=console",
            "generator.n_samples_per_prompt=3",
            "generator.sampling_params.max_generate_length=4",
            *overrides,
        ]
    ).resolve()


def run(config: SkyRLTrainConfig, kill_at: int | None = None) -> list[tuple[int, dict[str, float]]]:
    """The metrics of a run, which may be ended after a step."""
    reports: list[tuple[int, dict[str, float]]] = []

    def report(metrics: dict[str, float], step: int) -> None:
        reports.append((step, metrics))
        if step == kill_at:
            raise Killed

    with contextlib.suppress(Killed):
        asyncio.run(train_rl(config, report))
    return reports


def weights(folder: Path, model: str = "policy", step: int = STEPS) -> dict[str, np.ndarray]:
    """All that is stored of a model, moments included."""
    return training_state(folder / "checkpoints" / f"global_step_{step}" / model)


ALGORITHMS = {
    "grpo": ["trainer.algorithm.use_kl_loss=true"],
    "ppo": [
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_ctrl.type=adaptive",
        "trainer.critic.model.lora.rank=4",
        "trainer.policy.optimizer_config.scheduler=linear",
    ],
    "clip_cov, whole": [
        "trainer.algorithm.policy_loss_type=clip_cov",
        "trainer.policy.model.lora.rank=0",
        "trainer.update_epochs_per_batch=2",
    ],
    "one step off": ["trainer.one_step_off=true", "trainer.algorithm.off_policy_correction.tis_ratio_type=token"],
}


IN_SLOW_SUITE = ("grpo", "clip_cov, whole", "one step off")
"""Short runs of some are killed in test_rl_kills, and resumed in test_rl_options."""


@pytest.mark.full("ppo-jax", "one step off-torch")
@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        *(pytest.param(name, "jax", marks=pytest.mark.slow if name in IN_SLOW_SUITE else ()) for name in ALGORITHMS),
        ("ppo", "torch"),
        ("one step off", "torch"),
        pytest.param("clip_cov, whole", "torch", marks=pytest.mark.slow),
        *(
            pytest.param(name, "torch on two workers", marks=pytest.mark.slow)
            for name in ("grpo", "ppo", "one step off")
        ),
    ],
)
def test_a_run_that_is_resumed_ends_as_one_that_was_not_interrupted(data, tiny_model, tmp_path, algorithm, strategy):
    options = ALGORITHMS[algorithm]
    if algorithm == "ppo":
        options = [*options, f"trainer.critic.model.path={tiny_model}"]
    whole, cut = (
        configured(data, tiny_model, *options, f"trainer.ckpt_path={tmp_path}/{name}/checkpoints", strategy=strategy)
        for name in ("whole", "cut")
    )
    undisturbed = run(whole)
    assert [step for step, _ in undisturbed] == [0, 1, 2, 3, 4]
    run(cut, kill_at=3)
    resumed = run(cut)
    assert [step for step, _ in resumed] == [3, 4]
    assert all(metrics["policy/grad_norm"] > 0 for step, metrics in undisturbed if step)
    for (_, ours), (_, expected) in zip(resumed, undisturbed[3:], strict=True):
        same = {name for name in expected if not name.startswith(("timing/", "throughput/")) and "_time_" not in name}
        assert {name: ours[name] for name in same} == {name: expected[name] for name in same}
    for model in ("policy", "critic") if algorithm == "ppo" else ("policy",):
        ours, expected = weights(tmp_path / "cut", model), weights(tmp_path / "whole", model)
        assert ours.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(ours[name], expected[name])


@pytest.mark.full
def test_one_step_off_rollouts_are_one_step_old(data, tiny_model):
    reports = run(configured(data, tiny_model, *ALGORITHMS["one step off"]))
    ages = [(metrics["async/staleness_mean"], metrics["async/staleness_max"]) for step, metrics in reports if step]
    assert ages == [(0, 0), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        ("block", "torch"),
        *(pytest.param(name, "torch", marks=pytest.mark.slow) for name in ("drop", "mask")),
        pytest.param("block", "torch on two workers", marks=pytest.mark.slow),
    ],
)
def test_rollouts_beside_training_are_as_old_as_they_may_be(data, tiny_model, policy, strategy):
    config = configured(
        data,
        tiny_model,
        "trainer.policy_mini_batch_size=4",
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.fully_async.num_parallel_generation_workers=4",
        f"trainer.fully_async.staleness_policy={policy}",
        "trainer.epochs=2",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        strategy=strategy,
    )
    reports = run(config)
    ages = [metrics["async/staleness_max"] for step, metrics in reports if step > 0]
    assert len(ages) == 8 and min(ages) >= 0 and (max(ages) >= 1 if policy == "mask" else max(ages) == 1)
    trained = [metrics["generate/tokens_trained"] for step, metrics in reports if step > 0]
    assert all(count > 0 for count in trained)


@pytest.mark.full
@pytest.mark.parametrize("epochs", [2, pytest.param(13, marks=pytest.mark.slow)])
def test_with_sixty_times_more_samples_in_flight_than_rows_no_trajectory_is_lost_or_begun_again(
    data, tiny_model, epochs
):
    config = configured(
        data,
        tiny_model,
        "trainer.policy_mini_batch_size=4",
        "trainer.fully_async.enabled=true",
        "trainer.fully_async.max_staleness_steps=4",
        "trainer.fully_async.num_parallel_generation_workers=20",
        "generator.n_samples_per_prompt=6",
        "generator.inference_engine.max_num_seqs=2",
        "generator.sampling_params.max_generate_length=40",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "trainer.jax.deterministic=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1",
        f"trainer.epochs={epochs}",
        "trainer.policy.record_memory=true",
        strategy="jax",
    )
    reports = [metrics for step, metrics in run(config) if step > 0]
    profiles = {path.name for path in (data / "checkpoints" / "memory").iterdir()}
    assert profiles == {f"global_step_{step}.prof" for step in range(4, 4 * epochs + 1, 4)}
    assert len(reports) == 4 * epochs
    assert [metrics["generate/retries"] + metrics["generate/failed"] for metrics in reports] == [0] * len(reports)
    assert max(metrics["async/staleness_max"] for metrics in reports) <= 4


@pytest.mark.full
def test_samples_that_wait_for_their_step_are_in_the_checkpoint(data, tiny_model):
    options = [*ALGORITHMS["one step off"], f"trainer.export_path={data}/exports", "trainer.dump_data_batch=true"]
    run(configured(data, tiny_model, *options), kill_at=3)
    waiting = (data / "checkpoints" / "global_step_2" / "rollouts.jsonl").read_text().splitlines()
    trained = (data / "exports" / "dumped_rollouts" / "global_step_3.jsonl").read_text().splitlines()
    assert len(trained) == 12 and len(waiting) >= 12
    for kept, dumped in zip(waiting, trained, strict=False):
        record = {name: value for name, value in json.loads(kept).items() if name != "prompt"}
        assert record == json.loads(dumped)


@pytest.mark.slow
def test_the_reference_of_a_new_epoch_is_the_policy_of_the_last_and_is_resumed(data, tiny_model, tmp_path):
    options = ["trainer.update_ref_every_epoch=true", "trainer.epochs=2", "trainer.algorithm.use_kl_loss=true"]
    config = configured(data, tiny_model, *options)
    run(config, kill_at=6)
    reference, policy = weights(data, "reference", 5), weights(data, "policy", 4)
    for name in reference:
        if name.startswith("weights/"):
            np.testing.assert_array_equal(reference[name], policy[name])
    reports = dict(run(config))
    assert min(reports) == 6 and reports[6]["loss/avg_kl"] > 0


@pytest.mark.full
def test_dumps_hold_what_was_said_and_what_was_trained_on(data, tiny_model):
    run(configured(data, tiny_model, "trainer.dump_data_batch=true"), kill_at=2)
    exports = data / "exports"
    said = [json.loads(line) for line in (exports / "dumped_rollouts" / "global_step_2.jsonl").read_text().splitlines()]
    assert len(said) == 12 and all(record["turns"][0]["action"] for record in said)
    batch = load_file(exports / "dumped_data" / "global_step_2_training_input.safetensors")
    sampled = [token for record in said for turn in record["turns"] for token in turn["token_ids"]]
    assert batch["target_tokens"][batch["mask"]].tolist() == sampled
    scores = (exports / "dumped_evals" / "global_step_2_evals" / "unknown.jsonl").read_text().splitlines()
    assert len(scores) == 8 and {"input_prompt", "output_response", "score"} <= json.loads(scores[0]).keys()


@pytest.mark.slow
def test_metrics_of_every_step_are_there_once_after_a_resume(data, tiny_model):
    run(configured(data, tiny_model), kill_at=3)
    run(configured(data, tiny_model))
    lines = (data / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]


def test_settings_of_an_environment_that_is_not_there_are_refused(data, tiny_model):
    with pytest.raises(ConfigError, match=r"environment\.skyrl_gym\.serach"):
        run(configured(data, tiny_model, "environment.skyrl_gym.serach.topk=3"))


@pytest.mark.parametrize("model", ["critic", "ref"])
def test_another_base_model_beside_the_policys_is_refused(data, tiny_model, tmp_path, model):
    other = tmp_path / "other"
    config = configured(data, tiny_model, f"trainer.{model}.model.path={other}")

    async def opened() -> Run:
        with ExitStack() as stack:
            return await open_run(config, stack)

    with pytest.raises(ConfigError, match=str(other)):
        asyncio.run(opened())


@pytest.mark.full
def test_data_of_another_run_are_not_continued(data, tiny_model):
    run(configured(data, tiny_model), kill_at=2)
    write_rows(data / "train.jsonl", prompts(16, seed=5))
    with pytest.raises(ConfigError, match=r"data\.train_data"):
        run(configured(data, tiny_model))
