"""Models of other families behind a server, through the stock SDK: two tenants train and sample beside each other."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tinker

import oracle
from live import GREEDY, datum, logprobs, new_trainer, sample, service, step, text
from skyrl.cli import main
from skyrl.tinker.local_server import LocalServer
from tests.tx.family_models import write_model

pytestmark = pytest.mark.full

ROWS = [np.random.default_rng(seed).integers(0, 300, 24).tolist() for seed in (0, 1)]
"""Text that each tenant learns."""


@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", pytest.param("LlamaForCausalLM", marks=pytest.mark.slow)]
)
def test_two_tenants_train_and_sample_adapters_of_their_own(tmp_path, architecture):
    model = write_model(architecture, tmp_path / "model")
    reference = oracle.load(model)  # not in threads: transformers changes global state while it loads
    wanted = {tuple(row): oracle.logprobs(reference, row).detach().numpy() for row in ROWS}
    sizes = {"max_lora_rank": 8, "max_context_length": 128, "train_tile_tokens": 64, "warm_up": False}
    options = {"backend": "jax", "backend-config": json.dumps(sizes)}
    with LocalServer(tmp_path / "state", str(model), options) as server, service(server) as one, service(server) as two:

        def learned(client: tinker.ServiceClient, row: list[int]) -> tinker.SamplingClient:
            trainer = new_trainer(client, server, rank=8)
            data = [datum(row, weights=np.ones(len(row) - 1))]
            first = trainer.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
            np.testing.assert_allclose(first, wanted[tuple(row)], rtol=0, atol=2e-4)
            for _ in range(14):
                step(trainer, data)
            return trainer.save_weights_and_get_sampling_client().result()

        with ThreadPoolExecutor(2) as tenants:
            samplers = list(tenants.map(learned, (one, two), ROWS))
            drawn = list(tenants.map(lambda at: sample(samplers[at], ROWS[at][:4], max_tokens=6, **GREEDY), (0, 1)))
        scores = [[sum(sampler.compute_logprobs(text(row)).result()[1:]) for row in ROWS] for sampler in samplers]
        for own, other in ((0, 1), (1, 0)):
            assert scores[own][own] > 0.5 * scores[other][own]  # negative: what the other learned does not help
            (found,) = drawn[own].sequences
            again = samplers[own].compute_logprobs(text([*ROWS[own][:4], *found.tokens])).result()[4:]
            np.testing.assert_allclose(found.logprobs, again, atol=1e-4)


def test_an_adapter_whose_experts_were_fused_trains_on_where_it_was(tmp_path, capsys):
    sizes = {"max_lora_rank": 8, "max_context_length": 128, "train_tile_tokens": 64, "warm_up": False}
    options = {"backend": "jax", "backend-config": json.dumps(sizes)}
    model = write_model("Qwen3MoeForCausalLM", tmp_path / "model", num_hidden_layers=2)
    data = [datum(ROWS[0], weights=np.ones(len(ROWS[0]) - 1))]
    with LocalServer(tmp_path / "state", str(model), options) as server, service(server) as client:
        trainer = new_trainer(client, server, rank=4)  # 8 with gate and up fused
        before = logprobs(trainer, ROWS[0])
        for _ in range(3):
            step(trainer, data)
        path, url = trainer.save_weights_for_sampler("trained").result().path, ["--url", server.url]
        folder = str(tmp_path / "fused")
        assert main(["adapter", "export", path, "--layout", "fused-experts", "--output", folder, *url]) == 0
        assert json.loads((tmp_path / "fused/adapter_config.json").read_text())["r"] == 8
        capsys.readouterr()
        assert main(["adapter", "import", folder, *url]) == 0
        uploaded = client.create_training_client_from_state(capsys.readouterr().out.strip()).result()
        after = logprobs(trainer, ROWS[0])
        assert np.abs(after - before).max() > 0.1
        np.testing.assert_allclose(logprobs(uploaded, ROWS[0]), after, atol=1e-4)
        step(uploaded, data)
        assert sum(logprobs(uploaded, ROWS[0])) > sum(after)
