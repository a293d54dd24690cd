from collections import Counter

import pytest
from scripted import LLAMA_TOKENS, TEMPLATES, ScriptedEnv
from transformers import PreTrainedTokenizerFast

from skyrl.tx.synthetic.make_tokenizer import END, make_tokenizer


def make(template: str) -> PreTrainedTokenizerFast:
    library = make_tokenizer(1024)
    library.add_special_tokens(LLAMA_TOKENS)
    eos = "<|eot_id|>" if template == "llama3" else END
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token=eos, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """A tokenizer for each family of templates."""
    return {name: make(name) for name in TEMPLATES}


@pytest.fixture
def chatml(tokenizers) -> PreTrainedTokenizerFast:
    return tokenizers["chatml"]


@pytest.fixture(autouse=True)
def fresh_records():
    """Clear the records, so that they are of the environments of this test only."""
    ScriptedEnv.made, ScriptedEnv.closed = Counter(), Counter()
    ScriptedEnv.actions, ScriptedEnv.columns = [], []
