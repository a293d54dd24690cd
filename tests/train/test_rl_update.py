"""One training step of the RL trainer on hand-made trajectories, against the same step written in torch."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import oracle
from skyrl.algorithms.objective import ForwardOnly
from skyrl.backends.async_client import BackendClient
from skyrl.backends.operations import ForwardBackward, Operation, OptimStep
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policies.on_backend import BackendLearner, BackendPolicy
from skyrl.train.rl.batch import Batch
from skyrl.train.rl.update import Update
from skyrl.train.rollouts.rows import rows_of
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Trajectory, TrajectoryId, Turn
from skyrl.types import LoraConfig

TEMPERATURE = 0.8
LEARNING_RATE = 1e-2


@pytest.fixture(params=["client", "torch_client"])
def either(request) -> BackendClient:
    """A client of each backend."""
    return request.getfixturevalue(request.param)


def configured(tiny_model, *overrides: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={tiny_model}",
            "trainer.strategy=jax",
            "trainer.train_batch_size=2",
            "trainer.policy_mini_batch_size=2",
            "trainer.critic_mini_batch_size=2",
            "generator.n_samples_per_prompt=3",
            f"generator.sampling_params.temperature={TEMPERATURE}",
            f"trainer.policy.optimizer_config.lr={LEARNING_RATE}",
            "trainer.policy.optimizer_config.weight_decay=0.1",
            "trainer.algorithm.use_kl_loss=false",
            *overrides,
        ]
    ).resolve()


def turn(prompt: list[int], response: list[int], reward: float = 0.0) -> Turn:
    return Turn(prompt, Sampled(response, [-1.0] * len(response), "stop", 0), reward=reward)


def trajectories(seed: int = 0) -> list[Trajectory]:
    """Two prompts with three samples each: of one turn, of two with an observation, and of two with a new history."""
    draw = np.random.default_rng(seed)
    found = []
    for prompt in range(2):
        for repetition in range(3):
            tokens = [draw.integers(0, 256, n).tolist() for n in (5, 4, 3, 6)]
            start, first, observation, second = tokens
            reward = float(draw.integers(0, 5))
            turns = [turn(start, first, 0.0 if repetition else reward)]
            if repetition == 1:
                turns.append(turn(start + first + observation, second, reward))
            if repetition == 2:
                turns.append(turn(start + observation, second, reward))
            found.append(Trajectory(TrajectoryId(str(prompt), repetition), turns, "stop"))
    return found


def batch_of(config: SkyRLTrainConfig, items: list[Trajectory]) -> Batch:
    return Batch(rows_of(items, config.generator), items, [item.id.instance_id for item in items], TEMPERATURE)


def sampled_tokens(item: Trajectory) -> list[tuple[list[int], int]]:
    """(context, token) of each token that was sampled, in order: what a trajectory is, without rows."""
    return [
        (list(one.prompt_ids) + list(one.sampled.token_ids[:index]), token)
        for one in item.turns
        for index, token in enumerate(one.sampled.token_ids)
    ]


def torch_logprobs(model, item: Trajectory) -> torch.Tensor:
    found = []
    for context, token in sampled_tokens(item):
        row = torch.log_softmax(oracle.logits(model, context)[-1] / TEMPERATURE, -1)
        found.append(row[token])
    return torch.stack(found)


def scores_of(items: list[Trajectory]) -> torch.Tensor:
    return torch.tensor([item.reward for item in items]).reshape(2, 3)


def stepped(client: BackendClient, config: SkyRLTrainConfig, items: list[Trajectory], folder, steps: int = 1):
    """The policy after some steps on a batch, as a torch model, and the last step's metrics."""

    async def run():
        policy = BackendPolicy(client, f"policy-{folder.name}", seed=0)
        await policy.create(LoraConfig(rank=0, seed=0))
        update = Update(config, policy, None)
        for _ in range(steps):
            metrics = await update(batch_of(config, items))
        await policy.export(str(folder))
        return metrics

    metrics = asyncio.run(run())
    return oracle.load(folder), metrics


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("timing/")}


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def assert_same_policy(ours, expected, items: list[Trajectory]) -> None:
    for item in items:
        with torch.no_grad():
            np.testing.assert_allclose(torch_logprobs(ours, item), torch_logprobs(expected, item), atol=2e-2)


