"""Samples that engines do not draw, though one could: the backend's own sampler draws them, from the right version."""

import logging
from pathlib import Path
from typing import Any

import pytest

from skyrl.backends.base_id import base_id
from skyrl.backends.engines import fleet as fleet_module
from skyrl.backends.operations import Progress, Publish
from skyrl.backends.torch import TorchBackend
from skyrl.types import ErrorResponse, Origin, SamplingOptions
from tests.backends.engines.test_backend_with_engines import check, done, opened, sample, train

UNDRAWABLE = {"options": SamplingOptions(min_tokens=1, stop_token_ids=tuple(range(40)))}
"""More stop tokens than our own sampler can suppress. Engines can."""


@pytest.fixture
def fails_soon(monkeypatch) -> None:
    monkeypatch.setattr(fleet_module, "ATTEMPTS", 2)


def publish(backend: TorchBackend, *names: str, path: str | None = None) -> None:
    for number, name in enumerate(names):
        train(backend, name, number)
        done(backend, Publish(request_id=f"publish {name}", model_id=name, version=name, path=path))


def check_here(backend: TorchBackend, model: Path, version: str | None, result: Any) -> None:
    check(backend, version, result)
    assert {sequence.origins for sequence in result.sequences} == {(Origin(0, version, base_id(model), None),)}


def warnings_of(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if "are drawn by this backend" in one.getMessage()]


def test_samples_of_an_engine_that_stays_away_are_drawn_here(model, process, tmp_path, caplog):
    process.anew()
    with caplog.at_level(logging.WARNING), opened(model, tmp_path / "e", process, absent_timeout_s=0.3) as backend:
        publish(backend, "one", "two")
        process.kill()
        for name in ("one", "two", "one"):
            (result,) = done(backend, sample(name))
            check_here(backend, model, name, result)
        assert len(warnings_of(caplog)) == 1 and "absent_timeout_s" in warnings_of(caplog)[0]
        (error,) = done(backend, sample("one", **UNDRAWABLE))
        assert isinstance(error, ErrorResponse) and error.status == "server" and "engine is there" in error.error
        process.start()
        while not backend.sampler.fleet.engines:
            backend.wait(1)
            backend.step()
        (result,) = done(backend, sample("one"))
        assert {one.origins[0].engine for one in result.sequences} == {process.url}


def test_no_token_is_reported_twice_if_the_engine_ends_in_mid_sample(model, process, tmp_path):
    process.anew(token_s=0.05)
    with opened(model, tmp_path / "e", process, absent_timeout_s=0.3) as backend:
        reports: list[Progress] = []

        def note(report: Progress) -> None:
            reports.append(report)
            process.kill()

        backend.on_progress = note
        (result,) = done(backend, sample(None, reports_progress=True))
        check_here(backend, model, None, result)
        assert reports
        for number, sequence in enumerate(result.sequences):
            assert sum(len(one.tokens) for one in reports if one.number == number) < len(sequence.tokens)
    process.anew()


def test_a_sample_that_the_engine_does_not_take_is_drawn_here(model, process, tmp_path, caplog):
    process.anew()
    with caplog.at_level(logging.WARNING), opened(model, tmp_path / "e", process) as backend:
        publish(backend, "one")
        done(backend, sample("one"))
        process.tell("/sizes", longest=10)  # unlike what it said
        for _ in range(2):
            (result,) = done(backend, sample("one"))
            check_here(backend, model, "one", result)
        (warning,) = warnings_of(caplog)
        assert warning.endswith("engines refuse them")
        (error,) = done(backend, sample("one", **UNDRAWABLE))
        assert isinstance(error, ErrorResponse) and error.status == "user" and "above 10" in error.error
    process.anew()


def test_a_version_that_an_engine_has_wrong_is_drawn_here(model, process, tmp_path, fails_soon):
    process.anew()
    with opened(model, tmp_path / "e", process) as backend:
        publish(backend, "one", "two")
        done(backend, sample("one"))
        process.tell("/fault", fault="silent")
        right, error = done(backend, sample("two"), sample("two", **UNDRAWABLE))
        check_here(backend, model, "two", right)
        assert isinstance(error, ErrorResponse) and error.status == "server"
        assert error.error.startswith("version=two cannot be sampled: engines have other weights under its name")
        assert "save the weights again" in error.error and str(tmp_path) not in error.error
    process.anew()
