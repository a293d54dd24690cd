"""Checkpoints and snapshots, and the effect of failures on gradients."""

import hashlib

import numpy as np
import pytest

from skyrl.backends.backend import LoadCheckpoint, LoadSnapshot, Rejected
from skyrl.types import ErrorResponse, OptimStepOutput, SaveOutput
from tests.conformance.operations import (
    OTHER_TOKENS,
    SEVERAL_QUANTA,
    TOKENS,
    a_failed_pass,
    a_load,
    a_pass,
    a_publish,
    a_revival,
    a_save,
    a_snapshot,
    a_step,
    assert_same,
    differ,
    done,
    fresh,
    logprobs,
    run,
    snapshot,
    state,
)

pytestmark = pytest.mark.gpu


def test_a_loaded_checkpoint_continues_with_the_identical_next_step(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model), a_pass(model, OTHER_TOKENS), a_step(model))
    done(backend, a_save(model, tmp_path / "save"))
    done(backend, a_pass(model), a_step(model))
    expected = logprobs(backend, model)
    resumed = fresh("resumed")
    done(backend, a_load(resumed, tmp_path / "save"))
    done(backend, a_pass(resumed), a_step(resumed))
    np.testing.assert_array_equal(logprobs(backend, resumed), expected)


def test_a_load_in_place_goes_back_to_the_saved_weights_and_drops_gradients(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model), a_save(model, tmp_path / "save"))
    saved = logprobs(backend, model)
    done(backend, a_pass(model), a_step(model), a_pass(model))
    done(backend, a_load(model, tmp_path / "save"))
    np.testing.assert_array_equal(logprobs(backend, model), saved)
    (step,) = done(backend, a_step(model))
    assert isinstance(step, OptimStepOutput) and step.metrics["skyrl.ai/grad_norm"] == 0.0


def test_a_load_without_optimizer_state_keeps_the_weights_and_starts_its_moments_anew(backend, model, tmp_path):
    done(backend, a_pass(model, OTHER_TOKENS), a_step(model), a_save(model, tmp_path / "save"))
    saved = logprobs(backend, model)
    anew = fresh("anew")
    done(backend, a_load(anew, tmp_path / "save", load_optimizer=False))
    np.testing.assert_array_equal(logprobs(backend, anew), saved)
    done(backend, a_pass(anew), a_step(anew), a_pass(model), a_step(model))
    assert differ(logprobs(backend, anew), logprobs(backend, model))


def test_loading_a_folder_that_does_not_exist_names_it_and_leaves_the_model_alone(backend, model, tmp_path):
    before = logprobs(backend, model)
    (result,) = run(backend, a_load(model, tmp_path / "nowhere"))
    assert isinstance(result, ErrorResponse) and str(tmp_path / "nowhere") in result.error
    assert_same(logprobs(backend, model), before)


def test_a_load_that_follows_its_save_without_waiting_for_it_finds_it(backend, model, tmp_path):
    done(backend, a_pass(model), a_step(model))
    saved = logprobs(backend, model)
    for i in range(3):
        path = tmp_path / str(i)
        done(backend, a_save(model, path), a_pass(model), a_step(model), a_load(model, path))
        np.testing.assert_array_equal(logprobs(backend, model), saved)


def test_training_goes_on_while_a_checkpoint_of_the_state_before_is_written(backend, model, tmp_path):
    saved = logprobs(backend, model)
    done(backend, a_save(model, tmp_path / "save"), a_pass(model), a_step(model))
    loaded = fresh("loaded")
    done(backend, a_load(loaded, tmp_path / "save"))
    assert_same(logprobs(backend, loaded), saved)


@pytest.mark.full("jax")
@pytest.mark.gate(
    "fake-with pending gradients",
    "fake-without gradients",
    "jax-with pending gradients",
    "torch-with pending gradients",
)
@pytest.mark.parametrize("pending", [False, True], ids=["without gradients", "with pending gradients"])
def test_a_model_revived_from_its_snapshot_elsewhere_goes_on_bit_for_bit(backend, successor, model, tmp_path, pending):
    done(backend, a_pass(model), a_step(model))
    if pending:
        done(backend, a_pass(model, OTHER_TOKENS))
    saved = snapshot(backend, model, tmp_path / "snapshot")
    next_steps = [a_pass(model), a_step(model), a_pass(model, OTHER_TOKENS, TOKENS)]
    done(backend, *next_steps)
    done(successor, a_revival(model, saved), *next_steps)
    assert state(successor, model, tmp_path) == state(backend, model, tmp_path)
    np.testing.assert_array_equal(logprobs(successor, model), logprobs(backend, model))


def test_repeating_what_came_after_a_snapshot_gives_the_same_bits(backend, successor, model, tmp_path):
    rounds = [[a_pass(model, *tokens), a_step(model)] for tokens in 2 * [(TOKENS,), (OTHER_TOKENS, TOKENS)] + [()]]
    for operations in rounds[:2]:
        done(backend, *operations)
    saved = snapshot(backend, model, tmp_path / "snapshot")
    for operations in rounds[2:]:
        done(backend, *operations)
    done(successor, a_revival(model, saved), *(operation for operations in rounds[2:] for operation in operations))
    assert state(successor, model, tmp_path) == state(backend, model, tmp_path)


def test_a_snapshot_leaves_its_model_as_it_is(backend, new_model, tmp_path):
    plain, saved = new_model(), new_model()
    done(backend, a_pass(plain), a_step(plain), a_pass(plain), a_step(plain))
    done(backend, a_pass(saved), a_step(saved), a_snapshot(saved, tmp_path / "snapshot"), a_pass(saved), a_step(saved))
    assert state(backend, saved, tmp_path) == state(backend, plain, tmp_path)