def test_a_grpo_step_is_that_of_torch(either, tiny_model, tmp_path):
    config, items = configured(tiny_model), trajectories()
    ours, metrics = stepped(either, config, items, tmp_path / "grpo", steps=2)
    model = oracle.load(tiny_model)
    scores = scores_of(items)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).reshape(-1)
    optimizer = optimizer_of(model)
    for _ in range(2):
        with torch.no_grad():
            old = [torch_logprobs(model, item) for item in items]
        tokens = sum(len(logprobs) for logprobs in old)
        loss = torch.zeros(())
        for item, before, advantage in zip(items, old, advantages, strict=True):
            ratio = torch.exp(torch_logprobs(model, item) - before)
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert metrics["policy/grad_norm"] == pytest.approx(float(norm), rel=2e-3)
    assert_same_policy(ours, model, items)


def test_kl_and_two_epochs_of_two_mini_batches_are_those_of_torch(either, tiny_model, tmp_path):
    config = configured(
        tiny_model,
        "trainer.algorithm.use_kl_loss=true",
        "trainer.algorithm.kl_loss_coef=0.5",
        "trainer.algorithm.kl_estimator_type=k2",
        "trainer.algorithm.advantage_estimator=rloo",
        "trainer.algorithm.loss_reduction=sequence_mean",
        "trainer.policy_mini_batch_size=1",
        "trainer.update_epochs_per_batch=2",
    )
    items = [item for item in trajectories(3) if item.id.repetition_id < 2]
    ours, _ = stepped(either, config, items, tmp_path / "kl")
    model, reference = oracle.load(tiny_model), oracle.load(tiny_model)
    optimizer = optimizer_of(model)
    scores = torch.tensor([item.reward for item in items]).reshape(2, 2)
    advantages = (scores - scores.flip(1)).reshape(-1)
    with torch.no_grad():
        old = [torch_logprobs(model, item) for item in items]
        base = [torch_logprobs(reference, item) for item in items]
    for _ in range(2):
        for mini in ((0, 1), (2, 3)):
            loss = torch.zeros(())
            for index in mini:
                new = torch_logprobs(model, items[index])
                ratio, advantage = torch.exp(new - old[index]), advantages[index]
                policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = loss + (policy + 0.5 * 0.5 * (new - base[index]) ** 2).mean() / len(mini)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert_same_policy(ours, model, items)


@pytest.mark.full("client")
def test_a_kl_of_a_fresh_policy_in_the_reward_is_0_at_any_temperature(either, tiny_model, tmp_path):
    config = configured(tiny_model, "trainer.algorithm.use_kl_in_reward=true")
    _, metrics = stepped(either, config, trajectories(1), tmp_path / "fresh")
    assert metrics["loss/avg_kl"] == 0.0


@pytest.mark.full("client")
def test_gae_follows_a_trajectory_over_its_observations_and_rows(either, tiny_model):
    """Returns and advantages of a critic, by the definition over the sampled tokens in their order."""
    config = configured(
        tiny_model,
        f"trainer.critic.model.path={tiny_model}",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.algorithm.gamma=0.9",
        "trainer.algorithm.lambd=0.8",
    )
    items = trajectories(5)

    async def run():
        policy, critic = BackendPolicy(either, "gae-policy", seed=0), BackendLearner(either, "gae-critic")
        await policy.create(LoraConfig(rank=4, seed=0))
        await critic.create(LoraConfig(rank=4, seed=1), value_head=True)
        update, batch = Update(config, policy, critic), batch_of(config, items)
        scored = await update._score(batch)
        estimated = update._advantages(batch, batch.rewards, scored.values)
        metrics = await update(batch)
        return batch, scored.values, estimated.returns, metrics

    batch, values, returns, metrics = asyncio.run(run())
    for number, item in enumerate(items):
        rows = [index for index, row in enumerate(batch.rows) if row.trajectory == number]
        own = np.concatenate([values[row][batch.mask[row]] for row in rows])
        found = np.concatenate([returns[row][batch.mask[row]] for row in rows])
        rewards = np.zeros(len(own))
        ends = np.cumsum([len(one.sampled.token_ids) for one in item.turns]) - 1
        rewards[ends] = [one.reward for one in item.turns]
        advantage, expected = 0.0, np.zeros(len(own))
        for index in reversed(range(len(own))):
            following = own[index + 1] if index + 1 < len(own) else 0.0
            advantage = rewards[index] + 0.9 * following - own[index] + 0.9 * 0.8 * advantage
            expected[index] = advantage + own[index]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert metrics["critic/loss"] > 0 and np.isfinite(metrics["policy/loss"])


