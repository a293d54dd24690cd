"""Checks of rows against the limits of a model: maximum sequence length and vocabulary size."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl.config import SFTConfig
from skyrl.errors import ConfigError
from skyrl.train.data.vocabulary import check_vocabulary
from skyrl.train.rollouts.chat import ChatTokenizer
from skyrl.train.sft.datasets import Dataset
from skyrl.train.strategy.base_model import model_sizes


def check_rows(config: SFTConfig, datasets: Sequence[Dataset[Any]], tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError if a row exceeds the limits in the model's config.json. Runs before the model is loaded."""
    assert config.model.path is not None
    sizes = model_sizes(config.model.path)
    if sizes.context is not None:
        check_lengths(datasets, config, sizes.context)
    if sizes.vocabulary is not None:
        check_token_ids(datasets, config, sizes.vocabulary, tokenizer)


def check_lengths(datasets: Sequence[Dataset[Any]], config: SFTConfig, limit: int) -> None:
    """Raise ConfigError if a sequence has more than `limit` input tokens. All its tokens except the last are inputs."""
    for dataset in datasets:
        longest = max(len(one.token_ids) for example in dataset.examples for one in example.sequences)
        if longest - 1 > limit:
            raise ConfigError(
                f"max_length={config.max_length}: a row of {dataset.name} has {longest} tokens, and the "
                f"backend takes {limit + 1}; set max_length={limit + 1}, or raise "
                f"{config.strategy}.max_context_length as far as the model goes"
            )


def check_token_ids(
    datasets: Sequence[Dataset[Any]], config: SFTConfig, vocab_size: int, tokenizer: ChatTokenizer | None = None
) -> None:
    """Raise ConfigError for a row with a token that is not in the model's vocabulary."""
    for dataset in datasets:
        for number, example in enumerate(dataset.examples):
            token_ids = np.concatenate([one.token_ids for one in example.sequences])
            try:
                check_vocabulary(token_ids, vocab_size, f"model.path={config.model.path}", tokenizer)
            except ConfigError as error:
                raise ConfigError(f"{dataset.name}, row {dataset.row(number)}: {error}") from None
