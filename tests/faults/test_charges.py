"""The ledger under kill -9: its tokens are those that stock clients sent, and were answered, whatever died meanwhile.

Real processes with the fake backend, whose sampled tokens depend on the seed, which the server draws anew for a sample
that is sent again.
"""

import json
import random
import threading
import traceback
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path

import tinker

from live import API_KEY, datum, new_trainer, sample, step
from skyrl.tinker.local_server import LocalServer, close_client
from tests.faults.diary import Diary
from tests.faults.killer import Killer
from tests.tinker.test_ledger import window

KILLS = ["engine", "api: sample charged, not answered", "both"]
FINISH_S = 120.0


class Counting:
    """A client that trains and samples until it is told to end, and counts tokens."""

    def __init__(self, server: LocalServer, diary: Diary, name: str):
        self.counts: Counter[str] = Counter()
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run, args=[server, diary, name], daemon=True)

    def _run(self, server: LocalServer, diary: Diary, name: str) -> None:
        try:
            client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
            self._work(client, server, diary, name)
            close_client(client)
        except BaseException:
            diary.fail(name, traceback.format_exc())

    def _work(self, client: tinker.ServiceClient, server: LocalServer, diary: Diary, name: str) -> None:
        trainer = new_trainer(client, server)
        base = client.create_sampling_client(base_model=server.base_model).result()
        number = 0
        while not self.ending.is_set():
            number += 1
            tokens = [100 + number % 50] * (3 + number % 7)
            step(trainer, [datum(tokens)])
            self.counts["trained"] += len(tokens) - 1
            trainer.forward([datum(tokens)], "cross_entropy").result()
            self.counts["forward"] += len(tokens) - 1
            for sampler in (base, trainer.save_weights_and_get_sampling_client().result()):
                answer = sample(sampler, tokens, num_samples=3, max_tokens=20, temperature=1.0)
                self.counts["prompt"] += len(tokens)
                self.counts["sampled"] += sum(len(one.tokens) for one in answer.sequences)
                self.counts["samples"] += len(answer.sequences)
            diary.note(name, "round", number)


def charged(server: LocalServer) -> Counter[str]:
    """Tokens and samples in the ledger, by kind."""
    query = urllib.parse.urlencode(window())
    request = urllib.request.Request(
        f"{server.url}/api/v1/billing/usage/events?{query}", headers={"X-API-Key": API_KEY}
    )
    with urllib.request.urlopen(request) as response:
        infos = [event["event_info"] for event in json.load(response)["data"]]
    names = {"sampling_prefill": "prompt", "sampling_sample": "sampled"}
    count: Counter[str] = Counter()
    for info in infos:
        kind = "forward" if info.get("forward_only") else names.get(info["type"], "trained")
        count[kind] += info.get("token_count", 0)
        count["samples"] += info.get("sample_count", 0)
    return count


def test_tokens_and_samples_in_the_ledger_are_those_that_clients_counted(tmp_path: Path):
    points = tmp_path / "crash"
    points.mkdir()
    options = {"backend": "tests.fakes:FakeBackend", "snapshot-every-steps": "3"}
    with LocalServer(tmp_path / "server", "fake/model", options, {"SKYRL_CRASH_POINTS": str(points)}) as server:
        diary = Diary(["one", "two"])
        clients = [Counting(server, diary, name) for name in diary.rounds]
        killer = Killer(server, diary, points, random.Random(0))
        for client in clients:
            client.thread.start()
        for what in KILLS:
            killer.kill(what)
        for client in clients:
            client.ending.set()
        for client in clients:
            client.thread.join(FINISH_S)
            diary.check()
            assert not client.thread.is_alive()
        print(killer.report())
        assert charged(server) == clients[0].counts + clients[1].counts
