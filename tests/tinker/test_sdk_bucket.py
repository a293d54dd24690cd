"""The stock SDK trains on while its server's machine is lost: a bucket and PostgreSQL are all that is left of it."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from live import ADAM, new_trainer, sample, sequence, service, supervised
from skyrl.tinker.local_server import LocalServer
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.processes import ProcessIdentity
from tests.buckets import contents
from tests.tinker.test_postgres import cluster, url  # noqa: F401 (fixtures)
from tests.waiting import until

STEPS, PUBLISHED_AT, LOST_AT = 8, 3, 5
CONFIG = {"deterministic": True, "max_lora_rank": 8, "max_context_length": 64, "warm_up": False}


def server_of(folder: Path, model: Path, bucket: str, database: str) -> LocalServer:
    """A server on a machine whose disk is this folder."""
    options = {
        "backend": "jax",
        "backend-config": json.dumps(CONFIG),
        "checkpoints-base": f"{bucket}/server",
        "snapshots-in-bucket": "true",
        "database-url": database,
        "snapshot-every-steps": "3",
    }
    return LocalServer(folder, str(model), options, {"SKYRL_DATA": str(folder / "data")})


def lose(server: LocalServer) -> None:
    """The machine goes away, with all that runs on it and its disk."""
    processes = [ProcessIdentity.of(pid) for pid in server.pids() if pid is not None]
    for process in filter(None, processes):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    until(lambda: not any(process.runs for process in processes if process), "the server's processes are gone")
    server.stop()
    shutil.rmtree(server.folder)


@contextmanager
def stopped_at_the_end(server: LocalServer) -> Iterator[None]:
    try:
        yield
    finally:
        server.stop()


def saved(bucket: str, path: str) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    files = contents(ObjectStore(f"{bucket}/server"), f"{model.replace(':', '-')}/{kind}")
    (data,) = (data for key, data in files.items() if f"/{name}@" in key and key.endswith("state.safetensors"))
    return load(data)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_machine_that_is_lost_changes_nothing_bit_for_bit(tmp_path, tiny_model, bucket, url):  # noqa: F811
    """Two equal models of one server, of which the second loses its machine between a pass and its step."""
    first, second = (server_of(tmp_path / name, tiny_model, bucket, url) for name in ("first", "second"))
    second.port, second.url = first.port, first.url
    found: list[tuple[Any, ...]] = []
    with first, stopped_at_the_end(second), service(first) as client:
        for is_lost in (False, True):
            trainer, losses = new_trainer(client, first, seed=1), []
            for n in range(STEPS):
                losses.append(
                    dict(trainer.forward_backward([supervised(sequence(12, seed=n))], "cross_entropy").result().metrics)
                )
                if is_lost and n == LOST_AT:
                    lose(first)
                    second.start()
                trainer.optim_step(ADAM).result()
                if n == PUBLISHED_AT:
                    sampler = trainer.save_weights_and_get_sampling_client().result()
            sampled = sample(sampler, sequence(5), seed=1, stop=[]).sequences[0]
            path = trainer.save_state("state").result().path
            found.append((losses, sampled.tokens, sampled.logprobs, saved(bucket, path)))
    assert found[0][:-1] == found[1][:-1]
    calm, moved = (tensors for *_, tensors in found)
    assert calm.keys() == moved.keys()
    for name, tensor in calm.items():
        np.testing.assert_array_equal(moved[name], tensor, err_msg=name)
