"""Saves that are begun, and what is done of a model before they are over."""

import asyncio

import numpy as np
import pytest

from skyrl.train.policies.on_backend import BackendLearner
from skyrl.types import AdamParams, Datum, LoraConfig

TOKENS = np.arange(3, 19, dtype=np.int32)
DATUM = Datum(
    TOKENS, {"target_tokens": np.roll(TOKENS, -1).astype(np.int64), "weights": np.ones(len(TOKENS), np.float32)}
)


async def logprobs(learner: BackendLearner) -> np.ndarray:
    return (await learner.forward([DATUM], "cross_entropy")).loss_fn_outputs[0]["logprobs"]


async def step(learner: BackendLearner) -> None:
    await learner.forward_backward([DATUM], "cross_entropy")
    await learner.optim_step(AdamParams(learning_rate=0.05))


@pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "whole"])
def test_a_save_that_was_begun_is_of_the_model_as_it_was_then(torch_client, tmp_path, rank):
    async def run() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        learner, other = (BackendLearner(torch_client, f"{name}-{rank}") for name in ("saved", "loaded"))
        await learner.create(LoraConfig(rank=rank, seed=0))
        await step(learner)
        before = await logprobs(learner)
        saving = learner.begin_save(str(tmp_path / "saved"))
        await step(learner)
        await saving
        await other.load(str(tmp_path / "saved"))
        return before, await logprobs(other), await logprobs(learner)

    before, loaded, after = asyncio.run(run())
    np.testing.assert_array_equal(loaded, before)
    assert np.abs(after - before).max() > 1e-3
