"""The warm-up of a real server that nobody uses: it reaches its end, and from then on nothing compiles."""

import json
import time

import httpx
import pytest

from live import new_trainer, sample, sequence, service, step, supervised
from skyrl.tinker.local_server import LocalServer

PATIENCE_S = 300.0
BACKEND = {
    "warm_up": True,
    "max_lora_rank": 8,
    "max_context_length": 64,
    "train_tile_tokens": 32,
    "sample_max_num_sequences": 2,
    "kv_cache_gib": 0.01,
}
"""Few programs, of each kind some."""


def compiled(server: LocalServer) -> dict[str, int]:
    """Return the number of programs that the engine has, by purpose."""
    return httpx.get(f"{server.url}/api/v1/healthz").json()["engine"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_an_idle_server_reaches_all_its_programs_and_first_requests_compile_nothing(tmp_path, tiny_model):
    with LocalServer(tmp_path, str(tiny_model), {"backend-config": json.dumps(BACKEND)}) as server:
        deadline = time.monotonic() + PATIENCE_S
        for line in ("programs of training are ready", "programs of sampling are ready"):
            while line not in server.log_path.read_text():
                assert time.monotonic() < deadline, server.log_tail()
                time.sleep(0.1)
        before = compiled(server)
        assert before.keys() == {"training_programs", "sampling_programs"} and min(before.values()) > 5
        with service(server) as client:
            trainer = new_trainer(client, server, rank=8)
            step(trainer, [supervised(sequence(60)), supervised(sequence(9))])
            sampler = trainer.save_weights_and_get_sampling_client().result()
            sample(sampler, sequence(30), num_samples=2, max_tokens=20, seed=1)
        assert compiled(server) == before
