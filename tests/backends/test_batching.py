"""Cutting requests into tiles, against the request itself and a few stated properties."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.backends.batching import MAX_SEGMENTS, TileShape, make_tiles, row_length
from skyrl.types import Datum


def datum(length: int, seed: int = 0, width: int | None = None) -> Datum:
    random = np.random.default_rng([seed, length])
    shape = (length,) if width is None else (length, width)
    return Datum(
        random.integers(0, 1000, length).astype(np.int32),
        {"target_tokens": random.integers(0, 1000, shape), "weights": random.random(shape, np.float32)},
    )


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@settings(deadline=None)
@given(lengths)
def test_every_sequence_lies_in_one_tile_unchanged(sizes):
    data = [datum(size, i) for i, size in enumerate(sizes)]
    found = {}
    for tile in make_tiles(data, "cross_entropy", {}, TileShape(512)):
        for place in tile.placements:
            assert place.datum not in found
            cells = place.row, slice(place.start, place.start + place.length)
            found[place.datum] = [
                tile.arrays.tokens[cells],
                tile.arrays.targets[cells][:, 0],
                tile.arrays.weights[cells][:, 0],
            ]
    for i, item in enumerate(data):
        np.testing.assert_array_equal(found[i][0], item.tokens)
        np.testing.assert_array_equal(found[i][1], item.loss_fn_inputs["target_tokens"])
        np.testing.assert_array_equal(found[i][2], item.loss_fn_inputs["weights"])


@settings(deadline=None)
@given(lengths)
def test_cells_outside_sequences_have_no_weight_and_no_segment(sizes):
    data = [datum(size, i) for i, size in enumerate(sizes)]
    for tile in make_tiles(data, "ppo", {}, TileShape(512)):
        used = np.zeros(tile.arrays.tokens.shape, bool)
        for place in tile.placements:
            used[place.row, place.start : place.start + place.length] = True
        assert (tile.arrays.segments[~used] == -1).all()
        assert (tile.arrays.weights[~used] == 0).all()


@settings(deadline=None)
@given(lengths)
def test_sequences_of_a_row_have_numbers_of_their_own_below_the_bound(sizes):
    data = [datum(size, i) for i, size in enumerate(sizes)]
    for tile in make_tiles(data, "ppo", {}, TileShape(512)):
        seen = set()
        for place in tile.placements:
            numbers = np.unique(tile.arrays.segments[place.row, place.start : place.start + place.length])
            assert len(numbers) == 1
            assert (place.row, int(numbers[0])) not in seen
            assert numbers[0] < MAX_SEGMENTS
            seen.add((place.row, int(numbers[0])))


@settings(deadline=None)
@given(lengths)
def test_shapes_come_from_a_small_lattice(sizes):
    for tile in make_tiles([datum(size) for size in sizes], "ppo", {}, TileShape(512)):
        rows, length = tile.arrays.tokens.shape
        assert length in (32, 64, 128, 256, 512)
        assert rows in (1, 512 // length)


def test_an_explicit_row_count_is_kept():
    tiles = make_tiles([datum(20), datum(40)], "cross_entropy", {}, TileShape(512, rows=3))
    assert [tile.arrays.tokens.shape for tile in tiles] == [(3, 64)]


def test_a_sequence_longer_than_a_tile_gets_a_row_of_its_own():
    tiles = make_tiles([datum(700)], "cross_entropy", {}, TileShape(512))
    assert [tile.arrays.tokens.shape for tile in tiles] == [(1, 1024)]


def test_several_targets_per_token_are_padded_to_a_power_of_two():
    (tile,) = make_tiles([datum(5, width=3), datum(4, width=1)], "cross_entropy", {}, TileShape(512))
    assert tile.arrays.targets.shape[-1] == 4
    assert (tile.arrays.weights[:, :, 3] == 0).all()


def test_row_lengths_are_powers_of_two():
    assert [row_length(n) for n in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]
