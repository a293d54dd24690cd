"""Chats as people publish them, for tests of the one reader of both trainers.

The oracle is `transformers.apply_chat_template` with the template of Qwen3 that TRL ships, on messages written by hand.
"""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from skyrl.train.data.files import read_rows
from skyrl.train.data.prompt_dataset import PromptDataset, PromptReader
from skyrl.train.rollouts.chat import Chat
from skyrl.train.sft import Conversations, Example, RowReader
from skyrl.train.sft.datasets import read_dataset
from skyrl.tx.synthetic.make_tokenizer import END, make_tokenizer
from skyrl.utils.template_form import TemplateForm

QWEN3 = (files("trl") / "chat_templates" / "qwen3.jinja").read_text()
NO_CALLS = """\
{%- for message in messages %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT_CALLS = """\
{%- for message in messages %}<|im_start|>{{ message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '[' + call.function.name + ' ' + call.function.arguments + ']' }}{% endfor %}
{{- message.thinking or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def tokenizer(template: str = QWEN3) -> Any:
    made = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(512), eos_token=END, clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


@cache
def reader(template: str = QWEN3, what: str = "last_assistant_message") -> RowReader:
    return RowReader(Conversations(tokenizer(template), what), what)


@cache
def chat(template: str = QWEN3) -> Chat:
    return Chat(tokenizer(template))


def trained(row: dict[str, Any], template: str = QWEN3) -> tuple[str, str]:
    """The text of an SFT row, and the part of it that is trained on."""
    found = reader(template).example(row)
    assert isinstance(found, Example), found
    decode = tokenizer().decode
    return decode(found.token_ids.tolist()), decode(found.token_ids[found.mask].tolist())


def prompts(*sources: str | Path, template: str = QWEN3) -> list[list[int]]:
    """Prompts of RL, as the model gets them."""

    def rendered(prompt: Any) -> list[int]:
        return chat(template).render(prompt.messages, prompt.extras.get("tools") or ())

    reader = PromptReader("default", lambda prompt: len(rendered(prompt)), TemplateForm(chat(template).written).fit)
    data = PromptDataset([str(source) for source in sources], reader, max_prompt_length=10**6)
    return [rendered(prompt) for prompt in data]


def oracle(messages: list[dict[str, Any]], tools: Any = None, answering: bool = False) -> str:
    return tokenizer().apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answering)


def lines(folder: Path, rows: list[Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER, ADD = tool("weather", city="string"), tool("add", a="integer", b="integer")
ASK = {"role": "user", "content": "Weather?"}
PARIS = call("weather", {"city": "Paris"})
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Rain."}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [PARIS]}


def examples(source: str) -> list[tuple[list[int], list[bool]]]:
    found = read_dataset(source, read_rows(source), reader()).examples
    return [(one.token_ids.tolist(), one.mask.tolist()) for one in found]
