"""A cache whose arrays carry a failed program's error, as a device that fails while it computes leaves them.

Run: `python tests/backends/poisoned_cache.py FOLDER` with a model's folder. Ends with 0 if the request that met it
failed and the next one got what it got before. In a process of its own, because JAX tells the error again at exit.
"""

import sys

import jax
from sampling_rig import Rig, finish, prompt_of, request, run, same

from skyrl.types import ErrorResponse


@jax.jit
def slow(x: jax.Array) -> jax.Array:
    """Keeps the device busy, so that what needs the result is dispatched before it can fail."""
    for _ in range(60):
        x = jax.numpy.tanh(x @ x)
    return x


def fail(x: jax.Array) -> jax.Array:
    raise ValueError("the device failed")


@jax.jit
def poison(leaf: jax.Array, busy: jax.Array) -> jax.Array:
    """Arrays like `leaf` that raise when they are read."""
    return leaf + jax.pure_callback(fail, jax.ShapeDtypeStruct((), leaf.dtype), busy[0, 0])


def main(folder: str) -> None:
    rig = Rig(folder)
    asked = request(prompt_of(20), "v0")
    (expected,) = run(rig.sampler, asked)
    runner = rig.sampler._runner
    busy = slow(jax.numpy.eye(1500))
    runner._pool = jax.tree.map(lambda leaf: poison(leaf, busy), runner._pool)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(runner._pool))
    rig.sampler.add(request(prompt_of(5), "v1", name="met it", max_tokens=2))
    assert isinstance(finish(rig.sampler)["met it"], ErrorResponse)
    (again,) = run(rig.sampler, asked)
    assert same(again.sequences[0], expected.sequences[0])


if __name__ == "__main__":
    main(sys.argv[1])
