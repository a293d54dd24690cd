"""Check of token ids against the rows of a model's embedding, which may be fewer than the tokenizer's tokens."""

import numpy as np

from skyrl.errors import ConfigError
from skyrl.train.rollouts.chat import ChatTokenizer


def check_vocabulary(token_ids: np.ndarray, vocab_size: int, model: str, tokenizer: ChatTokenizer | None) -> None:
    """Raise ConfigError for a token id that the model has no row for.

    Args:
        token_ids: The ids of a row of data.
        vocab_size: Number of rows of the embedding.
        model: Setting that gave the model and its value, for the message.
        tokenizer: Tokenizer that names the token in the message. None: the message has no name.
    """
    unknown = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if not unknown.size:
        return
    token_id = int(unknown[0])
    token = tokenizer.convert_ids_to_tokens(token_id) if tokenizer is not None and token_id >= 0 else None
    raise ConfigError(
        f"token id {token_id}{f' ({token!r})' if token else ''} is outside the vocabulary [0, {vocab_size}) of "
        f"{model}; use the tokenizer of this model, or give the model rows for the added tokens (transformers: "
        "resize_token_embeddings)"
    )
