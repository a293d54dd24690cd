"""Engines as trainers and servers are told of them: fields and flags that come to `EngineOptions`, and whole runs."""

import asyncio
import json

import pytest
import tinker

from skyrl.backends.torch import TorchBackendConfig
from skyrl.errors import RequestError
from skyrl.tinker.config import parse_config
from skyrl.tinker.engine import open_backend
from skyrl.tinker.local_server import LocalServer
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.run import train_rl
from skyrl.train.strategy.torch_backend import TorchStrategy
from tests.backends.engines.engine_server import SECRET, engine_process
from tests.backends.engines.small_runs import APART, ENGINES, HERE, LORA, arguments, steps
from tests.live import make_tiny_model, new_trainer, service, supervised, text


def options(*given: str) -> TorchBackendConfig:
    config = SkyRLTrainConfig.from_cli_overrides([*HERE, APART, f"{LORA}rank=4", *given]).resolve()
    assert not [*TorchStrategy().unsupported(config), *TorchStrategy().problems(config)]
    return TorchBackendConfig(**TorchStrategy().rl_options(config))


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        (["run_engines_locally=false", "remote_urls=[10.0.0.1:8000]"], ("http://10.0.0.1:8000",)),
        (["external_server_urls=[http://a:1/v1,https://b]"], ("http://a:1", "https://b")),
        (["external_proxy_url=http://proxy:80/"], ("http://proxy:80",)),
    ],
)
def test_fields_of_engines_elsewhere_are_their_addresses(given, urls):
    engines = options(*(ENGINES + one for one in given), f"{LORA}lora_sync_path=/shared", f"{ENGINES}max_num_seqs=64")
    assert (engines.engines.urls, engines.engines.folder, engines.engines.max_requests) == (urls, "/shared", 64)


def test_options_of_the_backend_are_laid_over_those_of_the_fields():
    engines = options(f"{ENGINES}external_server_urls=[http://a]", "trainer.torch.engines={max_loras: 4}").engines
    assert (engines.urls, engines.max_loras) == (("http://a",), 4)


def test_engines_of_a_policy_without_adapters_are_reserved_for_whole_models():
    external = f"{ENGINES}external_server_urls=[http://a]"
    assert options(external, f"{LORA}rank=0").engines.whole
    assert not options(external).engines.whole


def test_flags_of_the_server_are_options_of_engines(monkeypatch):
    argv = ["--external-inference-url", "http://a:1,b:2", "--external-inference-lora-base", "/shared"]
    argv += ["--forwarding-inference-max-connections", "7"]
    given = parse_config(argv, environ={"SKYRL_EXTERNAL_INFERENCE_API_KEY": "secret"}).engines
    engines = TorchBackendConfig.model_validate({"engines": given}).engines
    assert (engines.urls, engines.folder, engines.max_requests) == (("http://a:1", "http://b:2"), "/shared", 7)
    monkeypatch.setenv("VLLM_API_KEY", "another")
    assert engines.key == "secret" and "secret" not in repr(engines)


def test_a_backend_without_engines_says_so(tmp_path):
    argv = ["--external-inference-url", "http://a", "--external-inference-lora-base", str(tmp_path), "--backend", "jax"]
    with pytest.raises(RequestError, match=r"the jax backend samples by itself; .* --backend torch"):
        open_backend(parse_config(argv, environ={}), print)


@pytest.mark.full
def test_grpo_samples_with_engines_and_its_logprobs_are_those_of_the_trainer(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    given = arguments(tmp_path, model, APART, f"{LORA}rank=4", f"{LORA}lora_sync_path={tmp_path}/shared")
    given += [f"{ENGINES}run_engines_locally=false"]
    with engine_process(model, base=str(model), longest=256) as process, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", SECRET)
        config = SkyRLTrainConfig.from_cli_overrides([*given, f"{ENGINES}remote_urls=[{process.url}]"]).resolve()
        run = asyncio.run(train_rl(config))
        told = process.ask()
    assert run.global_step == run.total_steps == 2
    assert told["drawn"] >= 2 * 4 * config.generator.n_samples_per_prompt
    assert len(steps(tmp_path)) == 2


@pytest.mark.slow
def test_the_sdk_samples_what_it_trained_through_an_engine(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    with engine_process(model, base=str(model), longest=256, max_loras=1) as process:
        given = {
            "backend": "skyrl_train",
            "backend-config": json.dumps({"max_lora_rank": 8, "max_context_length": 256}),
            "external-inference-url": process.url,
            "external-inference-lora-base": str(tmp_path / "shared"),
        }
        secret = {"SKYRL_EXTERNAL_INFERENCE_API_KEY": SECRET, "OMP_NUM_THREADS": "1"}
        with LocalServer(tmp_path / "state", str(model), given, secret) as server, service(server) as client:
            tokens = [5, 6, 7, 8, 9, 10, 11, 12]
            trainer = new_trainer(client, server)
            for _ in range(2):
                trainer.forward_backward([supervised(tokens)], "cross_entropy").result()
                trainer.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            before = process.ask()["drawn"]
            params = tinker.SamplingParams(max_tokens=4, seed=1, stop=[])
            answer = sampler.sample(text(tokens[:4]), num_samples=2, sampling_params=params).result()
            assert process.ask()["drawn"] == before + 1 + 2, "it is compared, and then drawn"
            for sequence in answer.sequences:
                scored = sampler.compute_logprobs(text([*tokens[:4], *sequence.tokens])).result()
                assert sequence.logprobs == pytest.approx(scored[4:], abs=1e-3)
