"""The order of rows: epochs without repetition, and the same batches after a resume as without one."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.errors import ConfigError
from skyrl.train.data.epoch_order import PromptOrder


def order(rows: int = 10, batch_size: int = 3, seed: int = 1, fingerprint: str = "data") -> PromptOrder:
    return PromptOrder(rows, batch_size=batch_size, seed=seed, fingerprint=fingerprint)


def test_an_epoch_takes_no_row_twice_and_drops_what_fills_no_batch():
    data = order()
    batches = [data.next_batch(3) for _ in range(data.steps_per_epoch)]
    taken = [row for batch in batches for row in batch]
    assert (len(taken), len(set(taken)), data.epoch) == (9, 9, 1)


def test_every_epoch_has_an_order_of_its_own():
    data = order(rows=8, batch_size=8)
    epochs = [data.next_batch(8) for _ in range(5)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(8))}
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_an_epoch_depends_on_seed_and_number_only():
    late, straight = order(), order()
    for _ in range(3):
        late.next_batch(3)
    restored = order()
    restored.restore({**straight.state(), "taken": 9})
    assert late.next_batch(3) == restored.next_batch(3)


def test_the_seed_decides_the_order():
    assert len({tuple(order(seed=seed).next_batch(3)) for seed in (-1, 0, 1, 2**70)}) == 4


def test_rows_come_first_equally_often():
    # 2000 epochs of 4 rows: 500 each, with a standard deviation of 19.4.
    data = order(rows=4, batch_size=4)
    first = [data.next_batch(4)[0] for _ in range(2000)]
    assert all(abs(first.count(row) - 500) < 80 for row in range(4))


def test_the_order_is_what_it_was_when_a_checkpoint_was_made():
    """Checkpoints hold a count of rows: the order must stay the same from version to version."""
    assert order(rows=6, batch_size=6, seed=42).next_batch(6) == [0, 4, 5, 1, 3, 2]


@given(
    rows=st.integers(1, 30),
    batch_size=st.integers(1, 30),
    seed=st.integers(),
    sizes=st.lists(st.integers(1, 9), max_size=20),
    cut=st.integers(0, 20),
)
def test_a_resumed_order_goes_on_as_an_uninterrupted_one(rows, batch_size, seed, sizes, cut):
    batch_size = min(batch_size, rows)
    straight, before, after = (order(rows, batch_size, seed) for _ in range(3))
    expected = [straight.next_batch(size) for size in sizes]
    taken = [before.next_batch(size) for size in sizes[:cut]]
    after.restore(json.loads(json.dumps(before.state())))
    taken += [after.next_batch(size) for size in sizes[cut:]]
    assert taken == expected
    assert (after.state(), after.epoch) == (straight.state(), straight.epoch)


def test_a_state_is_not_changed_by_what_is_taken_later():
    data = order()
    state = data.state()
    data.next_batch(random.Random(0).randint(1, 5))
    assert state["taken"] == 0


def test_fewer_rows_than_a_step_takes_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.train_batch_size=11 is more than the 10 prompts that there are"):
        order(batch_size=11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 11}, r"prompts of data\.train_data: the checkpoint's is 10 and this run's is 11"),
        ({"fingerprint": "other"}, r"contents of data\.train_data: the checkpoint's is data and this run's is other"),
        ({"batch_size": 4}, r"trainer\.train_batch_size: the checkpoint's is 3 and this run's is 4"),
        ({"seed": 2}, r"trainer\.seed: the checkpoint's is 1 and this run's is 2"),
    ],
)
def test_the_order_of_another_run_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        order(**options).restore(order().state())
