"""An adapter that PEFT has made elsewhere, on a server: sent by raw requests, as SDKs 0.39 and 0.40 do; the rest by
the SDK."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, get_peft_model

import oracle
from live import API_KEY, logprobs, sequence, service, step, supervised, text
from skyrl.tinker.local_server import LocalServer
from tests.tinker.test_sdk_external import download

TOKENS = sequence(16, seed=3)
MODULES = ["q_proj", "v_proj", "down_proj"]
"""Not all of any group."""
RANK, ALPHA = 3, 8.0
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that PEFT has saved, of an adapter that changes what the model says, in bfloat16."""
    folder = tmp_path_factory.mktemp("peft")
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, init_lora_weights=False)
    get_peft_model(oracle.load(tiny_model), config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def pieces(file: Path) -> Iterator[bytes]:
    """The content of a file as SDK 0.40 sends it: a stream without a Content-Length."""
    with open(file, "rb") as content:
        while piece := content.read(4096):
            yield piece


def upload(server: LocalServer, adapter: Path, sdk: str, train_unembed: bool = False) -> str:
    """The path that the server gives an adapter, which is sent in the form of this SDK."""
    headers = {"X-API-Key": API_KEY, "X-Stainless-Package-Version": sdk}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=60) as http:
        body = {"base_model": server.base_model, "lora_config": {"rank": RANK, "train_unembed": train_unembed}}
        begun = http.post("/external_weights_upload_start", json=body).raise_for_status().json()
        for name, address in begun["urls"].items():
            if sdk == "0.39.0":
                httpx.put(address, content=(adapter / name).read_bytes()).raise_for_status()
            else:
                stream = pieces(adapter / name)
                httpx.put(address["url"], headers=address["headers"], content=stream).raise_for_status()
        finished = http.post("/external_weights_upload_finish", json={"upload_id": begun["upload_id"]})
        return finished.raise_for_status().json()["tinker_path"]


def goes_round(
    server: LocalServer,
    client: tinker.ServiceClient,
    model: Path,
    adapter: Path,
    folder: Path,
    sdk: str,
    train_unembed: bool = False,
) -> None:
    """Check that the adapter is sampled as PEFT computes it, trained on, and that PEFT loads what comes of it."""
    path = upload(server, adapter, sdk, train_unembed)
    trainer = client.create_training_client_from_state(path).result()
    theirs = oracle.load(model, adapter)
    before = oracle.logprobs(theirs, TOKENS).detach().numpy()
    plain = oracle.logprobs(oracle.load(model), TOKENS).detach().numpy()
    assert np.abs(before - plain).max() > 0.1
    np.testing.assert_allclose(logprobs(trainer, TOKENS), before, rtol=0, atol=1e-4)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    np.testing.assert_allclose(sampler.compute_logprobs(text(TOKENS)).result()[1:], before, rtol=0, atol=1e-4)

    for _ in range(5):
        step(trainer, [supervised(TOKENS)])
    after = logprobs(trainer, TOKENS)
    assert after.sum() > before.sum() + 1
    rest = client.create_rest_client()
    download(rest, trainer.save_weights_external("trained").result().path, folder / "trained")
    assert json.loads((folder / "trained" / "adapter_config.json").read_text())["r"] == RANK
    mine = oracle.logprobs(oracle.load(model, folder / "trained"), TOKENS).detach().numpy()
    np.testing.assert_allclose(mine, after, rtol=0, atol=1e-4)
    resumed = client.create_training_client_from_state_with_optimizer(trainer.save_state("on").result().path).result()
    np.testing.assert_array_equal(logprobs(resumed, TOKENS), after)


@pytest.mark.parametrize("sdk", ["0.39.0", "0.40.0"])
def test_adapter_of_peft_is_sampled_trained_on_and_loaded_by_peft(
    live_server, service_client, tiny_model, adapter, tmp_path, sdk
):
    goes_round(live_server, service_client, tiny_model, adapter, tmp_path, sdk)


@pytest.mark.full
def test_adapter_of_peft_goes_round_on_torch(tiny_model, adapter, tmp_path):
    sizes = {"max_lora_rank": 8, "max_context_length": 128, "train_tile_tokens": 64}
    options = {"backend": "skyrl_train", "backend-config": json.dumps(sizes)}
    with LocalServer(tmp_path / "state", str(tiny_model), options) as server, service(server) as client:
        goes_round(server, client, tiny_model, adapter, tmp_path, "0.40.0")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_adapter_of_the_vocabulary_projection_goes_round_with_the_copy_that_peft_saves(tiny_model, tmp_path):
    """The copy of base weights is larger than any adapter of this server."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    get_peft_model(oracle.load(tiny_model), config).save_pretrained(tmp_path / "adapter")
    assert any(name.endswith("lm_head.base_layer.weight") for name in oracle.adapter(tmp_path / "adapter"))
    options = {"backend-config": json.dumps({"max_lora_rank": 4, "warm_up": False})}
    with LocalServer(tmp_path / "state", str(tiny_model), options) as server, service(server) as client:
        goes_round(server, client, tiny_model, tmp_path / "adapter", tmp_path, "0.40.0", train_unembed=True)


def test_upload_has_no_optimizer_state_to_load(live_server, service_client, adapter):
    with pytest.raises(tinker.RequestFailedError, match="optimizer=false"):
        service_client.create_training_client_from_state_with_optimizer(upload(live_server, adapter, "0.39.0")).result()
