"""The torch backend with engines that draw its samples, against its own sampler, which scores what they drew."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.backends.base_id import base_id
from skyrl.backends.operations import (
    CreateModel,
    ForwardBackward,
    Operation,
    OptimStep,
    Progress,
    Publish,
    Sample,
)
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.errors import RequestError
from skyrl.types import (
    AdamParams,
    Datum,
    ErrorResponse,
    LoraConfig,
    Origin,
    SampleOutput,
    SamplingOptions,
    SamplingParams,
)
from tests.backends.engines.engine_server import LONGEST, SECRET, EngineProcess, engine_process

PROMPT = np.asarray([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
CLOSE = 2e-3


@contextmanager
def opened(model: Path, folder: Path, *processes: EngineProcess, **engines: Any) -> Iterator[TorchBackend]:
    given = {
        "urls": [process.url for process in processes],
        "api_key": SECRET,
        "folder": str(folder),
        "max_loras": 2,
        "max_requests": 8,
        "health_interval_s": 0.2,
        "connect_timeout_s": 60,
    }
    config = TorchBackendConfig.model_validate(
        {"max_lora_rank": 4, "max_context_length": LONGEST, "engines": given | engines}
    )
    backend = TorchBackend(str(model), config)
    try:
        yield backend
    finally:
        backend.close()


@pytest.fixture(scope="module")
def backend(model, process, tmp_path_factory) -> Iterator[TorchBackend]:
    """A backend with one engine and versions of three models, two of them on disk."""
    process.anew()
    folder = tmp_path_factory.mktemp("files")
    with opened(model, folder / "engines", process) as backend:
        for number, name in enumerate(("one", "two", "three")):
            train(backend, name, number)
            path = None if name == "three" else str(folder / name)
            done(backend, Publish(request_id=f"publish {name}", model_id=name, version=name, path=path))
        yield backend


def done(backend: TorchBackend, *operations: Operation) -> list[Any]:
    results = backend._finish(list(operations))
    return [results[operation.request_id] for operation in operations]


def train(backend: TorchBackend, name: str, seed: int, rank: int = 4, **lora: Any) -> None:
    config = LoraConfig(rank=rank, seed=seed, **lora)
    tokens = np.random.default_rng(seed).integers(1000, size=20).astype(np.int32)
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(19, np.float32)})
    operations: list[Operation] = [CreateModel(request_id=f"create {name}", model_id=name, lora_config=config)]
    for step in range(3):
        operations.append(
            ForwardBackward(request_id=f"{name} {step}", model_id=name, data=[datum] * 2, loss_fn="cross_entropy")
        )
        operations.append(
            OptimStep(
                request_id=f"step {name} {step}",
                model_id=name,
                adam_params=AdamParams(learning_rate=0.05 if rank else 0.01),
            )
        )
    for result in done(backend, *operations):
        assert not isinstance(result, ErrorResponse), result


numbers = iter(range(10**9))


def sample(version: str | None, **options: Any) -> Sample:
    params = {"max_tokens": 12, "seed": 7} | options.pop("params", {})
    given = {"prompt": PROMPT, "num_samples": 2} | options
    return Sample(request_id=f"sample {next(numbers)}", version=version, params=SamplingParams(**params), **given)


def scores(backend: TorchBackend, version: str | None, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities of what follows the prompt, by the backend's own sampler."""
    whole = np.concatenate([PROMPT, tokens])
    (result,) = done(backend, sample(version, prompt=whole, prompt_logprobs=True, params={"max_tokens": 1}))
    assert isinstance(result, SampleOutput) and result.prompt_logprobs is not None, result
    return result.prompt_logprobs[len(PROMPT) :]


def check(backend: TorchBackend, version: str | None, result: Any) -> None:
    assert isinstance(result, SampleOutput), result
    for sequence in result.sequences:
        np.testing.assert_allclose(sequence.logprobs, scores(backend, version, sequence.tokens), atol=CLOSE)


def test_samples_are_drawn_by_the_engine_from_the_version_that_was_asked_for(backend, process, model):
    before = process.ask()["drawn"]
    names = [None, "one", "two", "three", "one"]
    for name, result in zip(names, done(backend, *(sample(name) for name in names)), strict=True):
        check(backend, name, result)
        for sequence in result.sequences:
            assert sequence.origins == (Origin(0, name, base_id(model), process.url),)
    assert process.ask()["drawn"] - before >= 2 * len(names)


