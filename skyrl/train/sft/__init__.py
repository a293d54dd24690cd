"""Supervised fine-tuning: rows of files, as tokens and a mask of those that are trained on, and the loop over them.

`load_datasets` reads and tokenizes, `EpochOrder` says which rows are in which step, `training_data` weighs a batch so
that its loss is a mean over trained tokens, and `SFTTrainer` drives a `Learner` with all that. `methods` has the
ways to train: by the likelihood of examples, or by preferences, of which `pairs` are the rows and `preference_losses`
the losses.
Nothing here imports jax or torch.
"""

from skyrl.train.sft.batches import scoring_data, training_data
from skyrl.train.sft.conversations import Conversations
from skyrl.train.sft.datasets import Dataset, load_datasets
from skyrl.train.sft.examples import Example, RowReader

__all__ = [
    "Conversations",
    "Dataset",
    "Example",
    "RowReader",
    "load_datasets",
    "scoring_data",
    "training_data",
]
