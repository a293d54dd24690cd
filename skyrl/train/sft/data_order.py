"""Order of a run's rows, and the values that identify this order in checkpoints."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skyrl.config.sft import SFTConfig
from skyrl.train.data.epoch_order import SHUFFLE, EpochOrder, check_same_order
from skyrl.train.sft.datasets import Dataset

ANEW = "train anew with resume_from=none and a ckpt_path of its own"


class DataOrder:
    """Order of a run's rows. Its `state`, saved in checkpoints, identifies the order and the data.

    Computing the state hashes all tokens of the data, so create only one `DataOrder` per run.

    Args:
        config: Resolved configuration.
        train: Data sets to train on.

    Raises ConfigError if a data set would have no rows in an epoch because of its weight.
    """

    def __init__(self, config: SFTConfig, train: Sequence[Dataset[Any]]):
        sizes = [len(dataset.examples) for dataset in train]
        self.epochs = EpochOrder(sizes, config.batch_size, config.seed, config.train_dataset_weights)
        self.state: dict[str, Any] = {
            "batch_size": config.batch_size,
            "seed": config.seed,
            "shuffle of train_datasets": SHUFFLE,
            "rows of train_datasets": self.epochs.sizes,
            "rows of train_datasets in an epoch": self.epochs.counts,
            "contents of train_datasets": _fingerprint(train),
        }

    def check_same(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if `state`, from a checkpoint, belongs to another order or to other data."""
        check_same_order(state, self.state, ANEW)


def _fingerprint(datasets: Sequence[Dataset[Any]]) -> str:
    digest = hashlib.sha256()
    for dataset in datasets:
        for one in (one for example in dataset.examples for one in example.sequences):
            digest.update(np.int64(len(one.token_ids)).tobytes())
            digest.update(one.token_ids.tobytes() + one.mask.tobytes())
    return digest.hexdigest()
