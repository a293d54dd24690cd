"""Runs whose workers die: they restart from the newest checkpoint by themselves, as often as they may."""

import weakref
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import pytest
from short_runs import check_equal, command, metrics, train

from skyrl.envs.env import Env, NoSettings, StepResult
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.errors import BackendLost, BackendStopped, ConfigError, RequestError
from skyrl.train import commands
from skyrl.train.commands import train_with_restarts
from skyrl.train.config import SFTConfig, SkyRLTrainConfig

STEPS, EPISODES = 3, 12
"""Steps of a run, and episodes of a step."""
WORKERS = "torch on two workers"


def kill_a_worker() -> None:
    workers = [child for child in psutil.Process().children() if "skyrl.backends.torch" in " ".join(child.cmdline())]
    max(workers, key=lambda worker: worker.pid).kill()


class Killing(Env[NoSettings]):
    """The reward is a hash of what the model said. Some episodes kill a worker."""

    kills: ClassVar[set[int]] = set()
    """Numbers of these episodes, counted over all runs of this process."""
    seen: ClassVar[int] = 0

    async def step(self, action: str) -> StepResult:
        if Killing.seen in Killing.kills:
            kill_a_worker()
        Killing.seen += 1
        return StepResult([], zlib.crc32(action.encode()) % 11 / 10, done=True)


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(commands, "PAUSES_S", (0.0,))
    monkeypatch.setattr(Killing, "seen", 0)
    path = tmp_path / "rows.jsonl"
    write_rows(path, ({"prompt": row["prompt"]} for row in arithmetic_rows(4 * STEPS, seed=0, largest=9)))
    return path


@pytest.fixture
def run(rows, tiny_model, tmp_path) -> list[str]:
    """Arguments of a run on two workers, which Killing may kill."""
    return command(rows, tiny_model, tmp_path / "run", "environment.env_class=test_restarts:Killing", strategy=WORKERS)


@pytest.mark.full
def test_a_run_whose_worker_is_killed_equals_the_undisturbed_one(run, rows, tiny_model, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Killing, "kills", {EPISODES + 2})  # in step 2
    assert commands.rl(run) == 0
    said = capfd.readouterr().err
    assert "restart 1 of 3 in 0 s, from the newest checkpoint" in said
    assert "the backend is lost: worker of rank 1" in said
    monkeypatch.setattr(Killing, "kills", set())
    whole = tmp_path / "whole"
    train(command(rows, tiny_model, whole, "environment.env_class=test_restarts:Killing", strategy=WORKERS))
    check_equal(tmp_path / "run", whole, STEPS, ["policy"])


@pytest.mark.full
def test_a_run_that_may_not_restart_ends_with_the_cause_in_one_line(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Killing, "kills", {EPISODES + 2})
    assert commands.rl([*run, "trainer.max_restarts=0"]) == 1
    said = capfd.readouterr().err
    assert "skyrl train rl: error: worker of rank 1" in said and "was killed by SIGKILL" in said
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]
    assert commands.rl(run) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]


# -- how often ---------------------------------------------------------------------------------------------------------

RL, SFT = SkyRLTrainConfig, SFTConfig


def stopped(cause: Exception) -> BackendStopped:
    error = BackendStopped("the backend has stopped")
    error.__cause__ = cause
    return error


def attempts(monkeypatch, config: SkyRLTrainConfig | SFTConfig, *outcomes: Exception) -> tuple[int, list[float]]:
    """Number of attempts of a run that fails in these ways until it succeeds, and the pauses before them."""
    left, pauses = list(outcomes), []
    monkeypatch.setattr("time.sleep", pauses.append)

    def once() -> None:
        if left:
            raise left.pop(0)

    try:
        train_with_restarts(once, config.restarts)
    except (BackendLost, BackendStopped):
        assert len(outcomes) - len(left) == len(pauses) + 1
        return -len(pauses) - 1, pauses
    return len(pauses) + 1, pauses


LOST = BackendLost("worker of rank 1 is gone")


def test_there_are_pauses_from_the_second_restart_on(monkeypatch):
    config = RL.from_cli_overrides(["trainer.max_restarts=5"])
    losses = [stopped(LOST) for _ in range(4)]
    assert attempts(monkeypatch, config, *losses) == (5, [0, 10, 60, 60])


def test_workers_that_do_not_start_again_use_up_restarts(monkeypatch):
    config = RL.from_cli_overrides(["trainer.max_restarts=3"])
    assert attempts(monkeypatch, config, stopped(LOST), LOST, LOST, LOST)[0] == -4


@pytest.mark.parametrize(
    ("config", "failure"),
    [
        (RL.from_cli_overrides([]), LOST),  # at the first start
        (RL.from_cli_overrides([]), stopped(KeyError("a defect"))),
        (RL.from_cli_overrides(["trainer.max_restarts=0"]), stopped(LOST)),
        (RL.from_cli_overrides(["trainer.resume_mode=none"]), stopped(LOST)),
        (RL.from_cli_overrides(["trainer.eval_only=true"]), stopped(LOST)),
        (SFT.from_cli_overrides(["ckpt_path=there"]), stopped(LOST)),  # keeps no checkpoints
        (SFT.from_cli_overrides(["ckpt_path=there", "ckpt_interval=5", "resume_from=none"]), stopped(LOST)),
    ],
)
def test_nothing_is_restarted_that_would_fail_again_or_begin_anew(monkeypatch, config, failure):
    assert attempts(monkeypatch, config, failure) == (-1, [])


def test_fine_tuning_with_checkpoints_is_restarted(monkeypatch):
    config = SFT.from_cli_overrides(["ckpt_path=there", "ckpt_interval=5"])
    assert attempts(monkeypatch, config, stopped(LOST)) == (2, [0])


def no_room() -> ConfigError:
    """Error of a cluster that lacks a node."""
    error = ConfigError("workers=ray: 4 x (1 GPU) were asked for, and not to be had within 180 s")
    error.__cause__ = RequestError(str(error))
    return error


def test_a_restart_that_finds_no_room_is_tried_again(monkeypatch):
    config = RL.from_cli_overrides([])
    assert attempts(monkeypatch, config, stopped(LOST), no_room()) == (3, [0, 10])


def test_a_start_that_finds_no_room_is_not(monkeypatch):
    with pytest.raises(ConfigError, match="not to be had"):
        attempts(monkeypatch, RL.from_cli_overrides([]), no_room())


def test_the_lost_backend_is_freed_before_the_next_one_is_loaded(monkeypatch):
    monkeypatch.setattr(commands, "PAUSES_S", (0.0,))
    backends = []

    def once() -> None:
        if not backends:
            backend = np.zeros(1)
            backends.append(weakref.ref(backend))
            try:
                raise BackendLost("worker of rank 1 is gone")
            except BackendLost as error:
                raise stopped(error) from error
        assert backends[0]() is None

    train_with_restarts(once, 1)
