"""Short forms of the contract's operations, and functions that run them on a backend."""

import itertools
from pathlib import Path

import numpy as np

from skyrl.backends.backend import (
    AbstractBackend,
    Completion,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    Operation,
    OptimStep,
    Publish,
    Rejected,
    Sample,
    SaveCheckpoint,
    SaveSnapshot,
)
from skyrl.types import (
    AdamParams,
    Datum,
    ErrorResponse,
    ForwardBackwardOutput,
    Result,
    SampleOutput,
    SamplingParams,
    SaveOutput,
)

ADAM = AdamParams(learning_rate=0.05, weight_decay=0.01)
TOKENS = np.asarray([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
OTHER_TOKENS = np.asarray([2, 7, 1, 8, 2, 8], np.int32)
SEVERAL_QUANTA = 200
"""Number of sequences of a pass that takes more than one turn."""
ROWS = 8
"""Maximum concurrently sampled sequences of a backend in the kit."""
COUNTER = itertools.count()


def fresh(name: str = "request") -> str:
    return f"{name}{next(COUNTER)}"


def a_datum(tokens: np.ndarray) -> Datum:
    weights = np.linspace(0.5, 1.5, len(tokens) - 1, dtype=np.float32)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int32), "weights": weights})


def a_pass(model_id: str, *tokens: np.ndarray, forward_only: bool = False) -> ForwardBackward:
    return ForwardBackward(
        request_id=fresh("pass"),
        model_id=model_id,
        data=[a_datum(own) for own in tokens or (TOKENS,)],
        loss_fn="cross_entropy",
        forward_only=forward_only,
    )


def a_step(model_id: str) -> OptimStep:
    return OptimStep(request_id=fresh("step"), model_id=model_id, adam_params=ADAM)


def a_save(model_id: str, path) -> SaveCheckpoint:
    return SaveCheckpoint(request_id=fresh("save"), model_id=model_id, path=str(path))


def a_snapshot(model_id: str, path) -> SaveSnapshot:
    return SaveSnapshot(request_id=fresh("snapshot"), model_id=model_id, path=str(path))


def a_revival(model_id: str, snapshot: SaveOutput) -> LoadSnapshot:
    assert snapshot.digest is not None
    return LoadSnapshot(request_id=fresh("revival"), model_id=model_id, path=snapshot.path, digest=snapshot.digest)


def a_failed_pass(model_id: str, error: str = "datum 3: too long") -> Rejected:
    return Rejected(request_id=fresh(), model_id=model_id, error=error, gradients="incomplete")


def a_load(model_id: str, path, load_optimizer: bool = True) -> LoadCheckpoint:
    return LoadCheckpoint(request_id=fresh("load"), model_id=model_id, path=str(path), load_optimizer=load_optimizer)


def a_publish(model_id: str, version: str, path, persist: bool = True) -> Publish:
    path = None if path is None else str(path)
    return Publish(request_id=fresh("publish"), model_id=model_id, version=version, path=path, persist=persist)


def a_sample(version: str | None, path=None, *, seed: int = 1, max_tokens: int = 6, **options) -> Sample:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    path = None if path is None else str(path)
    return Sample(request_id=fresh("sample"), version=version, path=path, prompt=TOKENS[:3], params=params, **options)


def step(backend: AbstractBackend) -> list[Completion]:
    """Take the next step. Returns its completions."""
    backend.wait()
    return backend.step()


def run(backend: AbstractBackend, *operations: Operation) -> list[Result]:
    """Submit all operations at once, and step until all are done."""
    for operation in operations:
        backend.submit(operation)
    return ends(backend, *operations)


def ends(backend: AbstractBackend, *operations: Operation) -> list[Result]:
    """Step until submitted operations, and no others, are done."""
    results: dict[str, Result] = {}
    while len(results) < len(operations):
        assert backend.wait(120), "nothing to do, and yet not done"
        results |= {completion.request_id: completion.result for completion in backend.step()}
    return [results[operation.request_id] for operation in operations]


def done(backend: AbstractBackend, *operations: Operation) -> list[Result]:
    """Run operations that must succeed."""
    results = run(backend, *operations)
    errors = [result for result in results if isinstance(result, ErrorResponse)]
    assert not errors, errors
    return results


def failure(backend: AbstractBackend, operation: Operation) -> str:
    """Run an operation that must fail with a user error. Returns its message."""
    (result,) = run(backend, operation)
    assert isinstance(result, ErrorResponse) and result.status == "user", result
    return result.error


def snapshot(backend: AbstractBackend, model_id: str, path) -> SaveOutput:
    (saved,) = done(backend, a_snapshot(model_id, path))
    assert isinstance(saved, SaveOutput)
    return saved


def state(backend: AbstractBackend, model_id: str, folder: Path) -> str | None:
    """Hash of the complete model, equal only if every bit is."""
    return snapshot(backend, model_id, folder / fresh("state")).digest


def logprobs(backend: AbstractBackend, model_id: str) -> np.ndarray:
    """The model's log-probabilities of a fixed text, a fingerprint of its weights."""
    (output,) = done(backend, a_pass(model_id, TOKENS, OTHER_TOKENS, forward_only=True))
    assert isinstance(output, ForwardBackwardOutput)
    return np.concatenate([datum["logprobs"] for datum in output.loss_fn_outputs])


def drawn(results: list[Result]) -> list[list[list[int]]]:
    """Tokens of each sequence of each sample."""
    assert all(isinstance(result, SampleOutput) for result in results), results
    return [[sequence.tokens.tolist() for sequence in output.sequences] for output in results]


def sampled(backend: AbstractBackend, *args, **options) -> list[list[int]]:
    return drawn(done(backend, a_sample(*args, **options)))[0]


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    return float(np.abs(a - b).max()) > 1e-4
