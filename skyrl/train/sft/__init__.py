"""Supervised fine-tuning: examples (tokens with a loss mask) from rows of files, and the training loop.

`load_datasets` reads and tokenizes the rows. `EpochOrder` assigns rows to steps. `training_data` weights a batch so
that its loss is the mean over trained tokens. `SFTTrainer` runs the loop with a `Learner`. `methods` contains the
training methods: likelihood of examples, or preferences. `pairs` reads the rows of preference data, and
`preference_losses` contains their losses.
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
