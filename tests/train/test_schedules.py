"""Learning rates against transformers' schedulers, stepped with an optimizer of torch."""

import pytest
import torch
import transformers

from skyrl.errors import ConfigError
from skyrl.train.config import OptimizerConfig, SkyRLTrainConfig
from skyrl.train.lr_schedules import SCHEDULES, learning_rate_factor
from skyrl.train.strategy.validate import validate

TOTAL = 23


def transformers_rates(name: str, lr: float, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(total - 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 5, TOTAL - 1, TOTAL, TOTAL + 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_transformers(name, warmup):
    optimizer = OptimizerConfig(lr=3e-6, scheduler=name, num_warmup_steps=warmup)
    rates = [optimizer.lr * learning_rate_factor(optimizer, step, TOTAL) for step in range(TOTAL)]
    assert rates == pytest.approx(transformers_rates(name, 3e-6, warmup, TOTAL), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize(
    ("name", "end"), [("linear", 0), ("cosine", 0), ("cosine_with_restarts", 0), ("polynomial", 0.1)]
)
def test_the_rate_stays_at_its_end_after_the_last_step(name, end):
    # Unlike transformers' cosine, which rises again.
    optimizer = OptimizerConfig(lr=1e-6, scheduler=name)
    assert [learning_rate_factor(optimizer, step, TOTAL) for step in (TOTAL, 2 * TOTAL)] == pytest.approx([end, end])


def test_a_polynomial_that_would_rise_is_refused():
    optimizer = "trainer.policy.optimizer_config."
    overrides = [f"{optimizer}scheduler=polynomial", f"{optimizer}lr=1e-7", "trainer.logger=console"]
    config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", *overrides]).resolve()
    with pytest.raises(ConfigError, match=r"optimizer_config\.lr=1e-07 is not above 1e-07, where scheduler=polynomial"):
        validate(config)