def test_tokens_are_reported_while_an_engine_draws_them(model, process, tmp_path):
    """Up to the stop that our own rules find."""
    process.anew(token_s=0.05)
    with opened(model, tmp_path / "engines", process) as backend:
        (free,) = done(backend, sample(None))
        stop = free.sequences[0].tokens.tolist()[8]
        reports: list[Progress] = []
        backend.on_progress = reports.append
        (result,) = done(backend, sample(None, reports_progress=True, params={"stop": [stop]}))
    for number, sequence in enumerate(result.sequences):
        parts = [report for report in reports if report.number == number]
        assert len(parts) > 2
        tokens, logprobs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "logprobs"))
        assert len(tokens) > 3
        np.testing.assert_array_equal(tokens, sequence.tokens[: len(tokens)])
        np.testing.assert_array_equal(logprobs, sequence.logprobs[: len(tokens)])
    assert result.sequences[0].tokens.tolist()[-1] == stop


def test_what_is_drawn_depends_on_seed_and_number_alone(backend):
    one, again = done(backend, sample("one"), sample("one"))
    other = done(backend, sample("one", params={"seed": 8}))[0]
    drawn = [[sequence.tokens.tolist() for sequence in result.sequences] for result in (one, again, other)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][1]


def test_prompts_are_scored_here_while_the_engine_draws(backend, process):
    done(backend, sample("two"))
    before = process.ask()["drawn"]
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    (result,) = done(backend, sample("two", **asked))
    assert process.ask()["drawn"] == before + 2
    check(backend, "two", result)
    assert np.isfinite(result.prompt_logprobs[1:]).all() and result.topk_prompt_logprobs[0].shape == (8, 3)
    assert all(sequence.topk_logprobs[0].shape == (12, 2) for sequence in result.sequences)


@pytest.mark.parametrize(
    "options",
    [
        {"tempered_logprobs": True, "params": {"temperature": 0.7}},
        {"topk_sample_logprobs": 30},
        {"topk_sample_logprobs": 30, "options": SamplingOptions(presence_penalty=0.5)},
        {"params": {"temperature": 0.005}},
    ],
    ids=["tempered", "more than max_logprobs", "penalties beside that", "too cold"],
)
def test_what_an_engine_cannot_do_is_drawn_here(backend, process, options):
    before = process.ask()["drawn"]
    (result,) = done(backend, sample("one", **options))
    assert isinstance(result, SampleOutput) and process.ask()["drawn"] == before


def test_the_option_of_vllm_that_a_sample_needs_is_named(model, process, tmp_path, caplog):
    process.anew()
    with caplog.at_level(logging.WARNING), opened(model, tmp_path / "engines", process) as backend:
        done(backend, sample(None, tempered_logprobs=True, params={"temperature": 0.7}))
    assert "no engine has logprobs:processed; start them with --logprobs-mode processed_logprobs" in caplog.text


def test_eos_and_stop_lists_mean_what_they_mean_here(backend):
    """Rules of stopping are ours: sequences end where the backend's own would, with what is told of why."""
    (free,) = done(backend, sample("one", params={"temperature": 0, "stop": []}))
    tokens = free.sequences[0].tokens.tolist()
    stop = tokens[3]
    (stopped,) = done(backend, sample("one", params={"temperature": 0, "stop": [stop]}))
    assert stopped.sequences[0].tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert (free.sequences[0].stop_reason, stopped.sequences[0].stop_reason) == ("length", "stop")
    text = backend.tokenizer.decode(tokens[:4])[-2:]
    (at_text,) = done(backend, sample("one", params={"temperature": 0, "stop": [text]}))
    assert len(at_text.sequences[0].tokens) <= 12


def test_a_version_that_is_dropped_is_drawn_all_the_same_by_those_who_asked_before(backend):
    train(backend, "short-lived", 9)
    done(backend, Publish(request_id="p", model_id="short-lived", version="short-lived", path=None))
    (before,) = done(backend, sample("short-lived"))
    asked = sample("short-lived")
    backend.submit(asked)
    backend.drop_version("short-lived")
    results = backend._finish([sample(None)])
    while asked.request_id not in results:
        backend.wait(10)
        results |= {completion.request_id: completion.result for completion in backend.step()}
    after = results[asked.request_id]
    assert [s.tokens.tolist() for s in after.sequences] == [s.tokens.tolist() for s in before.sequences]
    (unknown,) = done(backend, sample("short-lived"))
    assert isinstance(unknown, ErrorResponse) and unknown.status == "user"


def test_a_whole_model_is_sampled_here(backend, process):
    train(backend, "whole", 1)
    done(backend, CreateModel(request_id="w", model_id="w", lora_config=LoraConfig(rank=0)))
    done(backend, Publish(request_id="pw", model_id="w", version="w", path=None))
    before = process.ask()["drawn"]
    (result,) = done(backend, sample("w"))
    assert isinstance(result, SampleOutput) and process.ask()["drawn"] == before


