"""A byte-level BPE tokenizer trained on the small text in `data/`, with Qwen3's special tokens and chat format.

Every byte is a token, so any text is encoded without loss.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = Path(__file__).parent / "data"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CONTROL_TOKENS = [
    PAD,
    START,
    END,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
"""Special tokens, which a decoder skips if requested."""

TEXT_TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
"""Added tokens that are part of the text and are never skipped."""

SMALLEST_VOCABULARY = 256 + len(CONTROL_TOKENS) + len(TEXT_TOKENS)


def make_tokenizer(vocab: int) -> Tokenizer:
    """Train a tokenizer with at most `vocab` tokens: bytes, merges (as many as the text allows), then added tokens.

    Raises ValueError if `vocab` is too small for bytes and added tokens.
    """
    if vocab < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab={vocab} is below {SMALLEST_VOCABULARY} (all bytes and special tokens); use more")
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(CONTROL_TOKENS) - len(TEXT_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((DATA / "text.txt").read_text(encoding="utf-8").split("\n\n"), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    return tokenizer


def tokenizer_config(max_position: int) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, with the chat template."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": (DATA / "chat_template.jinja").read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": max_position,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
