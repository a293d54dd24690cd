"""Steps of the optimizer equal those of `torch.optim.AdamW` on PEFT's model."""

import numpy as np
import pytest
import torch

import oracle
from skyrl.types import AdamParams, Datum
from tests.conformance.networks import EVERYWHERE, loaded, published, scored, stepped, target_logprobs, write_adapter

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
SETTINGS = [
    AdamParams(learning_rate=1e-2, eps=1e-4),
    AdamParams(learning_rate=1e-2, eps=1e-4, weight_decay=0.3, grad_clip_norm=0.5),
    AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.999, eps=1e-4, weight_decay=0.1),
]
"""Settings with an epsilon that prevents rounding of the smallest gradients from becoming a whole step."""


def a_datum(seed: int) -> Datum:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 256, 20, np.int32)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": random.random(19, np.float32)})


@pytest.mark.gate("torch-tied-betas")
@pytest.mark.parametrize("params", SETTINGS, ids=["plain", "decay and clipping", "betas"])
def test_three_steps_are_those_of_torch(network, params, tmp_path):
    adapter = write_adapter(network.folder, tmp_path, EVERYWHERE)
    model_id, model = loaded(network.backend, adapter), oracle.load(network.folder, adapter)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (params.beta1, params.beta2)
    optimizer = torch.optim.AdamW(
        parameters, lr=params.learning_rate, betas=betas, eps=params.eps, weight_decay=params.weight_decay
    )
    for number in range(3):
        datum = a_datum(number)
        scored(network.backend, model_id, [datum])
        metrics = stepped(network.backend, model_id, params)
        optimizer.zero_grad()
        (-(torch.tensor(datum.loss_fn_inputs["weights"]) * target_logprobs(model, datum))).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, params.grad_clip_norm or torch.inf)
        optimizer.step()
        assert metrics["skyrl.ai/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert metrics["skyrl.ai/learning_rate"] == pytest.approx(params.learning_rate)
    learned = published(network.backend, model_id, tmp_path / "learned")
    theirs = {name.replace(".default", ""): x for name, x in model.named_parameters() if "lora_" in name}
    assert learned.keys() == theirs.keys()
    for name, value in learned.items():
        np.testing.assert_allclose(
            value, theirs[name].detach(), rtol=0, atol=3 * params.learning_rate * 1e-2, err_msg=name
        )
