"""Chat templates of several families, tokenizers for them, and golden texts with the trained parts in brackets."""

from functools import cache

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from skyrl.train.sft import Conversations, RowReader
from skyrl.tx.synthetic.make_tokenizer import DATA, END, make_tokenizer

LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

GLM_TOKENS = ["[gMASK]", "<sop>"]
"""They begin each text."""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

QWEN3 = """\
{%- set seen = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set seen.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- set thought, found, answer = message.content.partition('</think>') %}
        {%- if loop.index0 > seen.user %}
            {{- '<think>\\n' + (thought.split('<think>')[-1].strip('\\n') if found else '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- (answer if found else thought).lstrip('\\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

MARKED = """\
{%- set seen = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set seen.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- '<think>\\n\\n</think>\\n\\n' if loop.index0 > seen.user else '' }}{{ message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

PLAIN = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""

TEMPLATES = {
    "chatml": (DATA / "chat_template.jinja").read_text(encoding="utf-8"),
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "marked": MARKED,
    "plain": PLAIN,
    "glm": "[gMASK]<sop>" + PLAIN,
}


@cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    library = make_tokenizer(1024)
    library.add_special_tokens(LLAMA_TOKENS)
    if family == "glm":
        library.add_special_tokens(GLM_TOKENS)
        ids = [(token, library.token_to_id(token)) for token in GLM_TOKENS]
        library.post_processor = TemplateProcessing(single=" ".join([*GLM_TOKENS, "$A"]), special_tokens=ids)
    eos = "<|eot_id|>" if family == "llama3" else END
    made = PreTrainedTokenizerFast(tokenizer_object=library, eos_token=eos, clean_up_tokenization_spaces=False)
    made.chat_template = TEMPLATES[family]
    return made


def reader(family: str = "chatml", what: str = "last_assistant_message", max_length=None, **variables) -> RowReader:
    return RowReader(Conversations(tokenizer(family), what, variables=variables), what, max_length)


def encode(family: str, text: str) -> list[int]:
    return tokenizer(family).encode(text, add_special_tokens=False)


def golden(family: str, text: str) -> tuple[list[int], list[bool]]:
    """Tokens of a text without its [[double brackets]], encoded as a whole, and which of them stand in the brackets."""
    pieces = text.replace("]]", "[[").split("[[")
    mask = [number % 2 == 1 for number, piece in enumerate(pieces) for _ in encode(family, piece)]
    tokens = encode(family, "".join(pieces))
    assert len(mask) == len(tokens), "a piece ends within a token of the whole"
    return tokens, mask


def rendered(family: str, messages: list[dict], **options) -> list[int]:
    """The tokens that transformers gives."""
    return tokenizer(family).apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}
