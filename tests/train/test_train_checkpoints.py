"""Checkpoints of a run: whole or not there whenever the process is killed, found again, and nobody else's touched."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.errors import ConfigError, StorageError
from skyrl.train.checkpoints import (
    BEST,
    MARKER,
    ROLLOUTS,
    STATE,
    Checkpoint,
    CheckpointStore,
    begin_writing,
)
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.ranking import BestEvaluation, Ranking
from skyrl.train.run_identity import identity_of
from skyrl.utils.failpoints import CRASH_POINTS
from skyrl.utils.files.atomic_folders import read_folder, write_folder
from skyrl.utils.locks.file_lock import LOCK

IDENTITY = {"trainer.policy.model.path": "tiny", "trainer.algorithm.advantage_estimator": "grpo"}
POINTS = sorted(
    name
    for name in CRASH_POINTS - {"trainer: step taken, not recorded"}  # that is before a save
    if name.startswith(("storage: ", "trainer: "))
)


def store(where: Path | str, keep: int = -1, ranking: Ranking | None = None, **identity: Any) -> CheckpointStore:
    return CheckpointStore(where, identity={**IDENTITY, **identity}, max_to_keep=keep, ranking=ranking)


def save(run: CheckpointStore, step: int, content: str = "weights") -> None:
    """Save as a trainer does, with a backend that writes one file."""
    with run.saving(step, {"content": content}, [{"step": step}] * step) as folder:
        write_folder(folder / "policy", {"model": f"{content} {step}".encode()})


def resumed(where: Path | str, **options: Any) -> Checkpoint:
    found = store(where, **options).resume("latest")
    assert found is not None
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def check_whole(checkpoint: Checkpoint) -> None:
    content = f"{checkpoint.state['content']} {checkpoint.step}"
    assert read_folder(checkpoint.model_path("policy")) == {"model": content.encode()}
    assert checkpoint.rollouts == [{"step": checkpoint.step}] * checkpoint.step


def test_what_was_saved_is_found_again(tmp_path):
    state = {"order": {"taken": 2**70, "seed": -1}, "kl": 0.1, "random": np.random.default_rng(1).bit_generator.state}
    rollouts = [{"text": "two\nlines", "logprobs": [0.1, -1e-300]}, {"text": ""}]
    with store(tmp_path).saving(7, state, rollouts) as folder:
        write_folder(folder / "policy", {"model": b"p"})
        write_folder(folder / "critic", {"model": b"c"})
    found = resumed(tmp_path)
    assert (found.step, found.state) == (7, state)
    assert read_folder(found.model_path("critic")) == {"model": b"c"}
    assert found.rollouts == rollouts


def test_the_layout_is_the_documented_one(tmp_path):
    save(store(tmp_path), 3)
    assert names(tmp_path) == ["global_step_3", MARKER]
    assert (tmp_path / MARKER).read_text() == "3"
    assert names(tmp_path / "global_step_3") == ["manifest.json", "policy", ROLLOUTS, STATE]


def test_the_state_is_that_at_the_beginning_of_the_save(tmp_path):
    state = {"content": {"value": 1}}
    with store(tmp_path).saving(1, state):
        state["content"]["value"] = 2
    assert resumed(tmp_path).state == {"content": {"value": 1}}


@pytest.mark.parametrize("mode", [None, "none"])
def test_a_run_that_is_to_begin_anew_does(tmp_path, mode):
    save(store(tmp_path), 3)
    assert store(tmp_path).resume(mode) is None


def test_latest_looks_into_its_own_folder_only(tmp_path):
    save(store(tmp_path / "ckpts" / "one"), 3)
    assert store(tmp_path / "ckpts").resume("latest") is None
    assert store(tmp_path / "ckpts" / "two").resume("latest") is None


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_or_algorithm_is_refused_with_both_values(tmp_path):
    save(store(tmp_path), 3)
    other = {"trainer.policy.model.path": "large", "trainer.algorithm.advantage_estimator": "rloo"}
    with pytest.raises(ConfigError) as error:
        resumed(tmp_path, **other)
    assert "advantage_estimator=grpo there and rloo here; trainer.policy.model.path=tiny there and large here" in str(
        error.value
    )


def test_another_dropout_is_refused_with_both_values_in_a_run_that_goes_on_and_in_one_that_begins_with_weights(
    tmp_path,
):
    save(store(tmp_path / "one"), 3)
    begun, name = tmp_path / "one" / "global_step_3", "trainer.policy.model.lora.dropout"
    with pytest.raises(ConfigError, match=rf"{name}=0.0 there and 0.25 here"):
        resumed(tmp_path / "one", **{name: 0.25})
    with pytest.raises(ConfigError, match=rf"trainer.init_from=.*{name}=0.0 there and 0.25 here"):
        store(tmp_path / "other", **{name: 0.25}).initial(str(begun), "trainer.init_from")
    save(store(tmp_path / "dropping", **{name: 0.25}), 3)
    with pytest.raises(ConfigError, match=r"init_from=.*model.lora.dropout=0.25 there and 0.0 here"):
        store(tmp_path / "other").initial(str(tmp_path / "dropping" / "global_step_3"), "init_from")


@pytest.mark.parametrize(
    "override",
    [
        "trainer.policy.model.path=other",
        "trainer.policy.model.lora.rank=8",
        "trainer.policy.model.lora.alpha=8",
        "trainer.policy.model.lora.target_modules=.*q_proj",
        "trainer.policy.model.lora.exclude_modules=.*q_proj",
        "trainer.policy.model.lora.dropout=0.25",
        "trainer.critic.model.path=other",
        "trainer.critic.model.lora.rank=8",
        "trainer.critic.model.lora.alpha=8",
        "trainer.algorithm.advantage_estimator=rloo",
        "trainer.algorithm.policy_loss_type=gspo",
        "trainer.algorithm.use_kl_loss=false",
    ],
)
def test_models_and_algorithm_are_what_a_checkpoint_is_of(override):
    base, given = (
        identity_of(SkyRLTrainConfig.from_cli_overrides(["trainer.critic.model.path=critic", *overrides]))
        for overrides in ([], [override])
    )
    path, value = override.split("=")
    assert {name for name in given if given[name] != base.get(name)} == {path}
    assert str(given[path]).lower() == value


def test_an_adapter_of_no_critic_is_nothing_that_a_checkpoint_is_of():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.critic.model.lora.rank=8"])
    assert identity_of(config) == identity_of(SkyRLTrainConfig())


def test_a_store_that_is_not_served_is_refused_rather_than_made_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.ckpt_path: path=ftp://bucket/run: ftp:// is not served; use s3"):
        CheckpointStore("ftp://bucket/run", identity=IDENTITY)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", [STATE, ROLLOUTS])
def test_a_damaged_state_is_refused(tmp_path, name):
    save(store(tmp_path), 1)
    path = tmp_path / "global_step_1" / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with pytest.raises(StorageError, match=f"is damaged: the hash of {name} differs"):
        resumed(tmp_path)


@pytest.mark.parametrize("content", [None, {"model": b"weights 1 of another checkpoint"}], ids=["missing", "exchanged"])
def test_a_model_that_is_not_the_one_that_was_saved_is_refused(tmp_path, content):
    save(store(tmp_path), 1)
    policy = tmp_path / "global_step_1" / "policy"
    if content is None:
        policy.rename(tmp_path / "elsewhere")
    else:
        write_folder(policy, content)
    with pytest.raises(StorageError, match="policy is missing or is not what was saved there"):
        resumed(tmp_path)


def test_a_folder_of_another_program_is_refused_and_left_as_it_is(tmp_path):
    foreign = tmp_path / "elsewhere" / "global_step_5"
    foreign.mkdir(parents=True)
    (foreign / "trainer_state.pt").touch()
    with pytest.raises(
        ConfigError, match=r"global_step_5 is no checkpoint of this trainer: it has no trainer_state\.json"
    ):
        store(tmp_path / "own").resume("from_path", str(foreign))
    assert names(foreign) == ["trainer_state.pt"]


def test_a_model_that_the_checkpoint_does_not_hold_is_refused(tmp_path):
    save(store(tmp_path), 1)
    with pytest.raises(StorageError, match="holds no critic"):
        resumed(tmp_path).model_path("critic")


# -- how many are kept, and whose -------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    return store(folder).steps()


SCORE = "eval/all/avg_score"


def ranked(folder: Path, mode: str = "max", keep: int = 1) -> CheckpointStore:
    return store(folder, keep, Ranking.of("trainer.best_metric", SCORE, mode))


def evaluated(run: CheckpointStore, scores: dict[int, float]) -> list[int]:
    """A checkpoint of each step, which has that score. Returns the steps that were the best so far."""
    best = []
    for step, score in scores.items():
        if run.judge(step, {SCORE: score, "eval/other": 0.0}):
            best.append(step)
        save(run, step)
    return best


@pytest.mark.parametrize(
    ("mode", "best", "kept"), [("max", [1, 3], [3, 6]), ("min", [1, 2, 5], [5, 6])], ids=["highest", "lowest"]
)
def test_the_checkpoint_of_the_best_evaluation_is_kept_beside_the_newest(tmp_path, mode, best, kept):
    run = ranked(tmp_path, mode)
    assert evaluated(run, {1: 0.5, 2: 0.25, 3: 0.75, 4: float("nan"), 5: 0.125, 6: 0.75}) == best
    assert steps(tmp_path) == kept and (tmp_path / BEST).read_text() == str(kept[0])
    assert run.best == BestEvaluation(kept[0], {"max": 0.75, "min": 0.125}[mode])


def test_a_resumed_run_knows_its_best_and_one_that_is_compared_otherwise_begins_anew(tmp_path):
    evaluated(ranked(tmp_path), {1: 0.5, 2: 0.25})
    run = ranked(tmp_path)
    run.resume("latest")
    assert evaluated(run, {3: 0.375, 4: 0.5}) == [] and steps(tmp_path) == [1, 4]
    other = ranked(tmp_path, "min")
    other.resume("latest")
    assert other.best is None and evaluated(other, {5: 0.9}) == [5]


def test_no_best_is_named_where_there_is_none(tmp_path):
    evaluated(ranked(tmp_path), {1: 0.5})
    other = ranked(tmp_path, "min")
    other.resume("latest")
    save(other, 2)
    assert not (tmp_path / BEST).exists()


def test_an_evaluation_before_the_first_step_is_no_best_and_its_metrics_are_looked_at(tmp_path):
    run = ranked(tmp_path)
    assert not run.judge(0, {SCORE: 0.5}) and run.best is None
    with pytest.raises(ConfigError, match="evaluations have no such metric"):
        run.judge(0, {"eval/loss": 1.0})


def test_a_run_that_goes_on_from_an_older_checkpoint_knows_the_best_until_then(tmp_path):
    evaluated(ranked(tmp_path, keep=-1), {1: 0.5, 2: 0.25, 3: 0.75})
    run = ranked(tmp_path, keep=-1)
    run.resume("from_path", str(tmp_path / "global_step_2"))
    assert run.best == BestEvaluation(1, 0.5)


def test_a_metric_that_evaluations_do_not_have_is_named_with_those_that_they_have(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.best_metric=eval/all/avg_score: .* but eval/loss; name one"):
        ranked(tmp_path).judge(1, {"eval/loss": 1.0})


def test_a_resumed_run_counts_the_checkpoints_that_it_made_before(tmp_path):
    save(store(tmp_path), 1)
    run = store(tmp_path, keep=1)
    run.resume("latest")
    save(run, 2)
    assert steps(tmp_path) == [2]


def test_checkpoints_of_another_run_and_folders_of_others_are_never_removed(tmp_path):
    save(store(tmp_path), 1)
    for name in ("global_step_0", "global_step_2_best", "notes"):
        (tmp_path / name).mkdir()
    run = store(tmp_path, keep=1)
    run.resume("none")
    for step in (2, 3):
        save(run, step)
    assert steps(tmp_path) == [0, 1, 3]
    assert {"global_step_2_best", "notes"} <= set(names(tmp_path))


def test_checkpoints_that_are_newer_are_said_and_stay(tmp_path, caplog):
    run = store(tmp_path)
    for step in (1, 2, 3):
        save(run, step)
    again = store(tmp_path, keep=1)
    again.resume("from_path", str(tmp_path / "global_step_1"))
    assert "continues from step 1 and will not resume from global_step_2, global_step_3, which" in caplog.text
    save(again, 2, "again")
    assert steps(tmp_path) == [2, 3]
    found = resumed(tmp_path)
    assert (found.step, found.state["content"]) == (2, "again")


OTHER_RUN = """
import sys
from skyrl.train.checkpoints import CheckpointStore
with CheckpointStore(sys.argv[1], identity={}).saving(1, {}) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_run_is_using_is_refused_and_nothing_in_it_tidied_up(tmp_path):
    command = [sys.executable, "-c", OTHER_RUN, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        temporary = Path(other.stdout.readline().strip())
        with pytest.raises(ConfigError, match=r"ckpt_path=.*/run: another run is using this folder; wait for its end"):
            store(tmp_path / "run").resume("latest")
        assert temporary.is_dir()
        other.stdin.close()
    assert other.returncode == 0
    assert store(tmp_path / "run").steps() == [1]


RUN_WITHOUT_CHECKPOINTS = """
import sys
from skyrl.train.checkpoints import CheckpointStore
CheckpointStore(sys.argv[1], identity={}).resume("latest")
print("running", flush=True)
sys.stdin.read()
"""


def test_a_run_has_its_folder_before_its_first_checkpoint(tmp_path):
    command = [sys.executable, "-c", RUN_WITHOUT_CHECKPOINTS, str(tmp_path / "new")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "running\n"
        with pytest.raises(ConfigError, match="another run is using this folder"):
            store(tmp_path / "new").resume("latest")
        other.stdin.close()
    assert store(tmp_path / "new").resume("latest") is None


# -- killed, or out of room -------------------------------------------------------------------------------------------

RUN = """
import json, sys
from pathlib import Path
from skyrl.train.checkpoints import CheckpointStore
from skyrl.utils.files.atomic_folders import write_folder
import numpy as np

folder, points, identity, point, when, again = sys.argv[1:]
run = CheckpointStore(folder, identity=json.loads(identity), max_to_keep=1)
run.resume("latest")

def save(step, content, arm=""):
    if arm == "models":
        Path(points, point).touch()
    with run.saving(step, {"content": content}, [{"step": step}] * step) as models:
        write_folder(models / "policy", {"model": f"{content} {step}".encode()})
        if arm == "state":
            Path(points, point).touch()

save(1, "old")
if again == "again":
    save(2, "old")
save(2, "new", when)
sys.exit(3)
"""


def killed_run(where: Path | str, points: Path, *arguments: str) -> None:
    points.mkdir()
    environment = {**os.environ, "SKYRL_CRASH_POINTS": str(points)}
    command = [sys.executable, "-c", RUN, str(where), str(points), json.dumps(IDENTITY), *arguments]
    assert subprocess.run(command, env=environment, timeout=60).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("point", "when", "again"),
    [
        (point, when, again)
        for point in POINTS
        for when in ("models", "state")
        for again in ("first", "again")
        # Only a folder that is replaced is moved aside; models go into a new one.
        if (again == "again" and when == "state") or point != "storage: older folder moved aside"
    ],
)
def test_a_killed_save_leaves_the_newest_checkpoint_whole(tmp_path, point, when, again):
    folder = tmp_path / "run"
    killed_run(folder, tmp_path / "points", point, when, again)
    run = store(folder, keep=1)
    found = run.resume("latest")
    assert found is not None
    check_whole(found)
    assert found.step == 2 if again == "again" or "newest named" in point else found.step == 1
    save(run, 3, "after")
    check_whole(resumed(folder))
    # A checkpoint that was in place and not yet the newest is newer than what is gone on from: it counts as the run's.
    assert names(folder) == ["global_step_3", MARKER]


FULL_DISK = """
import resource, sys
from skyrl.errors import StorageError
from tests.train.test_train_checkpoints import Path, save, store
run = store(Path(sys.argv[1]), keep=1)
save(run, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save(run, 10_000)
except StorageError as error:
    print(error)
"""


@pytest.mark.full
def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "global_step_10000: File too large; free space or check permissions" in run.stdout, run.stderr
    assert names(tmp_path) == ["global_step_1", MARKER]
    check_whole(resumed(tmp_path))


def test_a_model_that_was_not_written_wholly_makes_no_checkpoint(tmp_path):
    with pytest.raises(StorageError, match="policy was not written wholly"), store(tmp_path).saving(1, {}) as folder:
        (folder / "policy").mkdir()
    assert names(tmp_path) == []


def test_a_model_that_fails_leaves_the_folder_until_the_others_are_written(tmp_path):
    there = []

    async def fails():
        raise StorageError("the disk is full")

    async def written(folder: Path):
        for _ in range(20):
            await asyncio.sleep(0)
        there.append(folder.is_dir())

    async def both():
        saving = store(tmp_path).saving(1, {})
        await begin_writing(saving, lambda folder: [fails(), written(folder)], tmp_path / "global_step_1")

    with pytest.raises(StorageError, match="the disk is full"):
        asyncio.run(both())
    assert there == [True] and names(tmp_path) == []


def test_a_save_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="the backend failed"), store(tmp_path).saving(1, {}):
        raise RuntimeError("the backend failed")
    assert names(tmp_path) == []


def test_what_json_does_not_have_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"), store(tmp_path).saving(1, {"rows": {1, 2}}):
        raise AssertionError("unreachable")
    assert names(tmp_path) == []


def test_the_state_is_text_that_people_can_read(tmp_path):
    save(store(tmp_path), 1)
    content = json.loads((tmp_path / "global_step_1" / STATE).read_text())
    assert (content["global_step"], content["identity"], content["state"]) == (1, IDENTITY, {"content": "weights"})
