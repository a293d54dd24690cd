"""Critic and reference by workers of their own (`trainer.placement`): options, refusals, and a run as together."""

import logging
from pathlib import Path

import pytest

from skyrl.backends.torch import TorchBackendConfig
from skyrl.backends.torch.base_model.memory import device_of
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.errors import RequestError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.strategy.torch_backend import TorchStrategy
from tests.train.short_runs import check_equal, command, train

PPO = [
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.algorithm.use_kl_in_reward=true",
    "trainer.critic.model.lora.rank=4",
    "trainer.critic.model.path=somewhere",
    "trainer.policy.model.path=somewhere",
]
APART = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false"]
PLACES = "trainer.placement."


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def resolved(*given: str) -> SkyRLTrainConfig:
    engines = "generator.inference_engine.num_engines=2"
    gpus = f"{PLACES}policy_num_gpus_per_node=2"
    return SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=torch", *PPO, gpus, engines, *given]).resolve()


def problems(*given: str) -> list[str]:
    config = resolved(*given)
    return [*TorchStrategy().unsupported(config), *TorchStrategy().problems(config)]


def options(model: str, *given: str) -> TorchBackendConfig:
    return TorchBackendConfig(**TorchStrategy().options_apart(resolved(*given), model))


@pytest.mark.parametrize(
    ("given", "apart"),
    [
        ([], []),
        (["trainer.placement.colocate_all=false", "trainer.placement.ref_num_gpus_per_node=2"], ["critic"]),
        (APART, ["critic", "ref"]),
        (["trainer.placement.colocate_policy_ref=false"], []),
        ([*APART, "trainer.algorithm.use_kl_in_reward=false"], ["critic"]),
    ],
)
def test_models_are_apart_that_the_placement_takes_apart(given, apart):
    assert resolved(*given).trainer.apart == apart


def test_each_has_as_many_workers_as_its_gpus_after_those_before_it():
    given = [*APART, f"{PLACES}critic_num_gpus_per_node=4", "trainer.critic.fsdp_config.fsdp_size=2"]
    critic, reference = options("critic", *given), options("ref", *given)
    assert (critic.workers, critic.num_workers, critic.first_gpu, critic.fsdp_size) == ("processes", 4, 2, 2)
    assert (reference.workers, reference.num_workers, reference.first_gpu) == ("in_process", 1, 6)
    assert problems(*given) == []


RANK = {"policy": "trainer.policy.model.lora.rank", "critic": "trainer.critic.model.lora.rank"}


@pytest.mark.parametrize(("whole", "adapter"), [("critic", "policy"), ("policy", "critic")])
def test_workers_share_weights_in_float32_if_a_model_of_theirs_is_trained_as_a_whole(whole, adapter):
    given = [*APART, f"{PLACES}critic_num_gpus_per_node=2", f"{RANK[whole]}=0", f"{RANK[adapter]}=8"]
    found = {name: options(name, *given) for name in (whole, adapter)}
    assert (found[whole].fsdp_size, found[whole].float32_parts) == (-1, True)
    assert (found[adapter].fsdp_size, found[adapter].float32_parts) == (0, False)


@pytest.mark.parametrize(("whole", "adapter"), [("critic", "policy"), ("policy", "critic")])
def test_the_format_of_summed_gradients_is_one_of_workers_that_train_a_whole_model(whole, adapter):
    given = [*APART, f"{PLACES}critic_num_gpus_per_node=2", f"{RANK[whole]}=0", f"{RANK[adapter]}=8"]
    field = "trainer.{}.fsdp_config.mixed_precision.reduce_dtype=bf16"
    assert problems(*given, field.format(whole)) == []
    (problem,) = problems(*given, field.format(adapter))
    assert problem.startswith(f"{field.format(adapter)} and an adapter ({RANK[adapter]}=8): ")


