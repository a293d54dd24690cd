"""Tokenizers of several kinds, and chat templates of several families, for tests of encoding."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from skyrl.tx.synthetic.make_tokenizer import DATA

BOS, EOS, CALL = "<s>", "</s>", "[TOOL_CALLS]"
MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    CALL,
]
MARKS += ["<start_of_turn>", "<end_of_turn>"]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MISTRAL = """\
{{- bos_token }}{% for message in messages %}
{%- if message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}{% endfor %}"""


def of_trl(name: str) -> str:
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


TEMPLATES = {"ChatML": CHATML, "Mistral": MISTRAL} | {name: of_trl(name) for name in ("llama3", "gemma", "qwen3")}


TEXT = ["the\n\n", "\n\n\n", *(DATA / "text.txt").read_text(encoding="utf-8").split("\n\n")] * 3
WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words of the tokenizers of Qwen and Llama 3, shortened: line breaks in a row are one word."""


@cache
def _pieces() -> dict[str, Any]:
    """Vocabulary and merges of SentencePiece's form of BPE: U+2581 for spaces, bytes for what has no other token."""
    library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # pyright: ignore[reportAttributeAccessIssue]
    first = ["<unk>", BOS, EOS, "<pad>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=first, show_progress=False)  # pyright: ignore[reportCallIssue]
    library.train_from_iterator(TEXT, trainer)
    model = json.loads(library.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def _byte_level(starts: bool) -> Any:
    library = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])  # pyright: ignore[reportAttributeAccessIssue]
    library.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )  # pyright: ignore[reportCallIssue]
    library.train_from_iterator(TEXT, trainer)
    library.add_special_tokens([BOS, EOS])
    if starts:
        pair = f"{BOS} $A {BOS} $B"
        library.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{BOS} $A", pair=pair, special_tokens=[(BOS, library.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token=BOS, eos_token=EOS)


def _llama_2() -> Any:
    """The form of Llama 2's tokenizer.json, whose normalizer writes the marker at the start of every piece."""
    pieces = _pieces()
    library = Tokenizer(models.BPE(pieces["vocab"], pieces["merges"], fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore[reportAttributeAccessIssue]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    library.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token=BOS, eos_token=EOS, unk_token="<unk>")


KINDS = {
    "byte level": lambda: _byte_level(starts=False),
    "byte level with a start": lambda: _byte_level(starts=True),
    "SentencePiece": lambda: LlamaTokenizer(**_pieces(), legacy=False, add_bos_token=True),
    "SentencePiece, legacy": lambda: LlamaTokenizer(**_pieces(), legacy=True, add_bos_token=True),
    "SentencePiece, Llama 2": _llama_2,
    "SentencePiece, Gemma": lambda: GemmaTokenizer(**_pieces(), bos_token=BOS, eos_token=EOS, add_bos_token=True),
}


@cache
def tokenizer(kind: str, family: str = "ChatML") -> Any:
    made = KINDS[kind]()
    made.add_tokens(MARKS, special_tokens=True)
    made.chat_template = TEMPLATES[family]
    return made
