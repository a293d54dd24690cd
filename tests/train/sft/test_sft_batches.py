"""The order of rows, and the weights of batches."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.errors import ConfigError
from skyrl.train.data.epoch_order import EpochOrder
from skyrl.train.sft import Example, scoring_data, training_data

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def epoch(order: EpochOrder, number: int = 0) -> list[tuple[int, int]]:
    start = number * order.steps_per_epoch
    return [place for step in range(start, start + order.steps_per_epoch) for place in order.batch(step)]


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 3))
def test_without_weights_every_row_is_in_every_epoch_once(sizes, batch_size, seed, number):
    everything = [(dataset, row) for dataset, size in enumerate(sizes) for row in range(size)]
    assert sorted(epoch(EpochOrder(sizes, batch_size, seed), number)) == everything


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 9), st.integers(0, 9))
def test_all_batches_are_full_but_the_last_of_an_epoch(sizes, batch_size, number):
    order = EpochOrder(sizes, batch_size, 0)
    lengths = [len(order.batch(number * order.steps_per_epoch + step)) for step in range(order.steps_per_epoch)]
    assert lengths[:-1] == [batch_size] * (len(lengths) - 1) and sum(lengths) == sum(sizes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(20, 60), st.floats(0.2, 5)), min_size=1, max_size=4), st.integers(0, 9))
def test_with_weights_each_data_set_has_its_share_of_an_epoch(drawn, number):
    sizes, weights = zip(*drawn, strict=True)
    found = Counter(dataset for dataset, _ in epoch(EpochOrder(sizes, 8, 3, weights), number))
    for dataset, weight in enumerate(weights):
        assert abs(found[dataset] - sum(sizes) * weight / sum(weights)) < 1


def test_rows_of_a_data_set_are_repeated_only_after_all_of_them():
    order = EpochOrder([3, 30], 4, 1, weights=[1, 1])
    rows = [row for number in range(4) for dataset, row in epoch(order, number) if dataset == 0]
    assert len(rows) > 60
    for start in range(0, len(rows) - 2, 3):
        assert sorted(rows[start : start + 3]) == [0, 1, 2]


def test_a_batch_does_not_depend_on_what_was_asked_before():
    one, other = (EpochOrder([5, 7], 4, 9, weights=[2, 1]) for _ in range(2))
    in_order = [one.batch(step) for step in range(12)]
    assert [other.batch(step) for step in reversed(range(12))] == in_order[::-1]


def test_epochs_and_seeds_have_different_orders():
    order = EpochOrder([50], 4, 0)
    assert len({tuple(epoch(order)), tuple(epoch(order, 1)), tuple(epoch(EpochOrder([50], 4, 1)))}) == 3


def test_a_weight_that_gives_a_data_set_no_row_is_refused():
    with pytest.raises(ConfigError, match=r"train_dataset_weights\[1\]=0.01: less than one of the 10 rows"):
        EpochOrder([5, 5], 2, 0, weights=[1.0, 0.01])


EXAMPLES = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=30).map(
        lambda trained: Example(np.arange(len(trained) + 2, dtype=np.int32), np.asarray([False, *trained, True]))
    ),
    min_size=1,
    max_size=12,
)


def weights(data) -> list[np.ndarray]:
    return [datum.loss_fn_inputs["weights"] for datum in data]


@settings(max_examples=60, deadline=None)
@given(EXAMPLES)
def test_weights_of_a_batch_sum_to_1(examples):
    assert sum(float(one.sum(dtype=np.float64)) for one in weights(training_data(examples))) == pytest.approx(
        1, rel=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(EXAMPLES, st.randoms(use_true_random=False), st.integers(1, 5))
def test_the_loss_of_a_batch_is_the_mean_over_trained_tokens_in_any_order_and_however_it_is_cut(examples, random, cut):
    nll = {id(one): np.linspace(0.1, 3, len(one.token_ids)) * (number + 1) for number, one in enumerate(examples)}
    mean = np.concatenate([nll[id(one)][one.mask] for one in examples]).mean()
    shuffled = random.sample(examples, len(examples))
    data = list(zip(shuffled, training_data(shuffled), strict=True))
    loss = 0.0
    for start in range(0, len(data), cut):
        for example, datum in data[start : start + cut]:
            loss += float((nll[id(example)][1:] * datum.loss_fn_inputs["weights"]).sum())
    assert loss == pytest.approx(mean, rel=1e-5)


def test_each_token_predicts_the_next_one():
    (datum,) = scoring_data([Example(np.asarray([4, 5, 6], np.int32), np.asarray([False, False, True]))])
    assert datum.tokens.tolist() == [4, 5]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [5, 6]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 1.0]
