"""Runs whose processes are killed, again and again: they end as if nothing had happened, bit for bit."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_runs import TORCH, Forks, forks
from short_runs import ON, RL, check_equal, metrics, on

from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.utils.failpoints import CRASH_POINTS

pytestmark = pytest.mark.full

STEPS = 4
TAKEN, SAVED = "trainer: step taken, not recorded", "trainer: newest named, older ones still there"
TWICE = [SAVED, TAKEN]
"""After the first step, and in the second."""
AT_EVERY_STEP = [SAVED, SAVED, TAKEN, SAVED, SAVED]
"""Points at which one process after another is killed. After SAVED comes the next step, else the same again."""
AT_EVERY_POINT = [
    *(TAKEN, SAVED),
    *("storage: files half written", "storage: files written, not in place", SAVED),
    *("trainer: models written, state not", "trainer: checkpoint in place, not the newest"),
    *("storage: older folder moved aside", SAVED),  # there is one since the kill before
    *("storage: folder in place", SAVED),
]
RL_HERE = [*RL, "environment.env_class=rewarding:Tossed", "trainer.eval_interval=2", "trainer.max_ckpts_to_keep=1"]
GRPO = ["trainer.algorithm.use_kl_loss=true", "trainer.algorithm.dynamic_sampling.type=filter"]
PPO = [
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.algorithm.use_kl_in_reward=true",
    "trainer.algorithm.kl_ctrl.type=adaptive",
    "trainer.critic.model.lora.rank=4",
    "trainer.policy.optimizer_config.scheduler=linear",
]
SFT = [
    "optimizer_config.lr=1e-2",
    "optimizer_config.scheduler=cosine",
    "model.lora.rank=4",
    "batch_size=4",
    "eval_interval=2",
    "ckpt_interval=1",
    "max_ckpts_to_keep=1",
    "resume_from=latest",
]
BESIDE = ["trainer.async_checkpoints=true", "trainer.best_metric=eval/all/avg_score"]
WHILE_WRITING = [
    *("storage: files half written", "trainer: models written, state not", SAVED),
    *("trainer: checkpoint in place, not the newest", TAKEN),
]
"""Points at which a run is killed that writes checkpoints beside its steps."""
MODELS = {"grpo": ["policy"], "grpo beside": ["policy"], "ppo": ["critic", "policy"], "sft": ["policy"]}


@pytest.fixture(scope="module")
def points(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
def processes(points) -> Iterator[Forks]:
    with forks(points, modules=TORCH) as running:
        yield running


@pytest.fixture
def data(tmp_path) -> Path:
    rows = [*arithmetic_rows(STEPS * 4 + 4, seed=0, largest=9)]
    prompts = [{"prompt": row["prompt"]} for row in rows]
    answered = [{"messages": [*row["prompt"], {"role": "assistant", "content": "It is 7."}]} for row in rows]
    for name, content in (("prompts", prompts), ("answered", answered)):
        write_rows(tmp_path / f"{name}.jsonl", content[: STEPS * 4])
        write_rows(tmp_path / f"{name}-held-out.jsonl", content[STEPS * 4 :])
    return tmp_path


def command(kind: str, strategy: str, data: Path, model: Path, folder: Path) -> list[str]:
    """`skyrl` with these arguments trains in a folder, with a strategy of `ON`."""
    if kind == "grpo beside":
        return [*command("grpo", strategy, data, model, folder), *BESIDE]
    if kind == "sft":
        paths = [f"model.path={model}", f"ckpt_path={folder}"]
        paths += [f"train_datasets=[{data}/answered.jsonl]", f"eval_datasets=[{data}/answered-held-out.jsonl]"]
        return ["train", "sft", *SFT, *ON[strategy], *paths]
    paths = [f"trainer.policy.model.path={model}", f"trainer.ckpt_path={folder}", f"trainer.export_path={folder}-out"]
    paths += [f"data.train_data=[{data}/prompts.jsonl]", f"data.val_data=[{data}/prompts-held-out.jsonl]"]
    own = GRPO if kind == "grpo" else [*PPO, f"trainer.critic.model.path={model}"]
    return ["train", "rl", *RL_HERE, *on(strategy), *own, *paths]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "kills", "strategy"),
    [
        pytest.param("grpo", TWICE, "torch", id="grpo, twice"),
        pytest.param("grpo beside", WHILE_WRITING, "torch", id="grpo, while checkpoints are written"),
        pytest.param("ppo", TWICE, "torch", id="ppo on torch, twice"),
        pytest.param("sft", TWICE, "jax", id="sft, twice"),
        pytest.param("grpo", [TAKEN], "jax", id="grpo on JAX, once", marks=pytest.mark.slow),
        pytest.param(
            "sft", TWICE, "torch on two workers", id="sft on two torch workers, twice", marks=pytest.mark.slow
        ),
        pytest.param("ppo", AT_EVERY_STEP, "jax", id="ppo, at every step", marks=pytest.mark.slow),
        pytest.param("sft", AT_EVERY_STEP, "jax", id="sft, at every step", marks=pytest.mark.slow),
        pytest.param("grpo", AT_EVERY_POINT, "jax", id="grpo, at every point", marks=pytest.mark.slow),
        pytest.param("ppo", AT_EVERY_POINT, "jax", id="ppo, at every point", marks=pytest.mark.slow),
        pytest.param("sft", AT_EVERY_POINT, "jax", id="sft, at every point", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_again_and_again_equals_the_uninterrupted_one(
    processes, points, data, tiny_model, tmp_path, kind, kills, strategy
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    output = tmp_path / "output"
    assert processes.run(*command(kind, strategy, data, tiny_model, whole), output=output) == 0, output.read_text()
    for point in kills:
        (points / point).touch()
        status = processes.run(*command(kind, strategy, data, tiny_model, killed), output=output)
        assert status == -signal.SIGKILL, f"{point}\n{output.read_text()}"
    assert processes.run(*command(kind, strategy, data, tiny_model, killed), output=output) == 0, output.read_text()
    first = 0 if kind != "sft" else 1  # there is an evaluation before the first step
    assert [row["step"] for row in metrics(killed)] == [*range(first, STEPS + 1)]
    check_equal(killed, whole, STEPS, MODELS[kind])
    if kind == "grpo":
        assert max(row.get("generate/sample_batches", 0) for row in metrics(whole)) > 1  # the filter left prompts out


def test_every_point_of_a_run_is_one_that_it_is_killed_at():
    assert set(AT_EVERY_POINT) == {name for name in CRASH_POINTS if name.startswith(("storage: ", "trainer: "))}
    assert AT_EVERY_POINT.count(SAVED) == AT_EVERY_STEP.count(SAVED) == STEPS