@pytest.mark.full
def test_steps_of_policy_and_critic_are_the_same_on_both_backends(client, torch_client, tiny_model):
    """With adapters that begin alike; the KL from the reference is 0 in the first step, and not in the second."""
    config = configured(
        tiny_model,
        f"trainer.critic.model.path={tiny_model}",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.algorithm.kl_loss_coef=0.5",
        "trainer.policy_mini_batch_size=1",
    )

    async def run(client: BackendClient):
        policy, critic = BackendPolicy(client, "same-policy", seed=0), BackendLearner(client, "same-critic")
        await policy.create(LoraConfig(rank=4, seed=0))
        await critic.create(LoraConfig(rank=4, seed=1), value_head=True)
        update, batch = Update(config, policy, critic), batch_of(config, trajectories(7))
        return [await update(batch) for _ in range(3)], (await update._score(batch)).values

    (ours, values), (theirs, expected) = (asyncio.run(run(one)) for one in (torch_client, client))
    assert min(step["loss/avg_kl"] for step in ours[1:]) > 1e-3
    for mine, other in zip(map(untimed, ours), map(untimed, theirs), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(values, expected, atol=1e-4)


def test_a_forked_history_is_trained_on_once_per_token(tiny_model):
    config = configured(tiny_model)
    items = trajectories()
    batch = batch_of(config, items)
    trained = {
        (tuple(datum.tokens[: index + 1]), int(datum.loss_fn_inputs["target_tokens"][index]))
        for datum, mask in zip(batch.data(), batch.mask, strict=True)
        for index in np.flatnonzero(mask)
    }
    sampled = [(tuple(context), token) for item in items for context, token in sampled_tokens(item)]
    assert trained == set(sampled) and batch.mask.sum() == len(sampled)


def test_rows_and_trajectories_are_two_views_of_the_same_numbers(tiny_model):
    batch = batch_of(configured(tiny_model), trajectories(2))
    numbers = np.where(batch.filled, np.random.default_rng(0).normal(size=batch.filled.shape), 0)
    np.testing.assert_array_equal(batch.by_row(batch.by_trajectory(numbers)), numbers)
    assert batch.by_trajectory(batch.rewards).sum(1).tolist() == [item.reward for item in batch.trajectories]


# -- what is computed, and when a step is taken ------------------------------------------------------------------------


class Recorded:
    """A client, and the operations that it was asked for."""

    def __init__(self, client: BackendClient):
        self._client = client
        self.backend = client.backend
        self.operations: list[Operation] = []

    async def run(self, operation: Operation):
        self.operations.append(operation)
        return await self._client.run(operation)

    def kinds(self) -> Counter[str]:
        """Count the steps of the policy, and the passes with and without gradients."""
        names = {True: "forward", False: "forward_backward"}
        return Counter(
            names[operation.forward_only] if isinstance(operation, ForwardBackward) else "optim_step"
            for operation in self.operations
            if isinstance(operation, ForwardBackward | OptimStep)
        )


def updated(client: BackendClient, config: SkyRLTrainConfig, items: list[Trajectory], name: str, critic=False):
    """(operations of one update by kind, its metrics, what a forward pass says before, and after it)."""
    recorded = Recorded(client)

    async def run():
        policy = BackendPolicy(recorded, f"policy-{name}", seed=0)
        await policy.create(LoraConfig(rank=4, seed=0))
        judge = BackendLearner(recorded, f"critic-{name}") if critic else None
        if judge is not None:
            await judge.create(LoraConfig(rank=4, seed=1), value_head=True)
        update, batch = Update(config, policy, judge), batch_of(config, items)
        before = await policy.forward(batch.data(), ForwardOnly(("logprobs", "entropy")))
        recorded.operations.clear()
        metrics = await update(batch)
        kinds = recorded.kinds()
        after = await policy.forward(batch.data(), ForwardOnly(("logprobs", "entropy")))
        return kinds, metrics, before, after, batch

    return asyncio.run(run())


def means(output, batch: Batch, name: str) -> float:
    return float(np.mean(chosen(output, batch, name)))


def chosen(output, batch: Batch, name: str) -> np.ndarray:
    """Of the tokens that the policy chose."""
    pairs = zip(output.loss_fn_outputs, batch.mask, strict=True)
    return np.concatenate([scores[name][mask[: len(scores[name])]] for scores, mask in pairs])


def same(before, after) -> bool:
    pairs = zip(before.loss_fn_outputs, after.loss_fn_outputs, strict=True)
    return all(np.array_equal(ours["logprobs"], theirs["logprobs"]) for ours, theirs in pairs)


def alike(items: list[Trajectory], prompts: set[str]) -> list[Trajectory]:
    """The trajectories, with reward 1 for all samples of some prompts."""

    def equal(item: Trajectory) -> Trajectory:
        *turns, last = item.turns
        turns = [replace(one, reward=0.0) for one in turns]
        return replace(item, turns=[*turns, replace(last, reward=1.0)])

    return [equal(item) if item.id.instance_id in prompts else item for item in items]


@pytest.mark.full
@pytest.mark.gate("trainer.policy.model.lora.dropout=0.5-1")
@pytest.mark.parametrize(
    ("option", "passes"),
    [
        ("trainer.algorithm.advantage_estimator=grpo", 0),
        ("trainer.algorithm.use_kl_loss=true", 1),
        ("trainer.update_epochs_per_batch=2", 1),
        ("trainer.policy_mini_batch_size=1", 1),
        ("trainer.algorithm.off_policy_correction.tis_ratio_type=token", 1),
        ("trainer.algorithm.policy_loss_type=kl_cov", 2),
        ("trainer.policy.model.lora.dropout=0.5", 1),
    ],
)
def test_forward_passes_are_made_for_what_the_training_pass_does_not_tell(client, tiny_model, option, passes):
    kinds, metrics, before, _, batch = updated(client, configured(tiny_model, option), trajectories(), option)
    assert kinds["forward"] == passes
    assert metrics["policy/entropy"] == pytest.approx(means(before, batch, "entropy"), rel=1e-5)
    apart = chosen(before, batch, "logprobs").astype(np.float64) + 1.0  # all were "sampled" with -1 nat
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] == pytest.approx(np.abs(apart).mean(), rel=1e-5)
    assert metrics["policy/rollout_train_kl"] == pytest.approx((np.exp(apart) - 1 - apart).mean(), rel=1e-5)
    assert metrics["policy/rollout_train_off_fraction"] == np.mean(np.abs(apart) > 0.1)


