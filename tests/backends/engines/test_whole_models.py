"""Models of which all weights are trained on engines that are reserved for them, against the backend's own sampler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.backends.base_id import base_id
from skyrl.backends.operations import Publish
from skyrl.backends.torch import TorchBackend
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import SampleOutput
from tests.backends.engines.engine_server import LONGEST, engine_process
from tests.backends.engines.test_backend_with_engines import (
    CLOSE,
    done,
    opened,
    sample,
    scores,
    train,
)

VERSIONS = ("one", "two")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    sizes: dict[str, Any] = {"hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    return make_model(tmp_path_factory.mktemp("model") / "untied", "qwen3", **sizes, seed=0)


@pytest.fixture(scope="module")
def process(model):
    with engine_process(model, base=str(model), longest=LONGEST) as process:
        yield process


@pytest.fixture(scope="module")
def backend(model, process, tmp_path_factory):
    process.anew()
    with opened(model, tmp_path_factory.mktemp("files") / "engines", process, whole=True) as backend:
        publish(backend)
        yield backend


def publish(backend: TorchBackend) -> None:
    """Publish two versions of whole models, and one of an adapter."""
    for number, name in enumerate(VERSIONS):
        train(backend, name, number, rank=0)
    train(backend, "adapter", 2)
    for name in (*VERSIONS, "adapter"):
        done(backend, Publish(request_id=f"publish {name}", model_id=name, version=name, path=None))


def check(backend: TorchBackend, name: str | None, result: object, engine: str | None) -> None:
    assert isinstance(result, SampleOutput), result
    for sequence in result.sequences:
        np.testing.assert_allclose(
            sequence.logprobs, scores(backend, name, np.asarray(sequence.tokens)), atol=CLOSE, err_msg=str(name)
        )
        assert {(each.version, each.base, each.engine) for each in sequence.origins} == {
            (name, backend.info().base_id, engine)
        }


@pytest.mark.full
def test_versions_of_whole_models_are_drawn_by_engines_one_after_the_other(backend, process):
    before = process.ask()
    for name in (*VERSIONS, *VERSIONS):
        (result,) = done(backend, sample(name))
        check(backend, name, result, process.url)
    after = process.ask()
    assert after["drawn"] - before["drawn"] == 4 * (1 + 2 + 4), "each is compared, drawn twice, and scored beside"
    assert after["reloads"] - before["reloads"] == 4


@pytest.mark.full
def test_versions_that_are_asked_for_at_once_are_not_mixed(backend, process):
    names = [*VERSIONS * 4]
    results = done(backend, *(sample(name, params={"seed": number}) for number, name in enumerate(names)))
    for name, result in zip(names, results, strict=True):
        check(backend, name, result, process.url)


@pytest.mark.parametrize("name", ["adapter", None])
def test_adapters_and_the_base_model_are_sampled_here_meanwhile(backend, name):
    (result,) = done(backend, sample(name))
    check(backend, name, result, None)


@pytest.mark.parametrize("at_once", [False, True], ids=["process killed", "nothing noticed"])
def test_an_engine_that_was_started_again_is_given_the_version_again(backend, process, at_once):
    (result,) = done(backend, sample("one"))
    check(backend, "one", result, process.url)
    if at_once:
        process.anew()
    else:
        process.kill()
        process.start()
    (result,) = done(backend, sample("one", params={"seed": 8}))
    check(backend, "one", result, process.url)
    assert process.ask()["reloads"] == 1


@pytest.mark.full
def test_an_engine_that_keeps_its_old_weights_draws_nothing(model, process, tmp_path, monkeypatch):
    monkeypatch.setattr("skyrl.backends.engines.fleet.LONGEST_PAUSE_S", 0.1)
    process.anew(keeps=True)
    with opened(model, tmp_path / "engines", process, whole=True) as backend:
        publish(backend)
        (result,) = done(backend, sample("one", num_samples=1))
        check(backend, "one", result, None)
    told = process.ask()
    assert told["reloads"] >= 2 and told["drawn"] < 40, "it was given the weights again, and then only compared"


@pytest.mark.parametrize("left", ["unfinished", "of another run"])
def test_an_engine_with_weights_of_a_driver_that_was_killed_gets_the_base_models(model, process, tmp_path, left):
    process.anew()
    other = make_model(tmp_path / "other", "qwen3", hidden=32, layers=1, heads=4, kv_heads=2, head_dim=8, seed=1)
    process.tell("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(other)})
    process.tell("/update_weight_version", new_version=left)
    with opened(model, tmp_path / "engines", process, whole=True):
        told = process.ask()
        assert (told["weights"], told["reloads"]) == (base_id(model), 2)


@pytest.mark.full
def test_two_engines_draw_two_versions(model, process, tmp_path):
    with engine_process(model, base=str(model), longest=LONGEST) as other:
        process.anew()
        with opened(model, tmp_path / "engines", process, other, whole=True) as backend:
            publish(backend)
            names = [*VERSIONS * 6]
            results = done(backend, *(sample(name, params={"seed": number}) for number, name in enumerate(names)))
            engines = set()
            for result in results:
                assert isinstance(result, SampleOutput), result
                engines |= {origin.engine for sequence in result.sequences for origin in sequence.origins}
            assert engines == {process.url, other.url}