def test_a_critic_keeps_the_number_of_shards_that_its_section_gives():
    given = [*APART, f"{PLACES}critic_num_gpus_per_node=2", f"{RANK['policy']}=8", f"{RANK['critic']}=0"]
    critic = options("critic", *given, "trainer.critic.fsdp_config.fsdp_size=1")
    assert (critic.fsdp_size, critic.float32_parts) == (1, False)


def test_a_model_that_is_apart_shares_sequences_among_its_own_workers():
    given = [*APART, f"{PLACES}critic_num_gpus_per_node=2", "trainer.critic.sequence_parallel_size=2"]
    assert options("critic", *given).sequence_parallel_size == 2
    assert options("ref", *given).sequence_parallel_size == 1


def test_workers_let_go_of_the_device_if_all_of_their_models_ask_for_it():
    stays = "trainer.critic.optimizer_config.offload_after_step=false"
    assert options("policy").offload_after_step and not options("policy", stays).offload_after_step
    apart = [stays, *APART]
    assert [options(name, *apart).offload_after_step for name in ("policy", "critic", "ref")] == [True, False, True]


def test_models_on_several_nodes_have_placement_groups_of_their_own():
    given = [*APART, f"{PLACES}critic_num_nodes=2", f"{PLACES}critic_num_gpus_per_node=4"]
    critic = options("critic", *given)
    assert (critic.workers, critic.num_workers, critic.ray_workers_per_node, critic.first_gpu) == ("ray", 8, 4, 0)


@pytest.mark.parametrize("model", ["critic", "ref"])
@pytest.mark.parametrize(
    "field",
    ["fsdp_config.cpu_offload=true", "fsdp_config.mixed_precision.reduce_dtype=fp16"],
)
def test_a_field_of_a_model_that_is_not_apart_is_refused_and_read_where_it_is(model, field):
    given = f"trainer.{model}.{field}"
    (problem,) = problems(given)
    assert problem.startswith(given.partition("=")[0].removesuffix(".reduce_dtype")), problem
    assert "trainer.placement.colocate_all=false" in problem
    apart = [*APART, f"{PLACES}{model}_num_gpus_per_node=2", given]
    assert [why.partition("=")[0] for why in problems(*apart)] == (
        [f"trainer.{model}.fsdp_config.mixed_precision.reduce_dtype"] if "fp16" in field else []
    )


@pytest.mark.parametrize(
    ("rank", "first", "gpus", "device"),
    [(0, 0, 2, "cuda:0"), (3, 0, 2, "cuda:1"), (3, 3, 5, "cuda:3"), (1, 1, 0, "cpu")],
)
def test_a_rank_computes_on_a_gpu_after_those_of_others(rank, first, gpus, device):
    assert str(device_of(None, rank, first, gpus)) == device


def test_models_that_there_are_no_gpus_left_for_are_refused():
    with pytest.raises(RequestError, match=r"first_gpu=2: there are 2 GPU\(s\), .*colocate_all=true"):
        device_of(None, 2, 2, 2)


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ({"prompt": row["prompt"]} for row in arithmetic_rows(8, seed=0, largest=9)))
    return path


@pytest.mark.full
def test_critic_and_reference_learn_and_score_apart_as_with_the_policy(rows, tiny_model, tmp_path, caplog):
    """Bit for bit, on one worker each."""
    caplog.set_level(logging.INFO)
    started = {}
    for name, places in (("together", ["trainer.placement.colocate_all=true"]), ("apart", APART)):
        caplog.clear()
        critic = f"trainer.critic.model.path={tiny_model}"
        given = [critic, "environment.env_class=rewarding:Hashed", "trainer.max_prompt_length=64", *places]
        train([*command(rows, tiny_model, tmp_path / name, *PPO[:4], *given)])
        started[name] = sum("torch worker(s)" in record.message for record in caplog.records)
    assert started == {"together": 1, "apart": 3}
    ends = [tmp_path / name for name in ("apart", "together")]
    check_equal(*ends, 2, ["critic", "policy"])
