"""The benchmark of hostile tenants measures what it says: its attacks reach the server, its figures are right."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import zstandard

import bench_hostile
import victim
from attacks import ATTACKS, LISTING_KEY, SMALL, Size, bombs
from plain_http import PlainClient
from skyrl.tinker.wire import codec
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb

pytestmark = pytest.mark.full


def report(**changed) -> dict:
    return {"statuses": {"200": 3, "429": 1}, "requests": 4, "processor_s": 0.5, "largest_answer": 7, **changed}


class Attacked(NamedTuple):
    """Outcome of attacks on a server."""

    listed: int
    """Checkpoints of the key that has many."""
    alone: dict
    """Figures without an attack."""
    together: dict
    """Figures of all attacks at once."""
    reports: dict[str, dict]
    """Of each attacker."""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory) -> Iterator[Attacked]:
    with bench_hostile.start(tmp_path_factory.mktemp("server")) as server:
        bench_hostile.fill(server, SMALL)
        client = PlainClient(server.url, LISTING_KEY)
        listed = json.loads(client.request("GET", "/api/v1/checkpoints?limit=10000")[1])["checkpoints"]
        with bench_hostile.process(victim.run, server.url, bench_hostile.BASE_MODEL) as link:
            for seconds in (1.0, 4.0, 16.0):  # more where the machine has other work
                alone, _ = bench_hostile.measure(server, SMALL, [], seconds, link)
                if alone["heartbeats"] > 5 and alone["steps_per_s"] > 0:
                    break
            for seconds in (3.0, 9.0, 27.0):
                together, reports = bench_hostile.measure(server, SMALL, list(ATTACKS), seconds, link)
                if all(map(has_arrived, reports.values())):
                    break
            yield Attacked(len(listed), alone, together, reports)


def has_arrived(report: dict) -> bool:
    """Return True if an attack has reached the server."""
    return bool(report["statuses"] or report["sent_bytes"])


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_reaches_the_server(attacked, name: str):
    assert has_arrived(attacked.reports[name])


def test_the_victim_trains_and_sends_heartbeats(attacked: Attacked):
    assert attacked.alone["heartbeats"] > 5 and attacked.alone["steps_per_s"] > 0 and attacked.alone["failed"] == 0


def test_the_attackers_leave_the_processor_to_the_server(attacked: Attacked):
    assert attacked.together["attackers_share"] < 0.35


def test_the_listing_key_has_many_checkpoints(attacked: Attacked):
    assert attacked.listed == SMALL.listed + 1


def test_the_polled_result_is_large_in_full_size():
    assert 16 * Size().result_tokens * 8 > 8 * 2**20  # a token id and a log-probability of 4 bytes each


def test_bombs_are_small_and_stand_for_much():
    parts, zeros = bombs(Size(bomb_mib=16), "model")
    assert len(parts) < 300
    request = pb.ForwardBackwardRequest.FromString(zstandard.ZstdDecompressor().decompress(parts))
    assert len(request.data[0].model_input) == Size().empty_parts
    assert len(zeros) < 8192


def test_a_bomb_is_parsed():
    parts, _ = bombs(SMALL, "model")
    error = codec.decode_forward_backward(parts, codec.PROTOBUF, "zstd", 2**28).error
    assert error is not None


def test_figures_of_a_case():
    pulse = victim.Part(heartbeats_s=[0.1] * 99 + [1.1], statuses=Counter({429: 2}))
    training = victim.Part(steps=30, statuses=Counter({503: 1, 404: 1}), broken=2, failed=["optim_step: 404"])
    row = bench_hostile.figures(pulse, training, [report(), report()], [100.0, 350.0, 200.0], 10.0, survived=True)
    assert (row["p50_ms"], row["p99_ms"], row["p100_ms"]) == (100.0, pytest.approx(110.0), 1100.0)
    assert (row["steps_per_s"], row["peak_mib"], row["growth_mib"]) == (3.0, 350, 250)
    assert (row["victim_429"], row["victim_4xx"], row["victim_5xx"], row["broken"], row["failed"]) == (2, 1, 1, 2, 1)
    assert row["attacks_per_s"] == 0.8 and row["attackers_got"] == "200:6 429:2"
    assert row["attackers_share"] == pytest.approx(1.0 / (10.0 * (os.cpu_count() or 1)), abs=5e-4)


def test_a_restarted_api_is_a_failure():
    row = bench_hostile.figures(victim.Part(), victim.Part(), [], [100.0], 10.0, survived=False)
    assert row["failed"] == 1 and row["p99_ms"] == 10_000.0


@pytest.mark.parametrize(
    "changed", [{"p99_ms": 250.0}, {"of_alone": 0.4}, {"growth_mib": 3072}, {"failed": 1}], ids=lambda one: str(one)
)
def test_each_goal_can_be_missed(changed: dict):
    good = {"p99_ms": 249.9, "of_alone": 0.41, "growth_mib": 3071, "failed": 0}
    assert bench_hostile.missed(good) == [] and len(bench_hostile.missed({**good, **changed})) == 1
