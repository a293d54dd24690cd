"""Beginning and end of a run: signals, limits of steps, warm starts, evaluation only, callbacks, last words."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from rewarding import Hashed
from safetensors.numpy import load_file
from short_runs import ON, check_equal, command, metrics, newest, train

from skyrl.envs.env import StepResult
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.errors import ConfigError
from skyrl.train.callbacks import Callback
from skyrl.train.config import SFTConfig, SkyRLTrainConfig
from skyrl.train.rl.evaluation_run import evaluate_rl
from skyrl.train.rl.setup import Setup
from skyrl.train.rollouts.attempts import RolloutError
from skyrl.train.rollouts.generators.generator import Generated, Generator
from skyrl.train.rollouts.trajectory import Turn
from skyrl.train.sft.run import evaluate_sft, train_sft

ROOT = Path(__file__).parents[2]
HASHED = "environment.env_class=rewarding:Hashed"
STEPS = 3


@pytest.fixture
def rows(tmp_path) -> Path:
    """Rows of three steps."""
    path = tmp_path / "rows.jsonl"
    write_rows(path, ({"prompt": row["prompt"]} for row in arithmetic_rows(4 * STEPS, seed=0, largest=9)))
    return path


@pytest.fixture
def answered(tmp_path) -> Path:
    path = tmp_path / "answered.jsonl"
    said = {"role": "assistant", "content": "It is 7."}
    write_rows(path, ({"messages": [*row["prompt"], said]} for row in arithmetic_rows(12, seed=0, largest=9)))
    return path


class Told(Callback):
    """Writes down what it is told."""

    events: list[tuple[str, int]] = []  # noqa: RUF012

    def on_train_begin(self, run):
        self.events.append(("begin", run.global_step))

    def on_step_end(self, run, metrics):
        self.events.append(("step", run.global_step))
        assert metrics["trainer/global_step"] == run.global_step
        return run.global_step == 2

    def on_evaluate(self, run, metrics):
        self.events.append(("evaluate", run.global_step))
        assert "eval/all/avg_score" in metrics

    def on_save(self, run, path):
        self.events.append(("save", run.global_step))
        assert (path / "manifest.json").is_file()

    def on_train_end(self, run):
        self.events.append(("end", run.global_step))


def words(prompt, response, level):
    """A reward function: longer responses and rows of a higher level earn more."""
    assert prompt[0]["role"] == "user"
    return {"score": level + len(response) / 100, "letters": len(response)}


def weights(folder: Path, model: str = "policy") -> dict[str, np.ndarray]:
    state = load_file(folder / model / "training_state.safetensors")
    found = {name: tensor for name, tensor in state.items() if name.startswith("weights/")}
    assert found
    return found


# -- a reward function ------------------------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path) -> Path:
    """Rows that name an environment, and have a column that `words` reads."""
    path = tmp_path / "named.jsonl"
    prompts = arithmetic_rows(4, seed=0, largest=9)
    write_rows(path, ({"prompt": row["prompt"], "env_class": "gsm8k", "level": n} for n, row in enumerate(prompts)))
    return path


@pytest.mark.full
def test_a_reward_function_rewards_every_row_in_the_place_of_its_environment(named, tiny_model, tmp_path):
    reward, dump = f"environment.reward={__name__}:words", "trainer.dump_data_batch=true"
    train(command(named, tiny_model, tmp_path / "run", reward, dump, "trainer.epochs=1"))
    records = (tmp_path / "run-exports/dumped_rollouts/global_step_1.jsonl").read_text().splitlines()
    (row,) = metrics(tmp_path / "run")
    rewards, letters = [], []
    for record in map(json.loads, records):
        letters.append(sum(len(turn["action"]) for turn in record["turns"]))
        rewards.append(int(record["instance_id"].partition(".")[0]) + letters[-1] / 100)
        assert record["reward"] == pytest.approx(rewards[-1])
    assert len(rewards) == 12 and row["reward/avg_raw_reward"] == pytest.approx(np.mean(rewards))
    assert row["environment/letters"] == pytest.approx(np.mean(letters))


@pytest.mark.full
def test_the_best_checkpoint_and_the_newest_dumps_are_kept_of_a_run_that_writes_beside_its_steps(
    rows, tiny_model, tmp_path
):
    options = [HASHED, "trainer.async_checkpoints=true", "trainer.max_ckpts_to_keep=1", "trainer.eval_interval=1"]
    options += [f"data.val_data=[{rows}]", "trainer.best_metric=eval/all/avg_score", "trainer.max_dumps_to_keep=2"]
    arguments = command(rows, tiny_model, tmp_path / "run", *options, "trainer.dump_data_batch=true")
    train([*arguments, "trainer.max_steps=2"])
    train(arguments)
    scores = {row["step"]: row["eval/all/avg_score"] for row in metrics(tmp_path / "run") if row["step"]}
    best = max(scores, key=lambda step: (scores[step], -step))
    kept = {path.name for path in (tmp_path / "run").glob("global_step_*")}
    assert kept == {f"global_step_{best}", f"global_step_{STEPS}"} and len(scores) == STEPS
    assert (tmp_path / "run/best_ckpt_global_step.txt").read_text() == str(best)
    dumps = {path.name for path in (tmp_path / "run-exports/dumped_rollouts").iterdir()}
    assert dumps == {f"global_step_{step}.jsonl" for step in (STEPS - 1, STEPS)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["trainer.best_metric=eval/x", "trainer.eval_interval=0"], r"best_metric=eval/x and trainer.eval_interval=0"),
        (["trainer.best_metric=eval/x", "data.val_data=[]", "trainer.eval_before_train=false"], r"data.val_data=\[\]"),
    ],
)
def test_a_best_checkpoint_without_evaluations_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", *given]).resolve()


def letters(response, token_ids):
    """A reward function: tokens with even ids earn 1."""
    return [float(token % 2 == 0) for token in token_ids]


@pytest.mark.full
def test_several_functions_are_weighed_each_has_a_metric_and_tokens_have_their_own_rewards(named, tiny_model, tmp_path):
    reward = f"environment.reward=[{__name__}:letters, long=0.5*{__name__}:words]"
    train(command(named, tiny_model, tmp_path / "run", reward, "trainer.dump_data_batch=true", "trainer.epochs=1"))
    (row,) = metrics(tmp_path / "run")
    assert row["reward/avg_raw_reward"] == pytest.approx(row["reward/letters"] + 0.5 * row["reward/long"])
    dump = load_file(tmp_path / "run-exports/dumped_data/global_step_1_training_input.safetensors")
    even = (dump["target_tokens"] % 2 == 0) & (dump["mask"] > 0)
    assert even.sum() / 12 == pytest.approx(row["reward/letters"]) and 0 < even.sum() < dump["mask"].sum()
    last = np.zeros_like(even)
    for sequence, mask in enumerate(dump["mask"]):
        last[sequence, np.flatnonzero(mask)[-1]] = True
    np.testing.assert_array_equal(dump["rewards"][~last], even[~last])
    assert (dump["rewards"][last] > even[last]).any()


class Sums(Generator):
    """The single turn of `rewarding:Hashed`."""

    async def generate(self, prompt, params, session_id):
        tokens = self.chat.render(prompt.messages)
        sampled = await self.sampler.sample(tokens, params, session_id)
        text = self.chat.text(sampled.token_ids)
        assert self.environment.skyrl_gym.others == {"sums": {"level": 3}}
        reward = zlib.crc32(text.encode()) % 11 / 10
        return Generated([Turn(tokens, sampled, reward=reward, action=text)], sampled.stop_reason)


@pytest.mark.full
def test_a_run_of_a_generator_of_ones_own_is_that_of_the_environment_also_where_it_is_resumed(
    rows, tiny_model, tmp_path
):
    own = f"generator.generator_class={__name__}:Sums"
    train(command(rows, tiny_model, tmp_path / "theirs", HASHED))
    cut = command(rows, tiny_model, tmp_path / "ours", own, "environment.skyrl_gym.sums.level=3")
    train([*cut, "trainer.max_steps=1"])
    train(cut)
    assert newest(tmp_path / "ours") == STEPS
    theirs, ours = (weights(tmp_path / run / f"global_step_{STEPS}") for run in ("theirs", "ours"))
    assert all((theirs[name] == ours[name]).all() for name in theirs)


@pytest.mark.parametrize(
    "beside", ["environment.reward=a:b", "environment.env_class=gsm8k", "generator.env_error_reward=0.0"]
)
def test_what_a_generator_does_not_read_is_refused_beside_it(beside):
    given = ["trainer.strategy=jax", "generator.generator_class=a:B", beside]
    with pytest.raises(ConfigError, match=rf"{beside}: a generator plays and rewards what it makes; leave one of"):
        SkyRLTrainConfig.from_cli_overrides(given).resolve()


def test_a_generator_that_is_not_there_is_told_before_a_model_is_loaded(rows, tiny_model, tmp_path):
    given = command(rows, tiny_model, tmp_path / "run", f"generator.generator_class={__name__}:Nobody")
    with pytest.raises(ConfigError, match=r"generator.generator_class=.*:Nobody: no generator at"):
        Setup.of(SkyRLTrainConfig.from_cli_overrides(given).resolve())


def test_a_row_without_a_column_of_the_reward_function_ends_the_run_by_its_name(rows, tiny_model, tmp_path):
    reward = f"environment.reward={__name__}:words"
    said = r"jsonl, row 0: environment '.*:words': the function takes level, .* \(it has none besides"
    with pytest.raises(ConfigError, match=said):
        train(command(rows, tiny_model, tmp_path / "run", reward))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["environment.reward=words"], r"environment: reward=words: 'words': a function is named as module:function"),
        (["environment.reward=a:b", "environment.env_class=gsm8k"], r"env_class=gsm8k is not used; leave one"),
    ],
)
def test_a_reward_function_that_cannot_be_meant_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", *given]).resolve()


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (["trainer.max_steps=2"], 2),
        (["trainer.max_steps=5"], 5),
        (["trainer.max_steps=2", "trainer.epochs=2"], 2),
        (["trainer.max_steps=7", "trainer.epochs=2"], 6),
        (["trainer.epochs=2"], 6),
    ],
)
def test_a_run_has_as_many_steps_as_max_steps_or_its_epochs(given, steps):
    config = SkyRLTrainConfig.from_cli_overrides(
        [
            *given,
            "trainer.strategy=jax",
            "data.val_data=[]",
            "trainer.eval_interval=0",
            "trainer.eval_before_train=false",
        ]
    ).resolve()
    assert config.trainer.steps(STEPS) == steps


@pytest.mark.full
def test_a_run_passes_the_data_again_up_to_max_steps_and_a_repeated_one_says_what_to_raise(
    rows, tiny_model, tmp_path, caplog
):
    caplog.set_level("INFO")
    arguments = command(rows, tiny_model, tmp_path / "run", HASHED, "trainer.max_steps=4", "trainer.ckpt_interval=0")
    train(arguments)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert newest(tmp_path / "run") == 3, "an epoch ends there"
    caplog.clear()
    train(arguments)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.full
def test_the_last_words_of_a_run_name_what_it_left(rows, tiny_model, tmp_path, caplog):
    caplog.set_level("INFO")
    arguments = command(
        rows, tiny_model, tmp_path / "run", HASHED, "trainer.max_steps=1", "trainer.dump_data_batch=true"
    )
    last = train(arguments).summary()
    assert last.startswith("1 of 1 steps are taken\n")
    exports = [f"run-exports/{name}" for name in ("model", "dumped_rollouts", "dumped_data")]
    for path in ("run/global_step_1", "run/metrics.jsonl", *exports):
        assert f"{tmp_path}/{path}" in last
    for path in re.findall(r"/\S+", last):
        assert Path(path).exists()
    caplog.clear()
    train(arguments)
    assert any("all 1 steps were taken before; raise trainer.max_steps" in each.getMessage() for each in caplog.records)


# -- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_callback_is_told_of_all_that_happens_and_can_end_the_run(rows, tiny_model, tmp_path):
    Told.events = []
    held_out = tmp_path / "held-out.jsonl"
    write_rows(held_out, ({"prompt": row["prompt"]} for row in arithmetic_rows(2, seed=1, largest=9)))
    options = [f"trainer.callbacks=['{__name__}:Told']", "trainer.eval_interval=5", "trainer.ckpt_interval=5"]
    train(command(rows, tiny_model, tmp_path / "run", HASHED, f"data.val_data=[{held_out}]", *options))
    assert Told.events == [
        ("begin", 0),
        ("evaluate", 0),
        ("step", 1),
        ("step", 2),
        ("evaluate", 2),
        ("save", 2),
        ("end", 2),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere:Class", "nowhere:Class"), ("json:loads", "no subclass of skyrl.train.callbacks.Callback")],
)
def test_what_is_no_callback_is_refused_by_name(rows, tiny_model, tmp_path, name, words):
    with pytest.raises(ConfigError, match=rf"trainer.callbacks: .*{re.escape(words)}"):
        train(command(rows, tiny_model, tmp_path / "run", HASHED, f"trainer.callbacks=['{name}']"))


# -- signals ----------------------------------------------------------------------------------------------------------


def spawned(folder: Path, arguments: list[str]) -> "subprocess.Popen[str]":
    """`skyrl` in a process of its own, which runs until it is told to end."""
    paths = [str(ROOT), str(ROOT / "tests" / "train"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "skyrl.cli", "train", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


SLOW_ENV = '''
import asyncio, pathlib
from rewarding import Hashed

class Slow(Hashed):
    """Answers, but in the second step never."""

    async def step(self, action):
        seen = pathlib.Path(__file__).with_name("seen")
        count = len(seen.read_text()) if seen.exists() else 0
        seen.write_text("." * (count + 1))
        if count >= 12 and not pathlib.Path(__file__).with_name("quick").exists():
            await asyncio.Event().wait()
        return await super().step(action)
'''


@pytest.mark.full
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_while_a_step_is_sampled_saves_the_steps_before_at_once(
    rows, tiny_model, tmp_path, monkeypatch, number
):
    (tmp_path / "slow.py").write_text(SLOW_ENV)
    options = ["environment.env_class=slow:Slow", "trainer.ckpt_interval=-1"]
    arguments = command(rows, tiny_model, tmp_path / "run", *options)
    with spawned(tmp_path, ["rl", *arguments]) as process:
        seen = tmp_path / "seen"
        wait_until(lambda: seen.exists() and len(seen.read_text()) > 12)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert (
        f"1 of 3 steps are taken and saved to {tmp_path}/run/global_step_1; the same command goes on from there"
        in said.splitlines()[-1]
    )
    assert newest(tmp_path / "run") == 1
    (tmp_path / "quick").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow", raising=False)
    train(arguments)
    train(command(rows, tiny_model, tmp_path / "whole", *options))
    check_equal(tmp_path / "run", tmp_path / "whole", STEPS, ["policy"])


@pytest.mark.full
def test_a_second_signal_ends_a_run_at_once(rows, tiny_model, tmp_path):
    (tmp_path / "stuck.py").write_text(
        "import os, pathlib, signal\n"
        "from skyrl.train.callbacks import Callback\n"
        "class Stuck(Callback):\n"
        "    def on_step_end(self, run, metrics):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        pathlib.Path(__file__).with_name('told').touch()\n"
        "        while True:\n"
        "            signal.pause()\n"
    )
    options = [HASHED, "trainer.callbacks=['stuck:Stuck']"]
    with spawned(tmp_path, ["rl", *command(rows, tiny_model, tmp_path / "run", *options)]) as process:
        wait_until((tmp_path / "told").exists)
        assert process.poll() is None, "the first one does not end it"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def wait_until(condition, within: float = 120.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Failing(Hashed):
    """Every episode fails from the second step on, while `mended` is false."""

    episodes, mended = 0, False

    async def step(self, action: str) -> StepResult:
        Failing.episodes += 1
        if Failing.episodes > 12 and not Failing.mended:
            raise RuntimeError("the world ended")
        return await super().step(action)


@pytest.mark.full
def test_a_run_that_is_saved_as_its_rollouts_fail_goes_on_once_the_cause_is_mended(rows, tiny_model, tmp_path):
    options = [
        f"environment.env_class={__name__}:Failing",
        "generator.trajectory_retries=0",
        "trainer.one_step_off=true",
    ]
    options += ["trainer.ckpt_interval=-1", "trainer.algorithm.off_policy_correction.tis_ratio_type=token"]
    arguments = command(rows, tiny_model, tmp_path / "run", *options)
    Failing.episodes, Failing.mended = 0, False
    with pytest.raises(RolloutError):
        train(arguments)
    saved = newest(tmp_path / "run")
    assert saved >= 1
    Failing.mended = True
    train(arguments)
    assert newest(tmp_path / "run") == STEPS


@pytest.mark.full
def test_a_run_whose_evaluation_fails_keeps_its_steps(rows, tiny_model, tmp_path):
    broken = tmp_path / "broken.jsonl"
    write_rows(
        broken, ({"prompt": row["prompt"], "env_class": "rewarding:Broken"} for row in arithmetic_rows(4, seed=0))
    )
    options = [HASHED, f"data.val_data=[{broken}]", "trainer.eval_interval=2", "trainer.eval_before_train=false"]
    options += ["trainer.ckpt_interval=-1", "generator.trajectory_retries=0"]
    with pytest.raises(RolloutError):
        train(command(rows, tiny_model, tmp_path / "run", *options))
    assert newest(tmp_path / "run") == 2
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("loss", ["cross_entropy", f"{__name__}:in_torch"])
def test_losses_that_need_no_old_logprobs_or_are_torchs_alone_train(rows, tiny_model, tmp_path, loss):
    options = [HASHED, f"trainer.algorithm.policy_loss_type={loss}", "trainer.max_steps=1"]
    train(command(rows, tiny_model, tmp_path / "run", *options, "trainer.algorithm.use_kl_loss=false"))
    [row] = metrics(tmp_path / "run")
    assert row["policy/grad_norm"] > 0 and ("policy/policy_loss" in row) == (loss == "cross_entropy")


def in_torch(x):
    return -torch.exp(x.logprobs - x.logprobs.detach()) * x.advantages


# -- other beginnings -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_settings_that_have_changed_are_named_when_a_run_goes_on(rows, tiny_model, tmp_path, caplog):
    caplog.set_level("INFO")
    train(command(rows, tiny_model, tmp_path / "run", HASHED, "trainer.max_steps=1"))
    assert "settings that were others" not in caplog.text
    train(
        command(
            rows, tiny_model, tmp_path / "run", HASHED, "trainer.max_steps=2", "trainer.policy.optimizer_config.lr=0.5"
        )
    )
    [said] = [each.getMessage() for each in caplog.records if "settings that were others" in each.getMessage()]
    assert (
        said.partition("written: ")[2] == "trainer.policy.optimizer_config.lr=0.01, now 0.5; trainer.max_steps=1, now 2"
    )


@pytest.mark.full
def test_a_warm_start_has_the_weights_of_a_checkpoint_of_other_data_and_nothing_else(
    rows, answered, tiny_model, tmp_path
):
    sft = SFTConfig.from_cli_overrides(
        [
            *ON["torch"],
            f"train_datasets=[{answered}]",
            f"model.path={tiny_model}",
            "model.lora.rank=4",
            "num_steps=2",
            "optimizer_config.lr=1e-2",
            f"ckpt_path={tmp_path}/sft",
            "ckpt_interval=2",
        ]
    ).resolve()
    asyncio.run(train_sft(sft))
    begun = tmp_path / "sft" / "global_step_2"
    options = [HASHED, f"trainer.init_from={begun}", "trainer.max_steps=1", "trainer.policy.optimizer_config.lr=1e-9"]
    options += ["trainer.algorithm.use_kl_loss=true"]
    train(command(rows, tiny_model, tmp_path / "run", *options))
    ours, theirs = weights(tmp_path / "run" / "global_step_1"), weights(begun)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-8)
    [row] = metrics(tmp_path / "run")
    assert abs(row["loss/avg_kl"]) < 1e-6, "KL is measured from the weights that it began with"
    reference = weights(tmp_path / "run" / "global_step_1", "reference")
    assert all((reference[name] == theirs[name]).all() for name in theirs)


@pytest.mark.full
def test_a_warm_start_with_another_adapter_is_refused_by_name(rows, tiny_model, tmp_path):
    train(command(rows, tiny_model, tmp_path / "one", HASHED, "trainer.max_steps=1"))
    begun = tmp_path / "one" / "global_step_1"
    other = [HASHED, f"trainer.init_from={begun}", "trainer.policy.model.lora.rank=8"]
    with pytest.raises(ConfigError, match=r"trainer.init_from=.*model.lora.rank=4 there and 8 here"):
        train(command(rows, tiny_model, tmp_path / "other", *other))


@pytest.mark.full
def test_a_checkpoint_is_evaluated_alone_as_in_its_run_also_while_that_has_its_folder(
    rows, tiny_model, tmp_path, capsys
):
    held_out = tmp_path / "held-out.jsonl"
    write_rows(held_out, ({"prompt": row["prompt"]} for row in arithmetic_rows(6, seed=1, largest=9)))
    options = [HASHED, f"data.val_data=[{held_out}]", "trainer.eval_interval=1", "trainer.max_steps=2"]
    arguments = command(rows, tiny_model, tmp_path / "run", *options)
    train(arguments)  # this process keeps the folder
    rows.unlink()
    wanted = [*arguments, "trainer.eval_only=true", "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2"]
    wanted += ["trainer.critic_mini_batch_size=2", "data.train_data=[]"]
    found = asyncio.run(evaluate_rl(SkyRLTrainConfig.from_cli_overrides(wanted).resolve()))
    expected = metrics(tmp_path / "run")[-1]
    assert {name: value for name, value in found.items() if "_time_" not in name} == {
        name: value for name, value in expected.items() if name.startswith("eval/")
    }
    said = capsys.readouterr().out
    assert f"6 prompts evaluated with {tmp_path}/run/global_step_2" in said and "eval/all/avg_score" in said
    assert len(metrics(tmp_path / "run")) == 3, "nothing of the run is touched"


def test_evaluation_alone_wants_data_to_evaluate_on():
    given = ["trainer.eval_only=true", "data.val_data=[]", "trainer.strategy=jax"]
    with pytest.raises(ConfigError, match=r"data.val_data=\[\] and trainer.eval_only=True"):
        SkyRLTrainConfig.from_cli_overrides(given).resolve()


def test_losses_of_a_checkpoint_are_measured_alone_as_in_its_run(answered, tiny_model, tmp_path, capsys):
    overrides = [
        *ON["torch"],
        f"train_datasets=[{answered}]",
        f"eval_datasets=[{answered}]",
        f"model.path={tiny_model}",
        "model.lora.rank=4",
        "num_steps=2",
        f"ckpt_path={tmp_path}/sft",
        "ckpt_interval=2",
    ]
    trained = asyncio.run(train_sft(SFTConfig.from_cli_overrides(overrides).resolve()))
    alone = [*overrides, "eval_only=true", "resume_from=latest"]
    found = asyncio.run(evaluate_sft(SFTConfig.from_cli_overrides(alone).resolve()))
    assert found == {"eval/answered/loss": trained.metrics["eval/answered/loss"]}
    assert f"evaluated with {tmp_path}/sft/global_step_2" in capsys.readouterr().out


def test_fine_tuning_keeps_the_checkpoint_of_the_best_evaluation_beside_the_newest(answered, tiny_model, tmp_path):
    other = tmp_path / "other.jsonl"
    said = {"role": "assistant", "content": "zzz qqq xxx"}
    write_rows(other, ({"messages": [*row["prompt"], said]} for row in arithmetic_rows(4, seed=1, largest=9)))
    overrides = [
        *ON["torch"],
        f"train_datasets=[{answered}]",
        f"eval_datasets=[{other}]",
        f"model.path={tiny_model}",
        *("model.lora.rank=4", "num_steps=5", "optimizer_config.lr=0.03", "batch_size=2"),
        f"ckpt_path={tmp_path}/sft",
        *("ckpt_interval=1", "max_ckpts_to_keep=1", "eval_interval=1", "best_metric=eval/other/loss"),
        *("async_checkpoints=true", "best_mode=max"),  # for a highest loss in the middle
    ]
    asyncio.run(train_sft(SFTConfig.from_cli_overrides(overrides).resolve()))
    losses = {row["step"]: row["eval/other/loss"] for row in metrics(tmp_path / "sft")}
    best = max(losses, key=lambda step: losses[step])
    assert 0 < best < 5 and SFTConfig().best_mode == "min"
    assert {path.name for path in (tmp_path / "sft").glob("global_step_*")} == {f"global_step_{best}", "global_step_5"}
    with pytest.raises(ConfigError, match=r"best_metric=eval/x, ckpt_path=, .*: there is nothing to compare"):
        SFTConfig.from_cli_overrides([*overrides[:5], "best_metric=eval/x"]).resolve()
