"""Versions without a name of a long run: how many are kept, which are in use, what is told of those that went."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from skyrl.tinker.checkpoints import surplus_versions
from skyrl.tinker.checkpoints.offline import collect
from skyrl.tinker.checkpoints.retention import Rules
from skyrl.tinker.local_server import close_client
from tests.tinker.harness import wait_until_ready
from tests.tinker.test_retention import Server, failure_of_sample, folders

pytestmark = pytest.mark.full

PROMPT = tinker.ModelInput.from_ints([1, 2, 3])


class Run(Server):
    """A server, and a run on it that publishes a version at each step."""

    def __init__(self, folder: Path, **options: Any):
        super().__init__(folder, session_cleanup_interval_sec=-1, **options)

    def __enter__(self) -> "Run":
        super().__enter__()
        wait_until_ready(self)
        return self

    def steps(self, count: int, model: str | None = None, first: int = 1, **options: object) -> list[str]:
        """Samplers of as many versions of one model, all on disk."""
        model = model or self.model()
        samplers = [self.publish(model, number, number, **options) for number in range(first, first + count)]
        self.written()
        return samplers

    def let_pass(self, seconds: float) -> None:
        """Time passes in which nothing is sampled."""
        service, rules = self.app.state.server.service, self.collector._rules
        self.sql("UPDATE versions SET created_at = created_at - ?", seconds)
        self.collector._rules = Rules(self.config, rules.heard_since - seconds)
        last = service.version_use._last
        last.update({version: at - seconds for version, at in last.items()})

    def versions(self) -> list[int]:
        """Of all models, those that can be sampled."""
        return sorted(int(version.rpartition("@")[2]) for (version,) in self.sql("SELECT version FROM versions"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path, keep_last_ephemeral=3) as server:
        yield server


def test_newest_versions_are_kept_and_older_ones_go_with_their_files_while_their_session_goes_on(run):
    samplers = run.steps(5)
    run.let_pass(1000)
    run.collect()
    assert run.versions() == [3, 4, 5] and folders(run, "ephemeral") == ["3", "4", "5"]
    assert [run.sample(sampler, 1) for sampler in samplers[2:]]


def test_sampler_of_a_version_that_went_names_the_limit_and_the_way_out_also_after_a_restart(tmp_path):
    with Run(tmp_path, keep_last_ephemeral=3) as run:
        sampler = run.steps(4)[0]
        run.let_pass(1000)
        run.collect()
        failure = run.failure(run.submit_sample(sampler, 1)["request_id"])
        assert failure["category"] == "user"
        for text in ("keep_last_ephemeral=3", "--keep-last-ephemeral", "save_weights_for_sampler a name"):
            assert text in failure["error"]
    with Run(tmp_path, keep_last_ephemeral=50) as run:
        assert "keep_last_ephemeral=3" in failure_of_sample(run, sampler, 2)


def test_each_model_keeps_its_own_newest_versions(run):
    run.steps(4)
    run.steps(2)
    run.let_pass(1000)
    run.collect()
    assert run.versions() == [1, 2, 2, 3, 4]


def test_version_that_was_sampled_lately_stays_until_it_is_not_sampled_any_more(run):
    sampler = run.steps(5)[0]
    run.let_pass(1000)
    run.sample(sampler, 1)
    run.let_pass(599)
    run.collect()
    assert run.versions() == [1, 3, 4, 5] and run.sample(sampler, 2)
    run.let_pass(601)
    run.collect()
    assert run.versions() == [3, 4, 5]


def test_version_that_was_made_lately_stays_though_nothing_has_sampled_it_yet(run):
    run.steps(5)
    run.let_pass(500)
    run.collect()
    assert run.versions() == [1, 2, 3, 4, 5]


def test_version_that_a_sample_waits_for_stays(run):
    samplers = run.steps(5)
    run.crash()
    request = run.submit_sample(samplers[0], 1)["request_id"]
    run.let_pass(1000)
    run.collect()
    assert run.versions() == [1, 3, 4, 5]
    run.recover()
    assert run.outcome(request).status_code == 200


def test_version_that_is_not_on_disk_yet_stays(run):
    run.steps(5)
    run.sql("UPDATE versions SET digest = NULL WHERE version LIKE '%@1'")
    run.let_pass(1000)
    run.collect()
    assert run.versions() == [1, 3, 4, 5]


def test_version_that_inflight_samplers_sample_stays(run):
    model = run.model()
    inflight = run.steps(1, model, kind="inflight")[0]
    run.steps(4, model, first=2)
    run.let_pass(1000)
    run.collect()
    assert run.versions() == [1, 3, 4, 5] and run.sample(inflight, 1)


def test_after_a_restart_all_versions_stay_for_as_long_as_one_may_not_be_sampled(tmp_path):
    with Run(tmp_path, keep_last_ephemeral=0) as run:
        run.steps(5)
        run.let_pass(1000)
    with Run(tmp_path, keep_last_ephemeral=3) as run:
        run.collect()
        assert run.versions() == [1, 2, 3, 4, 5]
        run.let_pass(601)
        run.collect()
        assert run.versions() == [3, 4, 5]


def test_versions_past_the_bytes_of_a_model_go_but_never_the_newest(tmp_path):
    with Run(tmp_path, keep_last_ephemeral=0, max_ephemeral_gib=1e-9) as run:  # a byte
        sampler = run.steps(3)[0]
        run.let_pass(1000)
        run.collect()
        assert run.versions() == [3]
        assert "max_ephemeral_gib=1e-09" in failure_of_sample(run, sampler, 1)


def test_versions_within_the_bytes_of_a_model_stay(tmp_path):
    with Run(tmp_path, keep_last_ephemeral=0, max_ephemeral_gib=1e-3) as run:
        run.steps(3)
        run.let_pass(1000)
        run.collect()
        assert run.versions() == [1, 2, 3]


def test_files_of_a_version_that_a_sample_is_about_to_read_are_left_for_it(run):
    samplers = run.steps(5)
    [(version, folder)] = run.sql("SELECT version, folder FROM versions WHERE version LIKE '%@1'")
    path = run.config.checkpoints_base / folder
    run.let_pass(1000)
    use = run.app.state.server.service.version_use
    remove, begun = run.collector._remove, threading.Event()

    async def begin_then_remove(removals):  # between the rows' end and that of the files
        use.begin("r", version, str(path))
        begun.set()
        return await remove(removals)

    run.collector._remove = begin_then_remove
    run.collect()
    assert begun.is_set() and run.versions() == [3, 4, 5]
    assert path.exists() and "keep_last_ephemeral=3" in failure_of_sample(run, samplers[0], 1)


def test_samplers_without_weights_are_forgotten_but_for_the_newest(run, monkeypatch):
    monkeypatch.setattr(surplus_versions, "KNOWN_SAMPLERS", 2)
    samplers = run.steps(8)
    run.let_pass(1000)
    run.collect()
    assert [run.http.get(f"/samplers/{sampler}").status_code for sampler in samplers] == [404] * 3 + [200] * 5


def test_gc_leaves_versions_of_a_session_that_may_go_on(tmp_path):
    with Run(tmp_path, keep_last_ephemeral=0) as run:
        run.steps(5)
        run.let_pass(1000)
    collect(run.config.model_copy(update={"keep_last_ephemeral": 3}), dry_run=False, say=lambda line: None)
    assert folders(run, "ephemeral") == ["1", "2", "3", "4", "5"]


def test_a_loop_of_the_sdk_keeps_its_newest_eight_versions_and_the_one_that_it_evaluates(tmp_path):
    with Run(tmp_path) as run:
        client = tinker.ServiceClient(base_url=run.url, api_key="tml-test")
        trainer = client.create_lora_training_client("fake/model", rank=4).result()
        samplers = []
        for _ in range(12):
            datum = tinker.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [1, 2, 3], "weights": [1.0] * 3})
            trainer.forward_backward([datum], "cross_entropy").result()
            trainer.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
            samplers.append(trainer.save_weights_and_get_sampling_client().result())
            sampled(samplers[-1])
        before = [sampled(sampler) for sampler in samplers]
        run.written()
        run.let_pass(1000)
        assert sampled(samplers[0]) == before[0]
        run.collect()
        assert len(folders(run, "ephemeral")) == 9
        assert [sampled(samplers[0]), *map(sampled, samplers[4:])] == [before[0], *before[4:]]
        with pytest.raises(tinker.RequestFailedError, match=r"keep_last_ephemeral=8.*--keep-last-ephemeral"):
            sampled(samplers[1])
        close_client(client)


def sampled(sampler: tinker.SamplingClient) -> list[int]:
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    return sampler.sample(PROMPT, 1, params).result().sequences[0].tokens


def test_versions_that_a_kill_left_without_a_name_go_to_the_trash_however_many(tmp_path):
    """Their rows go first, many at a time."""
    with Run(tmp_path, keep_last_ephemeral=3) as run:
        run.steps(20)
        run.let_pass(1000)

        async def killed(removals):
            raise OSError("stands for a kill between rows and files")

        run.collector._remove = killed
        with pytest.raises(OSError):
            run.collect()
        assert len(run.versions()) == 3 and len(folders(run, "ephemeral")) == 20
        for path in (run.folder / "checkpoints").glob("*/ephemeral/*"):
            os.utime(path, (time.time() - 7200,) * 2)
    with Run(tmp_path, keep_last_ephemeral=3) as run:
        run.collect()
        assert run.collector.refusal is None and folders(run, "ephemeral") == ["18", "19", "20"]
        assert len(list((run.folder / "checkpoints" / ".trash").iterdir())) == 17
