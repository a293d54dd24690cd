"""Cutting requests into tiles, against the request itself and a few stated properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.backends.common.packing import MAX_SEGMENTS, WIDE, TileShape, make_tiles
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
            cells = slice(place.start, place.start + place.length)
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
            used[place.start : place.start + place.length] = True
        assert (tile.arrays.segments[~used] == -1).all()
        assert (tile.arrays.weights[~used] == 0).all()


@settings(deadline=None)
@given(lengths)
def test_sequences_of_a_tile_have_numbers_of_their_own_below_the_bound(sizes):
    data = [datum(size, i) for i, size in enumerate(sizes)]
    for tile in make_tiles(data, "ppo", {}, TileShape(512)):
        seen = set()
        for place in tile.placements:
            numbers = np.unique(tile.arrays.segments[place.start : place.start + place.length])
            assert len(numbers) == 1
            assert int(numbers[0]) not in seen
            assert numbers[0] < MAX_SEGMENTS
            seen.add(int(numbers[0]))


@settings(deadline=None)
@given(lengths)
def test_lengths_come_from_a_small_lattice(sizes):
    shape = TileShape(512)
    for tile in make_tiles([datum(size) for size in sizes], "ppo", {}, shape):
        assert tile.length in shape.lengths(512)
        assert tile.length in (32, 128, 256, 384, 512)


@settings(deadline=None)
@given(lengths)
def test_tiles_waste_little_of_a_large_request(sizes):
    """A sequence fits into any tile that is not half full, so all but one are; and most are much fuller."""
    data = [datum(min(size, 256)) for size in sizes]
    fills = [
        sum(place.length for place in tile.placements) / tile.length
        for tile in make_tiles(data, "ppo", {}, TileShape(512))
        if len(tile.placements) < MAX_SEGMENTS
    ]
    assert sum(fill <= 0.5 for fill in fills) <= 1


def test_sequences_of_a_tile_are_bounded_by_the_configuration():
    tiles = make_tiles([datum(20)] * 8, "cross_entropy", {}, TileShape(512, sequences=3))
    assert [len(tile.placements) for tile in tiles] == [3, 3, 2]


def test_a_sequence_longer_than_a_tile_gets_a_longer_one():
    (tile,) = make_tiles([datum(700)], "cross_entropy", {}, TileShape(512))
    assert tile.length == 1024


def test_a_small_request_gets_a_small_tile():
    assert [tile.length for tile in make_tiles([datum(20)], "cross_entropy", {}, TileShape(512))] == [32]


@pytest.mark.parametrize("tokens", [32, 100, 300, 384, 512, 768, 1000, 1024, 1536, 4096])
def test_wide_tiles_have_lengths_that_others_have_too(tokens):
    shape = TileShape(tokens)
    assert set(shape.lengths(5000, wide=True)) <= set(shape.lengths(5000))


def test_equal_sequences_fill_two_thirds_of_their_tiles():
    """But for the last tile, of what a tile with as many sequences as it may have can hold."""
    for length in range(1, 513, 3):
        tiles = list(make_tiles([datum(length)] * 128, "cross_entropy", {}, TileShape(512)))[:-1]
        used = sum(place.length for tile in tiles for place in tile.placements)
        assert used >= min(2 / 3, MAX_SEGMENTS * length / 512) * sum(tile.length for tile in tiles), length


def test_lengths_reach_the_longest_sequence():
    assert TileShape(512).lengths(4000) == [32, 128, 256, 384, 512, 1024, 2048, 4096]


def test_several_targets_per_token_are_padded_to_one_width():
    (tile,) = make_tiles([datum(5, width=3), datum(4, width=1)], "cross_entropy", {}, TileShape(512))
    assert tile.arrays.targets.shape[-1] == WIDE
    assert (tile.arrays.weights[:, 3:] == 0).all()


def test_more_targets_than_a_tile_is_wide_are_in_further_tiles():
    item = datum(5, width=WIDE + 2)
    first, second = make_tiles([item, datum(4, width=2)], "cross_entropy", {}, TileShape(512))
    assert [len(tile.placements) for tile in (first, second)] == [2, 1]
    targets = np.concatenate([tile.arrays.targets[:5] for tile in (first, second)], axis=1)[:, : WIDE + 2]
    np.testing.assert_array_equal(targets, item.loss_fn_inputs["target_tokens"])


def test_tokens_that_can_have_a_gradient_come_first_and_unused_cells_last():
    item = datum(6)
    inputs = item.loss_fn_inputs
    inputs["weights"] = np.array([0, 1, 1, 0, 2, 1], np.float32)
    inputs |= {"logprobs": np.zeros(6, np.float32), "advantages": np.array([1, 0, 3, 1, 1, 0], np.float32)}
    (tile,) = make_tiles([item], "ppo", {}, TileShape(512))
    assert tile.arrays.order[:6].tolist() == [2, 4, 0, 1, 3, 5]
    assert (tile.arrays.trained, tile.arrays.read) == (2, 6)
    assert sorted(tile.arrays.order) == list(range(32))


def test_a_loss_that_does_not_vanish_without_advantage_keeps_all_tokens_with_weight():
    item = datum(4)
    item.loss_fn_inputs.update(logprobs=np.zeros(4, np.float32), advantages=np.zeros(4, np.float32))
    (tile,) = make_tiles([item], "dro", {}, TileShape(512))
    assert tile.arrays.trained == 4
