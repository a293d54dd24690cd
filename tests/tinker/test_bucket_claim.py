"""One server at a bucket: one that has lost its claim ends, and one that is told to ends in time."""

from functools import partial

import pytest

from skyrl.tinker.checkpoints import state_locks
from skyrl.utils.locks.remote_claim import LOCK, RemoteClaim
from tests.buckets import Proxy
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.processes import ServerProcess, running, started
from tests.tinker.test_bucket_faults import submit_save
from tests.waiting import BOUND_S, until

OTHER = b'{"id": "of the server that took it"}'


def test_a_server_whose_bucket_another_has_taken_says_so(tmp_path, bucket, store, monkeypatch):
    monkeypatch.setattr(state_locks, "RemoteClaim", partial(RemoteClaim, beat_s=0.05))
    with LiveServer(tmp_path, checkpoints_base=f"{bucket}/server") as server:
        wait_until_ready(server)
        store.put(LOCK, OTHER)
        failure = until(lambda: server.app.state.server.failure, "the server has found out")
    assert failure.startswith(f"checkpoints_base={bucket}/server: another server has taken the bucket")


@pytest.mark.full
def test_a_server_whose_bucket_another_has_taken_ends_and_leaves_the_bucket_to_it(tmp_path, bucket, store):
    with running(tmp_path, checkpoints_base=f"{bucket}/server") as server:
        seq_id = server.train(model := server.model(), 1)
        wanted = server.logprobs(model, seq_id)
        store.put(LOCK, OTHER)
        status, output = server.ended()
    said = [line for line in output.splitlines() if "another server has taken the bucket" in line]
    assert status == 1 and len(said) == 1 and said[0].startswith("skyrl: error: checkpoints_base=s3://"), output
    assert store.get(LOCK) == OTHER
    store.delete([LOCK])
    with running(tmp_path, checkpoints_base=f"{bucket}/server") as server:
        assert server.logprobs(model, seq_id + 1) == wanted
        server.process.terminate()
        server.ended()


# -- stop while the store hangs ---------------------------------------------------------------------------------------

FOREVER_S = 600.0


def terminate(server: ServerProcess) -> None:
    """See the server through its end, which is not to take as long as the store does."""
    server.process.terminate()
    server.process.wait(BOUND_S)
    server.ended()


@pytest.mark.full
@pytest.mark.parametrize("hanging", ["state.json", "/server"])
def test_a_server_ends_in_time_while_the_store_hangs_and_saves_after_its_start(
    tmp_path, bucket, s3_proxy: Proxy, hanging
):
    options = {"checkpoints_base": f"{bucket}/server", "shutdown_timeout_sec": 1}
    with running(tmp_path, **options) as server:
        model = server.model()
        seq_id = server.train(model, 1)
        s3_proxy.trouble = lambda method, path: FOREVER_S if hanging in path else None
        seen = len(s3_proxy.seen)
        request = submit_save(server, model, seq_id, "a")
        until(lambda: any(hanging in path for path in s3_proxy.seen[seen:]), "the store hangs")
        terminate(server)
    s3_proxy.trouble = lambda method, path: None
    with running(tmp_path, **options) as server:
        assert server.result(request)["path"] == f"tinker://{model}/weights/a"
        terminate(server)


@pytest.mark.full
@pytest.mark.parametrize("hanging", [".lock", ".state-id"])
def test_a_server_that_starts_while_the_store_hangs_ends_in_time(tmp_path, bucket, s3_proxy: Proxy, hanging):
    s3_proxy.trouble = lambda method, path: FOREVER_S if hanging in path else None
    options = {"checkpoints_base": f"{bucket}/server", "snapshots_in_bucket": "true", "shutdown_timeout_sec": 1}
    with started(tmp_path, **options) as server:
        until(lambda: any(hanging in path for path in s3_proxy.seen), "the store hangs")
        terminate(server)
