"""Adapters with connectors of several residual streams on the JAX backend: trained, saved, sampled, beside others."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import driver
from driver import finish, forward_backward, new_id, optim_step, publish, random_datum, sample, stepping
from skyrl.backends.backend import CreateModel, ExportModel, ForwardBackward, LoadSnapshot, OptimStep, SaveSnapshot
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.types import AdapterConfig, DimuonParams, ErrorResponse, LoraConfig

pytestmark = pytest.mark.full

WITH, WITHOUT = LoraConfig(rank=4, seed=1), AdapterConfig(rank=4, seed=1, exclude_modules=".*_connector")
SIZES = {"max_lora_rank": 8, "max_context_length": 64, "train_tile_tokens": 64}
TOO_FAR = 3e38
"""A learning rate that leaves infinities, and after another step NaN."""


@pytest.fixture(scope="module")
def opened(tiny_model) -> Iterator[Callable[..., JaxBackend]]:
    """Backends by their number of residual streams and other options, without models."""

    @cache
    def make(rate: int, **options) -> JaxBackend:
        settings = SIZES | {"warm_up": False, "compilation_cache": False, "mhc_expansion_rate": rate} | options
        return JaxBackend(str(tiny_model), JaxBackendConfig(**settings))

    made = []

    def opened(rate: int = 4, **options) -> JaxBackend:
        backend = make(rate, **options)
        made.append(backend)
        driver.clear(backend)
        return backend

    yield opened
    for backend in {id(backend): backend for backend in made}.values():
        backend.close()


def create(backend, model: str, config: LoraConfig = WITH) -> None:
    made = finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=config))
    assert not isinstance(made, ErrorResponse), made


def train(backend, *models: str, steps: int = 2, first: int = 0, **params) -> None:
    """Take steps of models whose passes are sent together."""
    for step in range(first, first + steps):
        passes = [
            ForwardBackward(request_id=new_id(), model_id=model, data=[random_datum(20, step)], loss_fn="cross_entropy")
            for model in models
        ]
        driver.finish_all(backend, passes)
        driver.finish_all(backend, [stepping(model, **params) for model in models])


def leaves(backend, model: str, connectors: bool | None = None) -> dict[str, np.ndarray]:
    """Weights by path: all, those of connectors, or the others."""
    found = jax.tree_util.tree_leaves_with_path(backend.adapter(model).weights)
    named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}
    return {name: leaf for name, leaf in named.items() if connectors in (None, "_connector" in name)}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float = 0) -> None:
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        np.testing.assert_allclose(leaf, other[name], rtol=tolerance, atol=tolerance, err_msg=name)


def logprobs(backend, model: str) -> np.ndarray:
    return forward_backward(backend, [random_datum(20)], model, forward_only=True).loss_fn_outputs[0]["logprobs"]


# -- training ----------------------------------------------------------------------------------------------------------


def test_connectors_take_the_steps_of_torchs_adamw_and_their_gradient_norm_is_a_metric(opened):
    backend = opened()
    create(backend, "model")
    before = leaves(backend, "model", connectors=True)
    parameters = {name: torch.nn.Parameter(torch.tensor(leaf)) for name, leaf in before.items()}
    adamw = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(3):
        forward_backward(backend, [random_datum(20, step)], "model")
        sums = jax.tree_util.tree_leaves_with_path(backend.accumulated_grads["model"])
        for path, leaf in sums:
            if (name := jax.tree_util.keystr(path)) in parameters:
                parameters[name].grad = torch.tensor(np.asarray(leaf))
        norm = np.sqrt(sum(float((parameter.grad.double() ** 2).sum()) for parameter in parameters.values()))
        adamw.step()
        metrics = optim_step(backend, "model", weight_decay=0.1).metrics
        assert 0 < metrics["skyrl.ai/mhc_gradient_norm"] < metrics["skyrl.ai/grad_norm"]
        assert metrics["skyrl.ai/mhc_gradient_norm"] == pytest.approx(norm, rel=1e-5)
    wanted = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
    assert_same(leaves(backend, "model", connectors=True), wanted, 1e-5)
    assert all(np.any(leaf != before[name]) for name, leaf in wanted.items())


def test_with_one_stream_there_is_no_such_metric(opened):
    backend = opened(rate=1)
    create(backend, "model")
    forward_backward(backend, [random_datum(20)], "model")
    assert "skyrl.ai/mhc_gradient_norm" not in optim_step(backend, "model").metrics


def test_an_adapter_without_connectors_trains_as_with_one_stream(opened):
    found = []
    for backend in (opened(), opened(rate=1)):
        create(backend, "model", WITHOUT)
        train(backend, "model", steps=3, weight_decay=0.1, eps=1e-6)
        found.append((leaves(backend, "model", connectors=False), logprobs(backend, "model")))
    assert_same(*(weights for weights, _ in found), 1e-3)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_adapters_with_and_without_connectors_do_not_touch_each_other(opened, deterministic):
    backend = opened(deterministic=deterministic)
    for name, config in {"with": WITH, "without": WITHOUT, "nan": WITH}.items():
        create(backend, name, config)
        create(backend, f"{name} alone", config)
    train(backend, "nan", learning_rate=TOO_FAR)
    train(backend, "with", "nan", "without", steps=3, weight_decay=0.1, eps=1e-6)
    for name in ("with", "without"):
        train(backend, f"{name} alone", steps=3, weight_decay=0.1, eps=1e-6)
        assert_same(leaves(backend, name), leaves(backend, f"{name} alone"), 0 if deterministic else 1e-4)
    assert all(np.any(leaf) for leaf in leaves(backend, "with", connectors=True).values())
    assert not any(np.any(leaf) for leaf in leaves(backend, "without", connectors=True).values())
    assert not all(np.isfinite(leaf).all() for leaf in leaves(backend, "nan").values())


def test_dimuon_is_refused_by_name_for_connectors_and_steps_without_them(opened):
    backend = opened()
    results = {}
    for name, config in {"with": WITH, "without": WITHOUT}.items():
        create(backend, name, config)
        forward_backward(backend, [random_datum(20)], name)
        results[name] = finish(
            backend, OptimStep(request_id=new_id(), model_id=name, dimuon_params=DimuonParams(learning_rate=1e-2))
        )
    assert "mhc_expansion_rate=4" in results["with"].error and "Dimuon" in results["with"].error
    assert not isinstance(results["without"], ErrorResponse)
    assert not any(np.any(leaf) for leaf in leaves(backend, "without", connectors=True).values())


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_snapshot_goes_on_to_the_bit(opened, tmp_path):
    backend = opened()
    create(backend, "model")
    train(backend, "model")
    forward_backward(backend, [random_datum(30)], "model")
    saved = finish(backend, SaveSnapshot(request_id=new_id(), model_id="model", path=str(tmp_path / "snapshot")))
    assert not isinstance(saved, ErrorResponse), saved
    finish(backend, LoadSnapshot(request_id=new_id(), model_id="again", path=saved.path, digest=saved.digest))
    for name in ("model", "again"):
        optim_step(backend, name)
        train(backend, name, first=7)
    assert_same(leaves(backend, "again"), leaves(backend, "model"))


def test_another_number_of_streams_and_the_torch_backend_refuse_connectors_by_name(opened, tiny_model, tmp_path):
    backend = opened()
    create(backend, "model")
    train(backend, "model")
    driver.save(backend, tmp_path / "state")
    publish(backend, "model/v", tmp_path / "sampler")
    for other in (opened(rate=1), opened(rate=2), TorchBackend(str(tiny_model), TorchBackendConfig(**SIZES))):
        refused = driver.load(other, tmp_path / "state"), sample(other, "model/v", tmp_path / "sampler")
        assert all("mhc_expansion_rate" in result.error and "connector" in result.error for result in refused), refused
        assert "mhc_expansion_rate=4" in refused[0].error
        driver.clear(other)
        if isinstance(other, TorchBackend):
            other.close()


def test_a_checkpoint_of_one_stream_goes_on_without_connectors(opened, tmp_path):
    one = opened(rate=1)
    create(one, "model")
    train(one, "model")
    driver.save(one, tmp_path / "state")
    four = opened()
    assert not isinstance(driver.load(four, tmp_path / "state"), ErrorResponse)
    for backend in (one, four):
        train(backend, "model", first=5, eps=1e-6)
    assert_same(leaves(four, "model", connectors=False), leaves(one, "model"), 1e-3)
    driver.save(four, tmp_path / "again")
    assert not isinstance(driver.load(four, tmp_path / "again", "again"), ErrorResponse)
    assert not any(np.any(leaf) for leaf in leaves(four, "again", connectors=True).values())


def test_published_connectors_are_read_back_and_sampled_as_they_are_trained(opened, tiny_model, tmp_path):
    backend = opened()
    for name, config in {"with": WITH, "without": WITHOUT}.items():
        create(backend, name, config)
        train(backend, name, steps=4, learning_rate=0.1)
        published = publish(backend, f"{name}/v", tmp_path / name, name)
        assert not isinstance(published, ErrorResponse), published
    files = {name: load_file(tmp_path / name / "adapter_model.safetensors") for name in ("with", "without")}
    configs = {name: json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in files}
    prefix = "base_model.model.model.layers."
    added = {name for name in files["with"] if "_connector" in name}
    parts = [f"{place}_connector.{part}" for place in ("attn", "mlp") for part in ("phi", "alpha", "bias")]
    assert added == {f"{prefix}{layer}.{part}" for layer in (0, 1) for part in parts}
    assert files["with"].keys() - added == files["without"].keys()
    assert {str(files["with"][name].dtype) for name in added} == {"float32"}
    assert configs["with"].pop("mhc_expansion_rate") == 4 and configs["with"] == configs["without"]

    settings = SIZES | {"warm_up": False, "compilation_cache": False, "mhc_expansion_rate": 4}
    prompt = list(range(3, 15))
    with closing(JaxBackend(str(tiny_model), JaxBackendConfig(**settings))) as fresh:
        for name in ("with", "without"):
            here, there = (sample(one, f"{name}/v", tmp_path / name, prompt=prompt) for one in (backend, fresh))
            np.testing.assert_array_equal(here.sequences[0].tokens, there.sequences[0].tokens)
            np.testing.assert_array_equal(here.sequences[0].logprobs, there.sequences[0].logprobs)
            whole = [*prompt, *here.sequences[0].tokens]
            data = [driver.datum(whole[:-1], whole[1:])]
            scored = forward_backward(backend, data, name, forward_only=True).loss_fn_outputs[0]["logprobs"]
            np.testing.assert_allclose(here.sequences[0].logprobs, scored[len(prompt) - 1 :], atol=1e-4)


def test_rows_of_several_adapters_are_sampled_as_each_alone(opened, tmp_path):
    backend = opened()
    names = ["with", "without", "other"]
    for name in names:
        create(backend, name, WITHOUT if name == "without" else WITH)
        train(backend, name, steps=3, first=len(name), learning_rate=0.1)
        published = publish(backend, f"{name}/v", tmp_path / name, name)
        assert not isinstance(published, ErrorResponse), published
    wanted = [driver.sampling(f"{name}/v", temperature=0.0) for name in names] + [
        driver.sampling(None, temperature=0.0)
    ]
    together = driver.finish_all(backend, wanted)
    for name, operation in zip([*names, None], wanted, strict=True):
        alone = sample(backend, name and f"{name}/v", temperature=0.0).sequences[0]
        np.testing.assert_array_equal(together[operation.request_id].sequences[0].tokens, alone.tokens)
        np.testing.assert_allclose(together[operation.request_id].sequences[0].logprobs, alone.logprobs, atol=1e-4)


def test_a_whole_model_is_exported_unless_its_connectors_do_something(opened, tmp_path):
    backend = opened()
    create(backend, "model")

    def exported(folder: Path):
        return finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(folder)))

    assert not isinstance(exported(tmp_path / "fresh"), ErrorResponse)
    train(backend, "model")
    refused = exported(tmp_path / "trained")
    assert refused.status == "user" and "mhc_expansion_rate=4" in refused.error and "exclude_modules" in refused.error
