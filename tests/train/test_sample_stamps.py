"""Stamps of samples as trainers read them: they are kept, and a wrong one ends the run."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from skyrl.errors import WrongWeights
from skyrl.train.config import SamplingParams
from skyrl.train.policies.on_backend import BackendModels, BackendPolicy
from skyrl.train.rollouts.episode import FATAL
from skyrl.train.rollouts.records import as_record, as_state, from_state
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Trajectory, TrajectoryId, Turn
from skyrl.types import LoraConfig, Origin
from tests.fakes import FakeBackend, FakeConfig

PARAMS = SamplingParams(max_generate_length=4)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend("fake", FakeConfig())


@pytest.fixture
def policy(backend) -> Iterator[BackendPolicy]:
    with BackendModels(backend) as models:
        yield models.policy("policy", seed=0)


async def sampled(policy: BackendPolicy, version: int) -> Sampled:
    await policy.publish(version)
    return await policy.sample([3, 1, 4], PARAMS, "session")


def test_a_trainers_sample_has_the_stamp_of_its_sampler(backend, policy):
    async def run() -> list[Sampled]:
        await policy.create(LoraConfig(rank=4, seed=0))
        return [await sampled(policy, version) for version in (0, 3)]

    for version, one in zip((0, 3), asyncio.run(run()), strict=True):
        assert one.policy_version == version
        assert one.origins == (Origin(0, f"policy/{version}", backend.base_id),)


def test_a_sample_of_other_weights_ends_the_run_with_both_named(backend, policy):
    async def run() -> None:
        await policy.create(LoraConfig(rank=4, seed=0))
        await sampled(policy, 0)
        backend.base_id = "swapped"
        await sampled(policy, 1)

    told = r"asked of version=policy/1 on base=base of the fake, and drawn from version=policy/1 on base=swapped"
    with pytest.raises(WrongWeights, match=told):
        asyncio.run(run())
    assert WrongWeights in FATAL


def test_dumps_and_states_tell_where_each_part_of_a_sample_came_from():
    origins = (Origin(0, "policy/3", "base", "http://a"), Origin(1, "policy/3", "base", "http://b"))
    turn = Turn([1, 2], Sampled([5, 6], [-0.5, -1.0], "stop", 3, origins))
    trajectory = Trajectory(TrajectoryId("7", 1), (turn,), "stop", ())
    record = json.loads(json.dumps(as_record(trajectory)))
    assert [origin["engine"] for origin in record["turns"][0]["origins"]] == ["http://a", "http://b"]
    assert from_state(json.loads(json.dumps(as_state(trajectory)))).turns[0].sampled.origins == origins
