"""The cut of a batch: what validation accepts can be run, and what it refuses cannot."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyrl.train.config import BatchGeometry, ConfigError, SkyRLTrainConfig

SMALL = st.integers(1, 12)


@st.composite
def configs(draw) -> SkyRLTrainConfig:
    """Configurations with any batch sizes and placement. Half of the sizes are drawn so that they may well fit."""
    samples, mini, minis = draw(SMALL), draw(SMALL), draw(st.integers(1, 4))
    prompts = mini * minis if draw(st.booleans()) else draw(st.integers(1, 48))
    nodes, gpus = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    critic = draw(st.booleans())
    parallel = draw(st.sampled_from(["sequence", "tensor"]))
    size = draw(st.integers(1, 3))
    config = SkyRLTrainConfig()
    config.trainer.strategy = "fsdp2"
    trainer, placement = config.trainer, config.trainer.placement
    config.generator.n_samples_per_prompt = samples
    trainer.train_batch_size, trainer.policy_mini_batch_size = prompts, mini
    trainer.critic_mini_batch_size = draw(SMALL)
    trainer.micro_train_batch_size_per_gpu = draw(st.integers(1, 6))
    trainer.micro_forward_batch_size_per_gpu = draw(st.integers(1, 6))
    placement.colocate_all = placement.colocate_policy_ref = False
    placement.policy_num_nodes, placement.policy_num_gpus_per_node = nodes, gpus
    placement.ref_num_gpus_per_node = draw(st.integers(1, 4))
    placement.critic_num_gpus_per_node = draw(st.integers(1, 4))
    trainer.algorithm.advantage_estimator = "reinforce++"
    trainer.algorithm.use_kl_loss = draw(st.booleans())
    if critic:
        trainer.critic.model.path = "critic"
        trainer.critic.sequence_parallel_size = draw(st.integers(1, 2))
    if parallel == "sequence":
        trainer.policy.sequence_parallel_size = size
    elif not critic:
        trainer.strategy = "megatron"
        trainer.policy.megatron_config.tensor_model_parallel_size = size
    return config


def group_size(config: SkyRLTrainConfig, model: str) -> int:
    owner = getattr(config.trainer, model)
    if config.trainer.strategy == "megatron":
        return owner.megatron_config.tensor_model_parallel_size
    return owner.sequence_parallel_size


def gpus(config: SkyRLTrainConfig, model: str) -> int:
    placement = config.trainer.placement
    return getattr(placement, f"{model}_num_nodes") * getattr(placement, f"{model}_num_gpus_per_node")


def runs(config: SkyRLTrainConfig) -> bool:
    """Return True if a step can be cut into equal parts: reshape refuses what does not come out even."""
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    batch = np.arange(trainer.train_batch_size * samples)
    models = ["policy"]
    models += ["critic"] if trainer.critic.model.path is not None else []
    models += ["ref"] if trainer.algorithm.use_kl_loss else []
    try:
        for model in models:
            ranks = np.arange(gpus(config, model)).reshape(-1, group_size(config, model)).shape[0]
            batch.reshape(ranks, -1)
            if model != "ref":
                mini_batches = batch.reshape(-1, getattr(trainer, f"{model}_mini_batch_size") * samples)
                shares = mini_batches[0].reshape(ranks, -1)
                shares[0].reshape(-1, trainer.micro_train_batch_size_per_gpu)
    except ValueError:
        return False
    return True


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(configs())
def test_validated_means_runnable_and_refused_means_not(config):
    try:
        config.resolve()
        validated = True
    except ConfigError:
        validated = False
    assert validated == runs(config)


@st.composite
def even_geometries(draw) -> BatchGeometry:
    samples, ranks, micro, per_rank, minis = (draw(st.integers(1, 5)) for _ in range(5))
    # Prompts of a mini-batch such that its rows are a multiple of ranks x micro.
    mini = ranks * micro * per_rank
    return BatchGeometry("policy", mini * minis, samples, mini, ranks, micro, draw(st.integers(1, 7)))


@example(BatchGeometry("policy", 6, 2, 3, 3, 1, 4))
@given(even_geometries())
def test_every_row_is_trained_once_by_equal_micro_batches_on_every_rank(geometry):
    assert not list(geometry.problems())
    seen = []
    for mini in geometry.mini_batches():
        shares = [geometry.micro_batches(share) for share in geometry.shares(mini)]
        assert len(shares) == geometry.ranks
        assert len({len(micros) for micros in shares}) == 1
        for micros in shares:
            assert {len(micro) for micro in micros} == {geometry.micro_batch_rows}
            seen += [row for micro in micros for row in micro]
    assert sorted(seen) == list(range(geometry.prompts * geometry.samples_per_prompt))


@given(even_geometries())
def test_an_optimizer_step_takes_whole_prompts(geometry):
    for mini in geometry.mini_batches():
        prompts = [row // geometry.samples_per_prompt for row in mini]
        assert len(mini) == geometry.mini_batch_prompts * geometry.samples_per_prompt
        assert len(set(prompts)) == geometry.mini_batch_prompts


@given(even_geometries())
def test_every_row_is_scored_once_in_parts_that_fit(geometry):
    parts = [part for share in geometry.shares(range(geometry.rows)) for part in geometry.forward_batches(share)]
    assert sorted(row for part in parts for row in part) == list(range(geometry.rows))
    assert max(len(part) for part in parts) <= geometry.forward_batch_rows


def test_sizes_beyond_any_batch_are_refused_at_once():
    (problem,) = BatchGeometry("policy", 10**30 + 1, 1, 10**20, 1, 1, 1).problems()
    assert "trainer.policy_mini_batch_size=100000000000000000000 does not divide" in problem


def test_the_geometry_of_the_defaults():
    config = SkyRLTrainConfig().resolve()
    geometry = config.geometry()
    assert (geometry.rows, len(geometry.mini_batches()), geometry.ranks) == (5120, 4, 1)


def test_ranks_that_share_sequences_count_once():
    config = SkyRLTrainConfig.from_cli_overrides(
        [
            "trainer.placement.policy_num_gpus_per_node=8",
            "trainer.placement.ref_num_gpus_per_node=8",
            "trainer.policy.sequence_parallel_size=2",
            "generator.inference_engine.num_engines=8",
        ]
    )
    assert config.resolve().geometry().ranks == 4


def test_the_critic_has_a_geometry_of_its_own():
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.critic.model.path=m", "trainer.critic_mini_batch_size=512"])
    assert len(config.resolve().geometry("critic").mini_batches()) == 2
