"""Supervised fine-tuning and preference optimization: examples (tokens with a loss mask), and the training loop.

`load_datasets` reads and tokenizes rows of files. `EpochOrder` assigns rows to steps. `training_data` weights tokens so
that a batch's loss is the mean over its trained tokens. `SFTTrainer` runs the loop with a `Learner`. `methods` contains
the training methods: likelihood of examples, or preferences. `pairs` reads rows of preference data, and
`preference_losses` contains the losses of pairs.
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
