"""Checkpoints and exports of a run in a bucket: what holds on disk holds there. On moto's S3 server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sft.test_sft_trainer import Killed, config, train, without_times
from test_train_checkpoints import SCORE, check_whole, killed_run, resumed, save, store

from skyrl.errors import ConfigError, StorageError
from skyrl.train.checkpoints import BEST, MARKER, ROLLOUTS, STATE, begin_writing
from skyrl.train.places import place_of
from skyrl.train.ranking import Ranking
from skyrl.train.results import result_in
from skyrl.train.tracking.dumps import dump_eval_results, dump_rollouts, remove_old_dumps
from skyrl.train.tracking.tracker import METRICS_FILE, read_metrics
from skyrl.utils.failpoints import CRASH_POINTS
from skyrl.utils.files.atomic_folders import MANIFEST, read_folder, write_folder
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.files.remote_folders import fetch_folder
from skyrl.utils.locks.remote_claim import LOCK, RemoteClaim
from tests.buckets import Proxy, contents, files_in

POINTS = sorted(
    name for name in CRASH_POINTS if name.startswith(("bucket: ", "storage: files", "trainer: ")) and "step" not in name
)


@pytest.fixture(params=["disk", "s3"])
def where(request, tmp_path) -> str:
    """Path or URL of a run's checkpoints."""
    return f"{request.getfixturevalue('bucket')}/run" if request.param == "s3" else str(tmp_path / "run")


