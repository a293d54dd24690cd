"""Uniform random number for each token: a function of (seed, sample index, step), equal in all array libraries.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
https://doi.org/10.1145/2063384.2063405), keyed and folded as in `jax.random`. JAX programs compute it themselves
(`skyrl.tx.sampling.uniforms`); other backends use this module.
"""

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)

Words = tuple[np.ndarray, np.ndarray]
"""Two words uint32 `[n]`."""


def seed_words(seed: int) -> tuple[int, int]:
    """Return the high and low 32 bits of an int64 seed in two's complement, for `uniforms`."""
    bits = seed & 0xFFFF_FFFF_FFFF_FFFF
    return bits >> 32, bits & 0xFFFF_FFFF


def uniforms(seeds: np.ndarray, sample_index: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) per row, float32 `[rows]`, a multiple of 2**-24.

    Args:
        seeds: uint32 `[rows, 2]`: the `seed_words` of each row.
        sample_index: int32 `[rows]`.
        step: int32 `[rows]`.
    """
    key = seeds[:, 0].astype(np.uint32), seeds[:, 1].astype(np.uint32)
    for folded in (sample_index, step):
        zero = np.zeros(len(seeds), np.uint32)
        key = threefry(key, (zero, folded.astype(np.int32).view(np.uint32)))
    first, second = threefry(key, (np.zeros(len(seeds), np.uint32), np.zeros(len(seeds), np.uint32)))
    return ((first ^ second) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def threefry(
    key: tuple[np.ndarray, np.ndarray], counter: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Apply the block cipher to a key and a counter."""
    keys = key[0], key[1], key[0] ^ key[1] ^ PARITY
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for number in range(5):
        for rotation in ROTATIONS[number % 2]:
            x = x + y
            y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
            y = y ^ x
        x = x + keys[(number + 1) % 3]
        y = y + keys[(number + 2) % 3] + np.uint32(number + 1)
    return x, y