def test_nothing_spins_while_engines_draw(backend, process):
    process.tell("/fault", fault="hang")
    asked = sample(None)
    backend.submit(asked)
    while asked.request_id not in backend.sampler.elsewhere or backend.busy:
        backend.step()
    assert backend.computed == (asked.request_id,) and not backend.wait(0.2)
    process.tell("/fault", fault=None)
    backend.cancel(asked.request_id)
    assert not backend.computed


@pytest.mark.full
def test_an_engine_with_another_model_is_refused_at_start(model, process, tmp_path):
    from skyrl.tx.synthetic.make_model import make_model

    other = tmp_path / "other"
    make_model(other, arch="qwen3", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=64, seed=5)
    with (
        engine_process(other, base=str(other), longest=LONGEST) as wrong,
        pytest.raises(RequestError, match=r"log-probabilities differ from .* another model"),
        opened(model, tmp_path / "engines", wrong),
    ):
        pass


@pytest.mark.full
@pytest.mark.parametrize("unembed", ["refused", "ignored"])
def test_adapters_that_an_engine_lacks_are_sampled_here(model, process, tmp_path, unembed, caplog):
    """It may say so, or silently serve them without, which log-probabilities tell."""
    process.anew(unembed=unembed)
    with caplog.at_level(logging.WARNING), opened(model, tmp_path / "engines", process) as backend:
        assert "adapters on unembed" in caplog.text
        train(backend, "with", 1)
        train(backend, "without", 2, train_unembed=False)
        for name in ("with", "without"):
            done(backend, Publish(request_id=f"p {name}", model_id=name, version=name, path=None))
        before = process.ask()["drawn"]
        (here,) = done(backend, sample("with"))
        assert process.ask()["drawn"] == before
        (there,) = done(backend, sample("without"))
        assert process.ask()["drawn"] == before + 1 + 2, "it is compared, and then drawn"
        check(backend, "with", here)
        check(backend, "without", there)
    process.anew()


@pytest.mark.full
def test_an_engine_that_takes_an_adapter_for_none_does_not_draw_from_the_base_model(model, process, tmp_path, caplog):
    process.anew(wraps=True)
    with caplog.at_level(logging.WARNING), opened(model, tmp_path / "engines", process) as backend:
        assert "the base model beside adapters" in caplog.text
        before = process.ask()["drawn"]
        (result,) = done(backend, sample(None))
        assert process.ask()["drawn"] == before
        check(backend, None, result)
    process.anew()


@pytest.mark.full
def test_a_version_that_an_engine_has_wrong_is_found_before_it_is_sampled(model, process, tmp_path, caplog):
    process.anew()
    with opened(model, tmp_path / "engines", process) as backend:
        for number, name in enumerate(("one", "two")):
            train(backend, name, number)
            done(backend, Publish(request_id=f"p {name}", model_id=name, version=name, path=None))
        done(backend, sample("one"))
        process.tell("/fault", fault="silent")
        asked = sample("two")
        backend.submit(asked)
        while "version=two" not in caplog.text:
            backend.wait(10)
            assert not backend.step()
        process.tell("/fault", fault=None)
        while asked.request_id not in (results := {one.request_id: one.result for one in backend.step()}):
            backend.wait(10)
        check(backend, "two", results[asked.request_id])
        differs = r"draws from version=two \(skyrl-\w+\) with log-probabilities that differ from ours by [\d.]+"
        assert re.search(f"{process.url} {differs} on average, past the bound of 0.001", caplog.text)
    process.anew()


@pytest.mark.full
def test_processed_logprobs_are_found_out_and_serve_tempered_requests(model, process, tmp_path):
    process.anew(mode="processed")
    with opened(model, tmp_path / "engines", process) as backend:
        before = process.ask()["drawn"]
        done(backend, sample(None, tempered_logprobs=True, params={"temperature": 0.7}))
        assert process.ask()["drawn"] == before + 2
        done(backend, sample(None, params={"temperature": 0.7}))
        assert process.ask()["drawn"] == before + 2
    process.anew()


@pytest.mark.full
def test_no_engine_at_start_is_told_with_what_was_tried(model, process, tmp_path):
    process.kill()
    with (
        pytest.raises(RequestError, match=rf"start_timeout_s.*{process.url}"),
        opened(model, tmp_path / "engines", process, start_timeout_s=0.5),
    ):
        pass


def test_engines_without_a_folder_are_refused():
    config = TorchBackendConfig.model_validate({"engines": {"urls": ["localhost:8000"]}})
    with pytest.raises(RequestError, match=r"urls=http://localhost:8000 without engines\.folder"):
        TorchBackend("no model", config)
