"""Metrics of an optimizer step against torch's autograd, NumPy and transformers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from short_runs import command, metrics, train

import oracle
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.objective import policy_objective
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.train.config import SkyRLTrainConfig, get_config_as_dict
from skyrl.train.rl.update_metrics import explained_variance, policy_metrics, value_clip_fraction

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def options(*overrides: str) -> dict:
    given = [f"trainer.algorithm.{override}" for override in overrides]
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", *given]).resolve()
    return get_config_as_dict(config.trainer.algorithm)


def inputs(rows: int = 5, tokens: int = 40) -> tuple[LossInputs, np.ndarray]:
    """Return the inputs of a step on rows of different lengths: ratios from 0.4 to 2.5."""
    draw = np.random.default_rng(0)
    mask = np.arange(tokens) < draw.integers(5, tokens, rows)[:, None]
    old = -draw.exponential(1.0, (rows, tokens))
    x = LossInputs(
        logprobs=old + draw.uniform(-0.9, 0.9, (rows, tokens)),
        weights=mask / mask.sum(),
        sampling_logprobs=old,
        advantages=draw.standard_normal((rows, 1)) * np.ones((rows, tokens)),
        sequence_ratio_mask=mask.astype(np.float64),
        reference_logprobs=old + 0.1,
        entropy=draw.uniform(0, 3, (rows, tokens)),
        segments=np.where(mask, 0, -1),
    )
    return x, mask


@pytest.mark.parametrize("loss", ["regular", "dual_clip", "gspo"])
def test_the_clip_fraction_is_the_share_of_tokens_without_a_gradient(loss):
    bound = {
        "dual_clip": ["clip_ratio_c=2"],
        "gspo": ["eps_clip_low=3e-4", "eps_clip_high=4e-4", "loss_reduction=sequence_mean"],
    }.get(loss, [])
    asked = options(f"policy_loss_type={loss}", *bound, "use_kl_loss=false")
    objective = policy_objective(asked)
    x, mask = inputs()
    if loss == "gspo":  # of a sequence
        x = x._replace(logprobs=x.sampling_logprobs + np.linspace(-0.5, 0.5, len(mask))[:, None])
    logprobs = torch.tensor(x.logprobs, requires_grad=True)
    as_torch = {name: torch.tensor(value) for name, value in x._asdict().items() if isinstance(value, np.ndarray)}
    objective(LossInputs(**as_torch)._replace(logprobs=logprobs)).sum().backward()
    assert logprobs.grad is not None
    without = (logprobs.grad.numpy()[mask] == 0).mean()
    assert policy_metrics(objective, x, mask)["clip_fraction"] == pytest.approx(without) and 0 < without < 1


def test_the_terms_of_a_loss_are_what_their_formulas_say_and_add_up_to_it():
    objective = policy_objective(
        options("use_kl_loss=true", "kl_loss_coef=0.2", "kl_estimator_type=k2", "use_entropy_loss=true")
        | {"entropy_loss_coef": 0.05}
    )
    x, mask = inputs()
    found = policy_metrics(objective, x, mask)
    ratio = np.exp(x.logprobs - x.sampling_logprobs)
    surrogate = np.minimum(ratio * x.advantages, np.clip(ratio, 0.8, 1.2) * x.advantages)
    assert found["policy_loss"] == pytest.approx(-(surrogate * x.weights).sum())
    squared = (x.logprobs - x.reference_logprobs) ** 2
    assert found["kl_loss"] == pytest.approx(0.2 * (0.5 * squared * x.weights).sum())
    assert found["entropy_loss"] == pytest.approx(-0.05 * (x.entropy * x.weights).sum())
    total = float(objective(x).sum())
    assert found["policy_loss"] + found["kl_loss"] + found["entropy_loss"] == pytest.approx(total)


def test_a_critic_that_is_right_explains_all_one_that_knows_the_mean_nothing_and_a_worse_one_less():
    returns = np.random.default_rng(0).standard_normal(1000)
    assert explained_variance(returns + 3, returns) == pytest.approx(1)
    assert explained_variance(np.full(1000, 7.0), returns) == pytest.approx(0)
    fit = np.polyval(np.polyfit(noisy := returns + np.random.default_rng(1).standard_normal(1000), returns, 1), noisy)
    assert explained_variance(fit, returns) == pytest.approx(np.corrcoef(noisy, returns)[0, 1] ** 2)
    assert explained_variance(-returns, returns) == pytest.approx(-3)


def test_the_value_clip_fraction_is_the_share_of_values_without_a_gradient():
    draw = np.random.default_rng(0)
    old, returns = draw.standard_normal((2, 4, 30))
    new = old + draw.uniform(-1, 1, (4, 30))
    mask = draw.random((4, 30)) < 0.7
    values = torch.tensor(new, requires_grad=True)
    target, before = torch.tensor(returns), torch.tensor(old)
    clipped = before + (values - before).clip(-0.3, 0.3)
    torch.maximum((values - target) ** 2, (clipped - target) ** 2).sum().backward()
    assert values.grad is not None
    found = value_clip_fraction(new, old, returns, mask, 0.3)["value_clip_fraction"]
    assert found == pytest.approx((values.grad.numpy()[mask] == 0).mean()) and 0 < found < 1
    assert value_clip_fraction(new, old, returns, mask, None) == {}


@pytest.fixture(scope="module")
def ran(tiny_model, tmp_path_factory) -> Path:
    """A run of PPO with several optimizer steps per batch, all terms, two sources, and dumps."""
    folder = tmp_path_factory.mktemp("run")
    rows = [
        {"prompt": row["prompt"], "data_source": source}
        for row, source in zip(arithmetic_rows(8, seed=0, largest=9), ["sums", "others"] * 4, strict=True)
    ]
    write_rows(folder / "rows.jsonl", rows)
    options = [
        "environment.env_class=rewarding:Hashed",
        f"data.val_data=[{folder}/rows.jsonl]",
        "trainer.eval_interval=2",
        "trainer.dump_data_batch=true",
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path={tiny_model}",
        "trainer.critic.model.lora.rank=4",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.algorithm.use_entropy_loss=true",
        "trainer.update_epochs_per_batch=2",
    ]
    train(command(folder / "rows.jsonl", tiny_model, folder / "run", *options))
    return folder / "run"


@pytest.mark.full
def test_the_terms_of_a_runs_loss_add_up_to_it(ran):
    for row in metrics(ran)[1:]:
        terms = sum(row[f"policy/{term}_loss"] for term in ("policy", "kl", "entropy"))
        assert terms == pytest.approx(row["policy/loss"], abs=1e-5)
        assert 0 <= row["policy/clip_fraction"] < 1 and row["critic/value_clip_fraction"] >= 0


def test_rewards_are_told_by_source(ran):
    row = metrics(ran)[1]
    lines = (ran.with_name("run-exports") / "dumped_rollouts" / "global_step_1.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for source in ("sums", "others"):
        rewards = [record["reward"] for record in records if record["data_source"] == source]
        assert row[f"reward/{source}/avg_raw_reward"] == pytest.approx(np.mean(rewards))


def test_a_step_is_computed_again_from_its_dump(ran, tiny_model):
    dumped = load_file(ran.with_name("run-exports") / "dumped_data" / "global_step_1_training_input.safetensors")
    model, mask = oracle.load(tiny_model), dumped["mask"]
    for row, first in enumerate(dumped["first_token"]):
        length = int(dumped["filled"][row].sum())
        tokens = [int(first), *dumped["target_tokens"][row, :length].tolist()]
        with torch.no_grad():
            logprobs = torch.log_softmax(oracle.logits(model, tokens[:-1]).double(), -1)
        expected = logprobs[torch.arange(length), torch.tensor(tokens[1:])].numpy()
        np.testing.assert_allclose(dumped["old_logprobs"][row, :length], expected, atol=1e-4)
        np.testing.assert_allclose(dumped["reference_logprobs"][row, :length], expected, atol=1e-4)
    returns = np.zeros_like(dumped["rewards"])
    for row in range(len(mask)):  # with gamma 1 and lambda 1: what is still to come
        places = np.flatnonzero(mask[row])
        returns[row, places] = dumped["rewards"][row, places][::-1].cumsum()[::-1]
    np.testing.assert_allclose(dumped["returns"][mask], returns[mask], atol=1e-5)
    raw = returns[mask] - dumped["old_values"][mask]
    np.testing.assert_allclose(dumped["advantages"][mask], (raw - raw.mean()) / raw.std(ddof=1), atol=1e-4)


def test_rollouts_are_dumped_with_the_tokens_of_their_prompts(ran):
    lines = (ran.with_name("run-exports") / "dumped_rollouts" / "global_step_1.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert [len(tokens) for tokens in record["inputs"]] == [turn["prompt_tokens"] for turn in record["turns"]]
        assert record["data_source"] in ("sums", "others")


def test_the_page_has_every_metric_of_a_run(ran):
    named = [
        name for cell in re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(.*?)`", cell)
    ]
    patterns = [re.compile(re.sub(r"\\\{\w+\\\}", "[^ ]+", re.escape(name))) for name in named]
    rows = [json.loads(line) for line in (ran / "metrics.jsonl").read_text().splitlines()]
    known = {name for row in rows for name in row if name != "step"}
    assert [name for name in sorted(known) if not any(pattern.fullmatch(name) for pattern in patterns)] == []
