"""The code of docs/algorithms.md runs as it stands and gives what it says."""

import re
from pathlib import Path

import numpy as np
import pytest

from skyrl.algorithms.advantages import AdvantageInputs, estimate_advantages
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.policy_losses import find_policy_loss

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture(scope="module")
def names() -> dict:
    """Names that the page's code defines."""
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(size=(4, 5))
    found = {
        "logprobs": logprobs,
        "mask": np.ones((4, 5)),
        "stop_reasons": ["stop", "stop", "length", "stop"],
        "uids": ["a", "b", "a", "b"],
        "rewards": rng.random((4, 5)),
    }
    for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs"):
        found[name] = logprobs + rng.normal(scale=0.1, size=(4, 5))
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, found)
    return found


def test_the_step_of_the_page_gives_a_loss_of_the_samples_that_ended(names):
    tokens = names["objective"](names["x"])
    assert names["loss"] == tokens.sum()
    assert (tokens != 0).any(axis=1).tolist() == [True, True, False, True]


def test_the_pages_own_estimator_is_found(names):
    x = AdvantageInputs(np.array([[0.0], [3.0], [1.0]]), np.ones((3, 1)), ["a", "b", "a"])
    assert estimate_advantages("best_of_group", x, {"bonus": 2.0}).advantages.tolist() == [[0.0], [2.0], [2.0]]


def test_the_pages_own_loss_is_found(names):
    loss, knobs = find_policy_loss("leash", {"leash": {"strength": 0.5}})
    one = np.ones((1, 1))
    x = LossInputs(logprobs=-one, weights=one, sampling_logprobs=-3 * one, advantages=one)
    assert loss(x, **knobs).item() == pytest.approx(1 + 0.5 * 4)