def another_machine(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYRL_DATA", str(tmp_path / "another machine"))


# -- on disk and in a bucket ------------------------------------------------------------------------------------------


def test_what_was_saved_is_found_again(where):
    run = store(where)
    save(run, 3)
    save(run, 7, "newer")
    found = resumed(where)
    check_whole(found)
    assert (found.step, found.run_id, found.title) == (7, run.run_id, f"{where}/global_step_7")


def test_nothing_is_found_where_nothing_is(where):
    assert store(where).resume("latest") is None and store(where).steps() == []


def test_a_run_goes_on_from_the_path_that_it_is_given(where):
    save(store(where), 1)
    save(store(where), 2)
    found = store(f"{where}-other").resume("from_path", f"{where}/global_step_1")
    assert found is not None and found.step == 1
    check_whole(found)


def test_another_runs_weights_are_begun_with(where):
    save(store(where), 2)
    check_whole(store(f"{where}-other").initial(f"{where}/global_step_2", "trainer.init_from"))


def test_a_checkpoint_that_is_missing_is_not_replaced_by_a_fresh_start(where):
    run = store(where)
    save(run, 1)
    run.place.write(MARKER, b"4")
    with pytest.raises(StorageError, match=rf"{where}/global_step_4 is missing; {where} holds global_step_1: set"):
        resumed(where)


@pytest.mark.parametrize("content", [b"", b"three", b"\xff"])
def test_a_damaged_marker_is_refused(where, content):
    run = store(where)
    save(run, 1)
    run.place.write(MARKER, content)
    with pytest.raises(StorageError, match=rf"{where}/{MARKER} (holds|cannot be read)"):
        resumed(where)


@pytest.mark.parametrize(("keep", "kept"), [(-1, [1, 2, 3, 10]), (1, [10]), (3, [2, 3, 10])])
def test_the_newest_checkpoints_are_kept(where, keep, kept):
    run = store(where, keep)
    for step in (1, 2, 3, 10):
        save(run, step)
    assert run.steps() == kept


def test_the_best_is_kept_besides(where):
    ranking = Ranking.of("best_metric", SCORE, "max")
    run = store(where, keep=1, ranking=ranking)
    for step, score in enumerate([0.1, 0.9, 0.3], 1):
        run.judge(step, {SCORE: score})
        save(run, step)
    assert run.steps() == [2, 3] and run.place.read(BEST) == b"2"
    again = store(where, keep=1, ranking=ranking)
    again.resume("latest")
    assert again.best is not None and again.best.step == 2
    assert not again.judge(4, {SCORE: 0.5})


def test_a_step_that_is_saved_again_takes_the_place_of_the_one_before(where):
    run = store(where)
    save(run, 2, "old")
    save(run, 2, "new")
    found = resumed(where)
    check_whole(found)
    assert found.state == {"content": "new"}


def test_a_checkpoint_of_another_run_is_set_aside(where, tmp_path):
    save(store(where), 2, "theirs")
    save(store(where), 2, "ours")
    aside = next(name for name in store(where).place.names() if ".of-" in name)
    assert read_folder(store(where).place.fetch(aside) / "policy") == {"model": b"theirs 2"}
    check_whole(resumed(where))


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("when", ["models", "state"])
def test_a_killed_save_leaves_the_newest_checkpoint_whole(bucket, tmp_path, point, when):
    """Killed where it takes the place of one of the same step. The next process finds one of the two."""
    killed_run(f"{bucket}/run", tmp_path / "points", point, when, "again")
    run = store(f"{bucket}/run", keep=1)
    found = run.resume("latest")
    assert found is not None and found.step == 2
    check_whole(found)
    save(run, 3, "after")
    check_whole(resumed(f"{bucket}/run"))
    assert [name for name in run.place.names() if name != LOCK] == ["global_step_3", MARKER]


# -- in a bucket ------------------------------------------------------------------------------------------------------


def test_the_layout_is_the_documented_one(bucket):
    run = store(f"{bucket}/run")
    save(run, 3)
    there = files_in(ObjectStore(f"{bucket}/run"))
    files = [STATE, ROLLOUTS, MANIFEST, "policy/model", f"policy/{MANIFEST}"]
    assert there.keys() == {MARKER, LOCK, *(f"global_step_3/{name}" for name in files)}
    assert there[MARKER] == b"3"
    assert [path.name for path in run.folder.iterdir()] == [".lock"]


def test_another_machine_goes_on(bucket, tmp_path, monkeypatch):
    run = store(f"{bucket}/run")
    run.folder.mkdir(parents=True)
    (run.folder / METRICS_FILE).write_text('{"step": 3, "loss": 1.5}\n')
    save(run, 3)
    another_machine(monkeypatch, tmp_path)
    check_whole(resumed(f"{bucket}/run"))
    assert read_metrics(store(f"{bucket}/run").folder) == [{"step": 3, "loss": 1.5}]


@pytest.mark.full
def test_a_bucket_that_is_down_in_mid_save_leaves_the_checkpoint_before(bucket, s3_proxy: Proxy, monkeypatch):
    save(store(f"{bucket}/run"), 1)
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.3")
    run = store(f"{bucket}/run")
    run.resume("latest")
    s3_proxy.trouble = lambda method, path: "refuse" if method == "PUT" and "global_step_2/man" in path else None
    with pytest.raises(StorageError, match=r"cannot write .*/global_step_2/manifest\.json: Please reduce your request"):
        save(run, 2)
    assert store(f"{bucket}/run").steps() == [1]
    check_whole(resumed(f"{bucket}/run"))
    s3_proxy.trouble = lambda method, path: None
    s3_proxy.seen.clear()
    save(run, 2)
    sent = [seen for seen in s3_proxy.seen if seen.startswith("PUT") and "global_step_2" in seen]
    assert [one.rpartition("/")[2] for one in sent] == [MANIFEST]  # the rest was there
    check_whole(resumed(f"{bucket}/run"))


@pytest.mark.full
def test_what_was_not_sent_wholly_is_removed_with_the_next_that_are_too_many(bucket, s3_proxy: Proxy, monkeypatch):
    monkeypatch.setenv("SKYRL_BUCKET_RETRY_S", "0.3")
    run = store(f"{bucket}/run", keep=1)
    s3_proxy.trouble = lambda method, path: "refuse" if method == "PUT" and "global_step_2/man" in path else None
    with pytest.raises(StorageError):
        save(run, 2)
    assert any("global_step_2" in key for key in contents(ObjectStore(f"{bucket}/run")))
    save(run, 3)
    assert not any("global_step_2" in key for key in contents(ObjectStore(f"{bucket}/run")))


@pytest.mark.full
def test_steps_go_on_while_a_checkpoint_is_sent(bucket, s3_proxy: Proxy):
    run, steps = store(f"{bucket}/run"), 0

    async def written(folder: Path) -> None:
        write_folder(folder, {"model": b"weights 1"})

    async def both() -> Any:
        nonlocal steps
        saving = run.saving(1, {"content": "weights"}, [{"step": 1}])
        task = begin_writing(saving, lambda folder: [written(folder / "policy")], run.title_of(1))
        s3_proxy.trouble = lambda method, path: 0.1 if method == "PUT" else None
        while not task.done():
            await asyncio.sleep(0.01)
            steps += 1
        return await task

    assert asyncio.run(both()) == f"{bucket}/run/global_step_1" and steps > 10
    check_whole(resumed(f"{bucket}/run"))


def test_a_second_run_is_refused_by_the_url(bucket, tmp_path, monkeypatch):
    holder = RemoteClaim(ObjectStore(f"{bucket}/run"))
    assert holder.take()
    with pytest.raises(ConfigError, match=rf"trainer\.ckpt_path={bucket}/run: another run is using this folder"):
        store(f"{bucket}/run").resume("latest")
    holder.release()


# -- exports and dumps ------------------------------------------------------------------------------------------------


def test_dumps_of_the_newest_steps_are_kept(where):
    for step in (1, 2, 3):
        dump_rollouts(where, step, [{"step": step}])
        dump_eval_results(where, step, [], {SCORE: 0.5})
    remove_old_dumps(where, 3, 2)
    place = place_of(where)
    assert place.names("dumped_rollouts") == ["global_step_2.jsonl", "global_step_3.jsonl"]
    assert place.names("dumped_evals") == ["global_step_2_evals", "global_step_3_evals"]


class Writing:
    """A learner that exports one file."""

    def __init__(self, content: bytes):
        self.content = content

    async def export_adapter(self, path: str) -> None:
        write_folder(path, {"adapter": self.content})


def test_a_model_that_a_run_leaves_sets_an_earlier_one_aside_or_takes_its_place(where, tmp_path):
    learners: list[Any] = [Writing(b"first"), Writing(b"second"), Writing(b"third")]
    for learner, keep_earlier in zip(learners, [True, True, False], strict=True):
        asyncio.run(result_in(where, 4, False).write(learner, keep_earlier))
    assert place_of(where).names() == ["model", "model.1"]
    assert read_folder(place_of(where).fetch("model")) == {"adapter": b"third"}
    assert read_folder(place_of(where).fetch("model.1")) == {"adapter": b"first"}
    assert str(result_in(where, 4, False).where) == f"{where}/model"


# -- a run ------------------------------------------------------------------------------------------------------------


def fetched(url: str, name: str, folder: Path) -> Path:
    fetch_folder(ObjectStore(url), name, folder)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_run(files: dict[str, bytes]) -> dict[str, Any]:
    """Files of a checkpoint, without the run's id and its folders."""
    state = json.loads(files[STATE])
    weights = {name: content for name, content in files.items() if "/" in name}
    return {"state": state["state"], "step": state["global_step"], **weights}


@pytest.mark.full
def test_a_killed_run_goes_on_on_another_machine(torch_client, tiny_model, bucket, tmp_path, monkeypatch):
    def settings(where: str, *more: str):
        folders = [f"ckpt_path={where}/run", f"export_path={where}/exports", "hf_save_interval=4", "save_model=true"]
        sizes = ["num_steps=4", "batch_size=4", "model.lora.rank=4"]
        return config(tiny_model, *folders, *sizes, "ckpt_interval=1", *more)

    _, whole, _ = train(torch_client, settings(str(tmp_path / "disk")), rank=4)
    with pytest.raises(Killed):
        train(torch_client, settings(bucket), rank=4, killed=3)
    another_machine(monkeypatch, tmp_path)
    _, rest, _ = train(torch_client, settings(bucket, "resume_from=latest"), rank=4)
    assert without_times(rest) == [row for row in without_times(whole) if row[0] > 2]
    there = tree(fetched(f"{bucket}/run", "global_step_4", tmp_path / "there"))
    assert without_run(there) == without_run(tree(tmp_path / "disk" / "run" / "global_step_4"))
    for name in ("global_step_4", "model"):
        exported = tree(fetched(f"{bucket}/exports", name, tmp_path / name))
        exported.pop(MANIFEST, None) if name != "model" else None
        assert exported == tree(tmp_path / "disk" / "exports" / name)