def test_a_snapshot_with_pending_gradients_may_round_their_sum_in_another_way_only(backend, new_model, tmp_path):
    plain, saved = new_model(), new_model()
    done(backend, a_pass(plain), a_pass(plain), a_step(plain))
    done(backend, a_pass(saved), a_snapshot(saved, tmp_path / "snapshot"), a_pass(saved), a_step(saved))
    np.testing.assert_allclose(logprobs(backend, saved), logprobs(backend, plain), rtol=0, atol=1e-6)


def test_a_snapshot_after_a_failed_pass_and_the_news_of_it_fail_the_next_step_elsewhere(
    backend, successor, model, tmp_path
):
    run(backend, a_pass(model), a_failed_pass(model))
    cause = backend.failed_pass(model)
    assert cause == "datum 3: too long"
    saved = snapshot(backend, model, tmp_path / "snapshot")
    for engine in (backend, successor):
        if engine is successor:
            run(engine, a_revival(model, saved), a_failed_pass(model, cause))
        failed, *_ = run(engine, a_step(model), a_pass(model, OTHER_TOKENS), a_step(model))
        assert isinstance(failed, ErrorResponse) and cause in failed.error
        assert engine.failed_pass(model) is None
    assert state(successor, model, tmp_path) == state(backend, model, tmp_path)


def test_a_revival_replaces_what_there_is_of_the_model(backend, model, tmp_path):
    saved = snapshot(backend, model, tmp_path / "snapshot")
    run(backend, a_pass(model), a_step(model), a_failed_pass(model))
    done(backend, a_revival(model, saved))
    assert backend.failed_pass(model) is None
    assert state(backend, model, tmp_path) == saved.digest


@pytest.mark.parametrize("write", [a_save, a_snapshot, lambda model, path: a_publish(model, fresh("version"), path)])
def test_what_is_saved_is_told_with_the_hash_of_its_manifest(backend, model, tmp_path, write):
    (saved,) = done(backend, write(model, tmp_path / "saved"))
    assert isinstance(saved, SaveOutput)
    assert saved.digest == hashlib.sha256((tmp_path / "saved" / "manifest.json").read_bytes()).hexdigest()
    assert saved.size_bytes is not None and saved.size_bytes > 0


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (a_save, lambda model, path, digest: LoadCheckpoint(request_id="r", model_id=model, path=path, digest=digest)),
        (
            a_snapshot,
            lambda model, path, digest: LoadSnapshot(request_id="r", model_id=model, path=path, digest=digest),
        ),
    ],
    ids=["checkpoint", "snapshot"],
)
def test_a_folder_that_is_not_the_one_that_was_written_is_not_loaded(backend, model, tmp_path, write, read):
    (right,) = done(backend, write(model, tmp_path / "right"))
    done(backend, a_pass(model), a_step(model))
    (other,) = done(backend, write(model, tmp_path / "other"))
    assert isinstance(right, SaveOutput) and isinstance(other, SaveOutput)
    before = state(backend, model, tmp_path)
    (result,) = run(backend, read(model, str(tmp_path / "right"), other.digest))
    assert isinstance(result, ErrorResponse) and result.status == "server" and "right" in result.error
    assert state(backend, model, tmp_path) == before
    assert not isinstance(run(backend, read(model, str(tmp_path / "other"), other.digest))[0], ErrorResponse)


def test_every_failure_says_what_it_leaves_of_the_gradients(backend, model, tmp_path):
    outcomes = [
        (a_failed_pass(model), "incomplete"),
        (a_step(model), "dropped"),
        (Rejected(request_id=fresh(), model_id=model, error="bad name"), "kept"),
        (a_pass("nobody"), "kept"),
        (a_failed_pass("nobody"), "kept"),
        (a_step("nobody"), "kept"),
        (a_load(model, tmp_path / "nowhere"), "kept"),
        (Rejected(request_id=fresh(), model_id=model, error="of its failed pass", gradients="dropped"), "dropped"),
    ]
    results = run(backend, *(operation for operation, _ in outcomes))
    effects = [result.gradients for result in results if isinstance(result, ErrorResponse)]
    assert effects == [effect for _, effect in outcomes]


def test_a_repeated_failure_of_a_step_clears_the_sums_and_the_failed_pass(backend, new_model, tmp_path):
    plain, repeated = new_model(), new_model()
    done(backend, a_pass(plain, OTHER_TOKENS), a_step(plain))
    run(
        backend,
        a_pass(repeated),
        a_failed_pass(repeated),
        Rejected(request_id=fresh(), model_id=repeated, error="of its failed pass", gradients="dropped"),
    )
    assert backend.failed_pass(repeated) is None
    done(backend, a_pass(repeated, OTHER_TOKENS), a_step(repeated))
    assert state(backend, repeated, tmp_path) == state(backend, plain, tmp_path)


def test_abandoned_operations_leave_their_model_as_it_was(backend, model, tmp_path):
    done(backend, a_pass(model))
    before = state(backend, model, tmp_path)
    operations = [a_pass(model, *[OTHER_TOKENS] * SEVERAL_QUANTA), a_step(model)]
    for operation in operations:
        backend.submit(operation)
    backend.step()
    assert backend.abandon() == operations
    assert not backend.computed
    assert state(backend, model, tmp_path) == before
