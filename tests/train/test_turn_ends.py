"""Ends of turns: the template's end of a turn ends what is sampled, whatever the model's files name as the end.

A random model says any token sooner or later: each test writes a template that ends turns with one that it says.
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from skyrl.backends.async_client import BackendClient
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.train.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from skyrl.train.policies.on_backend import BackendPolicy
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.rollouts import Rollouts
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Trajectory
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import LoraConfig
from skyrl.utils.tokenizer import Tokenizer

PROMPT = [5, 200, 33, 7]
LENGTH = 60


def policy_of(client: BackendClient, name: str) -> BackendPolicy:
    policy = BackendPolicy(client, name, seed=3)

    async def begin() -> None:
        await policy.create(LoraConfig(rank=4, seed=0))
        await policy.publish(0)

    asyncio.run(begin())
    return policy


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    """A model of few tokens: many of what it says are special ones."""
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 16}
    return make_model(tmp_path_factory.mktemp("model") / "small", vocab=300, **sizes)


@pytest.fixture(scope="module")
def policy(small_model) -> Iterator[BackendPolicy]:
    with BackendClient(TorchBackend(str(small_model), TorchBackendConfig(train_tile_tokens=64))) as client:
        yield policy_of(client, "ends")


def sampled(policy: BackendPolicy, session: str = "0") -> Sampled:
    return asyncio.run(policy.sample(PROMPT, SamplingParams(max_generate_length=LENGTH), session))


def played(policy: BackendPolicy, model: Path, **options) -> Trajectory:
    """A trajectory of one turn."""
    config = GeneratorConfig.from_dict_config(
        {"max_input_length": 4096, "sampling_params": {"max_generate_length": LENGTH}, **options}
    ).resolve()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rollouts = Rollouts(config, EnvironmentConfig().resolve(), tokenizer, policy)
    prompt = Prompt([{"role": "user", "content": "Say four."}], "rewarding:Content", "row")
    (trajectory,) = asyncio.run(rollouts.collect([prompt]))[:1]
    return trajectory


def first_added(response: Sampled, model: Path) -> int:
    """Place of the first token of the tokenizer's added ones that a response has, and that does not end it."""
    added = set(AutoTokenizer.from_pretrained(model).get_added_vocab().values())
    return next(at for at, token in enumerate(response.token_ids[:-1]) if token in added)


def ending_with(end: str) -> str:
    said = "{{ one.content }}{% if one.role == 'assistant' %}" + end + "{% endif %}"
    return "{% for one in messages %}" + said + "{% endfor %}"


def test_a_turn_of_a_rollout_ends_where_its_template_ends_it(policy, small_model, tmp_path):
    def play(end: str) -> Trajectory:
        (tmp_path / "t.jinja").write_text(ending_with(end))
        return played(policy, small_model, chat_template={"source": "file", "name_or_path": str(tmp_path / "t.jinja")})

    free = play("<|im_end|>")
    at = first_added(free.turns[0].sampled, small_model)
    end = Tokenizer(small_model).decode(free.turns[0].sampled.token_ids[at : at + 1])
    trajectory = play(end)
    (turn,) = trajectory.turns
    assert turn.sampled.token_ids == free.turns[0].sampled.token_ids[: at + 1]
    assert (trajectory.stop_reason, turn.closing_ids) == ("stop", [])


def test_a_sample_ends_where_the_template_of_the_models_folder_ends_a_turn(policy, small_model, tmp_path):
    free = sampled(policy)
    at = first_added(free, small_model)
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    end = Tokenizer(small_model).decode(free.token_ids[at : at + 1])
    (folder / "chat_template.jinja").write_text(ending_with(end))
    told: list[str] = []
    backend = TorchBackend(str(folder), TorchBackendConfig(train_tile_tokens=64), told.append)
    with BackendClient(backend) as client:
        ended = sampled(policy_of(client, "ends"))
    assert (ended.token_ids, ended.stop_reason) == (free.token_ids[: at + 1], "stop")
    assert sum(f"ends a turn with {end!r}" in line for line in told) == 1