@pytest.mark.filterwarnings("ignore:trainer.one_step_off=True without")
@pytest.mark.parametrize(("option", "warns"), [("one_step_off=false", True), ("one_step_off=true", False)])
def test_a_run_whose_samples_are_of_the_newest_weights_warns_of_a_sampler_that_disagrees(
    client, tiny_model, caplog, option, warns
):
    updated(client, configured(tiny_model, f"trainer.{option}"), trajectories(), option)
    assert ("sampler and trainer disagree" in caplog.text) is warns


def test_no_step_is_taken_where_no_token_is_trained_on(client, tiny_model):
    config = configured(tiny_model, "trainer.algorithm.zero_variance_filter=true")
    kinds, metrics, before, after, _ = updated(client, config, alike(trajectories(), {"0", "1"}), "all-alike")
    assert kinds["optim_step"] == 0 and metrics["generate/tokens_trained"] == 0
    assert same(before, after)


def test_a_mini_batch_without_tokens_takes_no_step_and_the_other_does(client, tiny_model):
    config = configured(tiny_model, "trainer.algorithm.zero_variance_filter=true", "trainer.policy_mini_batch_size=1")
    kinds, _, before, after, _ = updated(client, config, alike(trajectories(), {"0"}), "one-alike")
    assert kinds["optim_step"] == 1
    assert not same(before, after)


@pytest.mark.full
def test_a_critic_learns_from_prompts_that_the_filter_leaves_out(client, tiny_model):
    config = configured(
        tiny_model,
        "trainer.algorithm.zero_variance_filter=true",
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path={tiny_model}",
    )
    items = alike(trajectories(), {"0", "1"})
    kinds, metrics, before, after, _ = updated(client, config, items, "critic-filter", critic=True)
    assert kinds["optim_step"] == 1 and metrics["critic/grad_norm"] > 0
    assert same(before, after)


def test_a_batch_in_which_no_prompt_keeps_two_samples_is_a_skipped_step(client, tiny_model, caplog):
    items = [item for item in trajectories() if item.id.repetition_id == 0]
    kinds, _, before, after, _ = updated(client, configured(tiny_model), items, "no-survivors")
    assert kinds["optim_step"] == 0 and same(before, after)
    assert "every one of the 2 prompts has one sample" in caplog.text
