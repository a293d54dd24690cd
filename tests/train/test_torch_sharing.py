"""Options about workers that share weights, for trainers and servers: errors name the fields that were given."""

import pytest

from skyrl.backends.skyrl_train_backend import SkyRLTrainBackendOverrides
from skyrl.backends.torch import TorchBackendConfig
from skyrl.config.torch_options import server_options
from skyrl.train.config import ConfigError, DPOConfig, SFTConfig
from skyrl.train.strategy.torch_backend import TorchStrategy
from tests.train.test_torch_options import FSDP, GPUS, LORA, options, problems

pytestmark = pytest.mark.usefixtures("no_cluster")


@pytest.fixture
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_server_takes_sections_that_are_mappings():
    placement = {"trainer.placement": {"policy_num_gpus_per_node": 2}}
    precision = {f"{FSDP[:-1]}": {"mixed_precision": {"reduce_dtype": "bf16"}}}
    config = SkyRLTrainBackendOverrides.model_validate(placement | precision)
    assert (config.num_workers, config.reduce_dtype) == (2, "bfloat16")
    with pytest.raises(ConfigError, match=r"trainer\.placement\.gpus: PlacementConfig has no field"):
        server_options({"trainer.placement": {"gpus": 2}})


def test_a_number_of_shards_that_does_not_divide_the_workers_is_named_as_it_was_given():
    (problem,) = problems(f"{FSDP}fsdp_size=3")
    assert problem.startswith(f"{FSDP}fsdp_size=3 does not divide the 4 worker(s) (trainer.placement.policy_num_nodes")
    (problem,) = problems("trainer.torch={fsdp_size: 3, num_workers: 2}")
    assert problem.startswith("trainer.torch.fsdp_size=3 does not divide the 2 worker(s) (trainer.torch.num_workers)")
    with pytest.raises(ConfigError, match=rf"{FSDP}fsdp_size=3 does not divide the 2 worker"):
        server_options({GPUS: 2, f"{FSDP}fsdp_size": 3})
    own = {"workers": "processes", "num_workers": 3, f"{FSDP}fsdp_size": 3}
    assert SkyRLTrainBackendOverrides.model_validate(own).fsdp_size == 3


ALONE = [f"{FSDP}reshard_after_forward=false", f"{FSDP}mixed_precision.reduce_dtype=bf16"]


@pytest.mark.parametrize("given", ALONE)
def test_options_about_shared_weights_are_refused_where_no_ranks_share_any(given):
    assert problems(given) == []
    (problem,) = problems(given, f"{FSDP}fsdp_size=1")
    assert problem.startswith(given.partition("=")[0]) and "no ranks share weights" in problem
    name = given.rpartition(".")[2].partition("=")[0]
    value = {"reshard_after_forward": False, "reduce_dtype": "bfloat16"}[name]
    for count, size in ((2, 1), (1, 0)):
        workers = "processes" if count > 1 else "in_process"
        with pytest.raises(ValueError, match=f"{name}={value} with fsdp_size=1"):
            TorchBackendConfig(workers=workers, num_workers=count, fsdp_size=size, **{name: value})


@pytest.mark.parametrize("name", ["dispatch_timeout_s", "start_timeout_s"])
@pytest.mark.parametrize("value", [float("inf"), 1e10])
def test_a_timeout_has_an_end(name, value):
    with pytest.raises(ValueError, match=name):
        TorchBackendConfig(**{name: value})


CRITIC = "trainer.critic.model.path=Qwen/Qwen2.5-1.5B-Instruct"


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ([], 1),
        ([CRITIC], 2),
        (["trainer.policy.model.lora.rank=8"], 0),
        (["trainer.policy.model.lora.rank=8", CRITIC], 1),
        (["trainer.algorithm.use_kl_loss=true"], 1),
        (["trainer.algorithm.use_kl_loss=true", "trainer.update_ref_every_epoch=true"], 2),
    ],
)
def test_workers_have_room_for_the_fully_trained_models_of_a_run(given, count):
    assert options(*given).full_models == count


def sharded(config: TorchBackendConfig) -> tuple[int, bool]:
    return config.fsdp_size, config.float32_parts


IN_FLOAT32, BY_MEMORY = (-1, True), (0, False)


@pytest.mark.parametrize("method", [SFTConfig, DPOConfig])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], IN_FLOAT32),
        (["model.lora.rank=8"], BY_MEMORY),
        (["torch.fsdp_size=1"], (1, False)),
        (["torch.fsdp_size=0"], (0, True)),
        (["torch.float32_parts=false"], (-1, False)),
    ],
)
def test_supervised_training_of_all_weights_shares_them_in_float32_unless_it_is_told_otherwise(method, given, wanted):
    workers = "torch={workers: processes, num_workers: 2}"
    config = method.from_cli_overrides(["strategy=torch", "train_datasets=[a]", workers, *given]).resolve()
    assert sharded(TorchBackendConfig(**TorchStrategy().sft_options(config))) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["torch.fsdp_size=1"], (1, False)),
        (["torch.fsdp_size=0"], (0, True)),
        (["torch.float32_parts=false"], (-1, False)),
    ],
)
def test_a_run_keeps_options_about_shards_that_are_given_in_the_section_of_the_backend(given, wanted):
    assert sharded(options(*(f"trainer.{one}" for one in given))) == wanted


def test_an_explicit_0_decides_by_memory():
    assert problems(f"{FSDP}fsdp_size=0") == []
    assert sharded(options(f"{FSDP}fsdp_size=0")) == (0, True)


def test_a_critic_that_is_trained_as_a_whole_on_the_policys_workers_is_sharded():
    assert sharded(options(f"{LORA}rank=8", CRITIC)) == IN_FLOAT32
    assert sharded(options(f"{LORA}rank=8", CRITIC, "trainer.critic.model.lora.rank=8")) == BY_MEMORY
    assert problems(f"{FSDP}mixed_precision.reduce_dtype=bf16", f"{LORA}rank=8", CRITIC) == []
