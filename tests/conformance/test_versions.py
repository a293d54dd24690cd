"""Published versions: the weights that they are sampled from, in memory and on disk."""

import hashlib

import pytest

from skyrl.types import ErrorResponse, Origin, Result, SampleOutput, SaveOutput
from tests.conformance.operations import (
    ROWS,
    a_pass,
    a_publish,
    a_sample,
    a_snapshot,
    a_step,
    done,
    drawn,
    failure,
    fresh,
    run,
    sampled,
    snapshot,
)

pytestmark = pytest.mark.gpu


def test_a_published_version_stays_as_it_was_while_its_model_trains_on_and_is_deleted(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model))
    version = fresh("version")
    done(backend, a_publish(model, version, tmp_path / "version", persist=False))
    before = sampled(backend, version, num_samples=4)
    done(backend, *(operation for _ in range(5) for operation in (a_pass(model), a_step(model))))
    later = fresh("version")
    done(backend, a_publish(model, later, tmp_path / "later"))
    assert sampled(backend, version, num_samples=4) == before
    assert sampled(backend, later, num_samples=4) != before
    backend.delete_model(model)
    assert sampled(backend, version, num_samples=4) == before


@pytest.mark.gate("torch-published-again")
@pytest.mark.parametrize("republish", [False, True], ids=["dropped", "published-again"])
def test_samples_that_wait_are_drawn_from_the_version_that_they_asked_for(backend, model, republish):
    version = fresh("version")
    done(backend, a_publish(model, version, None))
    seeds = range(6 * ROWS)
    expected = drawn(done(backend, *(a_sample(version, seed=seed) for seed in seeds)))
    done(backend, *(operation for _ in range(5) for operation in (a_pass(model), a_step(model))))
    waiting = [a_sample(version, seed=seed) for seed in seeds]
    for operation in waiting:
        backend.submit(operation)
    later = a_publish(model, version if republish else fresh("version"), None)
    backend.submit(later)
    results: dict[str, Result] = {}
    while later.request_id not in results:
        results |= {completion.request_id: completion.result for completion in backend.step()}
    assert len(results) < len(waiting), "all were drawn before the new weights were there"
    if not republish:
        backend.drop_version(version)
    while len(results) <= len(waiting):
        results |= {completion.request_id: completion.result for completion in backend.step()}
    ended = [results[operation.request_id] for operation in waiting]
    assert drawn(ended) == expected
    stamps = {origin for output in ended for sequence in output.sequences for origin in sequence.origins}
    assert stamps == {Origin(0, version, backend.info().base_id)}
    assert drawn(done(backend, *(a_sample(later.version, seed=seed) for seed in seeds))) != expected
    if not republish:
        assert f"version={version} is not known here" in failure(backend, a_sample(version))


def test_a_persisted_version_is_on_disk_when_it_is_acknowledged_and_samples_the_same_from_there(
    backend, model, tmp_path
):
    done(backend, a_pass(model), a_step(model))
    version, path = fresh("version"), tmp_path / "version"
    done(backend, a_publish(model, version, path))
    assert path.is_dir()
    before = sampled(backend, version)
    backend.drop_version(version)
    assert sampled(backend, version, path) == before


def test_a_version_that_was_published_at_once_is_told_when_it_is_on_disk(backend, model, tmp_path):
    stored = {}
    backend.on_stored = stored.__setitem__
    version = fresh("version")
    (published,) = done(backend, a_publish(model, version, tmp_path / "version", persist=False))
    assert published == SaveOutput(str(tmp_path / "version"))
    snapshot(backend, model, tmp_path / "snapshot")
    manifest = (tmp_path / "version" / "manifest.json").read_bytes()
    assert stored[version].path == str(tmp_path / "version")
    assert stored[version].digest == hashlib.sha256(manifest).hexdigest()


def test_a_version_that_could_not_be_written_is_written_before_the_next_snapshot_or_it_fails(backend, model, tmp_path):
    blocked, version = tmp_path / "blocked", fresh("version")
    blocked.write_text("a file where a folder should be")
    done(backend, a_publish(model, version, blocked / "version", persist=False))
    before = sampled(backend, version)
    (failed,) = run(backend, a_snapshot(model, tmp_path / "snapshot"))
    assert isinstance(failed, ErrorResponse) and failed.status == "server" and version in failed.error
    blocked.unlink()
    snapshot(backend, model, tmp_path / "snapshot")
    backend.drop_version(version)
    assert sampled(backend, version, blocked / "version") == before


def test_a_version_that_could_not_be_written_and_was_deleted_holds_up_no_snapshot(backend, model, tmp_path):
    blocked, version = tmp_path / "blocked", fresh("version")
    blocked.write_text("a file where a folder should be")
    done(backend, a_publish(model, version, blocked / "version", persist=False))
    backend.drop_version(version)
    snapshot(backend, model, tmp_path / "snapshot")


def test_a_version_that_cannot_be_written_is_no_matter_to_other_models(backend, new_model, tmp_path):
    blocked, version, model = tmp_path / "blocked", fresh("version"), new_model()
    blocked.write_text("a file where a folder should be")
    done(backend, a_publish(model, version, blocked / "version", persist=False))
    snapshot(backend, new_model(), tmp_path / "snapshot")
    backend.drop_version(version)


def test_samples_are_stamped_with_the_version_and_the_base_that_they_were_drawn_from(backend, model):
    names = [fresh("version") for _ in range(6)]
    done(backend, *(a_publish(model, name, None) for name in names))
    asked = [None, *names, *names, None]
    for version, output in zip(asked, done(backend, *(a_sample(one, num_samples=2) for one in asked)), strict=True):
        assert isinstance(output, SampleOutput)
        for sequence in output.sequences:
            assert sequence.origins == (Origin(0, version, backend.info().base_id),)
