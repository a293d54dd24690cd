"""Random histories of versions: every sample comes from the requested version, with its content at that time."""

import numpy as np
import pytest

from tests.conformance.operations import (
    a_pass,
    a_publish,
    a_sample,
    a_step,
    done,
    drawn,
    fresh,
    sampled,
)

VERSIONS = 8
STEPS = 40


def marks(backend, version: str, path=None) -> list[list[int]]:
    """Two samples of a version, which distinguish it from all others."""
    return sampled(backend, version, path, num_samples=2, max_tokens=10)


@pytest.mark.full("jax")
@pytest.mark.gate("torch-0")
@pytest.mark.parametrize("seed", [0])
def test_samples_come_from_the_versions_that_they_asked_for(backend, successor, model, tmp_path, seed):
    random = np.random.default_rng(seed)
    names, paths, expected = [], {}, {}

    def publish(name: str) -> None:
        """Train further, and publish the weights under that name."""
        paths[name] = tmp_path / fresh("files")
        tokens = random.integers(0, 10, 12).astype(np.int32)
        done(backend, *(it for _ in range(3) for it in (a_pass(model, tokens), a_step(model))))
        done(backend, a_publish(model, name, paths[name]))
        expected[name] = marks(backend, name)

    for _ in range(VERSIONS):
        names.append(fresh("version"))
        publish(names[-1])
    assert len({str(mark) for mark in expected.values()}) == VERSIONS
    waiting: list[tuple[object, list[list[int]]]] = []
    for _ in range(STEPS):
        name = names[random.integers(VERSIONS)]
        match random.choice(["sample", "sample", "sample", "drop", "publish again"]):
            case "sample":
                sample = a_sample(name, paths[name], num_samples=2, max_tokens=10)
                backend.submit(sample)
                waiting.append((sample, expected[name]))
            case "drop":
                backend.drop_version(name)
            case "publish again":
                finish(backend, waiting)
                publish(name)
    finish(backend, waiting)
    for name in names:
        assert marks(successor, name, paths[name]) == expected[name]


def finish(backend, waiting: list) -> None:
    """Step until all samples are complete. Each must equal the expected one of its version at submission."""
    results = {}
    while len(results) < len(waiting):
        assert backend.wait(120), "nothing to do, and yet not done"
        results |= {completion.request_id: completion.result for completion in backend.step()}
    for sample, mark in waiting:
        assert drawn([results[sample.request_id]]) == [mark], sample.version
    waiting.clear()
