"""A chat template that fails is named with its line, for RL and for SFT, and its text is not printed."""

import json
import re

import pytest
from jinja2 import TemplateError

from skyrl.errors import ConfigError
from skyrl.train.config import ChatTemplateConfig, SFTConfig
from skyrl.train.data.prompt_dataset import PromptDataset, PromptReader
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.templates import load_template
from skyrl.train.sft import load_datasets
from skyrl.train.sft.conversations import Conversations

LOOP = "{#- A comment that nobody wants to read in a message. -#}\n{% for message in messages %}\n"
BROKEN = {
    "syntax": (LOOP + "{{ message.content }\n{% endfor %}", 3, "TemplateSyntaxError: unexpected '}'"),
    "a block that never ends": (LOOP + "{{ message.content }}\n", 3, "TemplateSyntaxError: Unexpected end of template"),
    "an unknown filter": (
        LOOP + "{{ message.content | shout }}\n{% endfor %}",
        3,
        "TemplateAssertionError: No filter named 'shout'",
    ),
    "a word that is no variable": (
        LOOP + "\n{{ mesage.content }}\n{% endfor %}",
        4,
        "UndefinedError: 'mesage' is undefined",
    ),
    "types that do not add up": (LOOP + "{{ 1 + 'a' }}\n{% endfor %}", 3, "TypeError: unsupported operand"),
    "a refusal of its own": (
        LOOP + "{{ raise_exception('roles alternate') }}\n{% endfor %}",
        3,
        "TemplateError: roles alternate",
    ),
}
SYNTAX = ("syntax", "a block that never ends", "an unknown filter")
ROW = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}


@pytest.fixture
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Writes a template to a file and returns what a configuration makes of it."""
    monkeypatch.chdir(tmp_path)

    def written(text: str):
        (tmp_path / "own.jinja").write_text(text)
        return load_template(ChatTemplateConfig(source="file", name_or_path="own.jinja"))

    return written


def checked(error: pytest.ExceptionInfo[ConfigError], line: int, words: str) -> None:
    said = str(error.value)
    assert f"own.jinja, line {line}: {words}" in said
    assert "nobody wants to read" not in said and "\n" not in said
    assert "chat_template_kwargs={'enable_thinking': False}" in said


@pytest.mark.parametrize("what", BROKEN)
def test_rl_names_file_and_line(tokenizer, template, what):
    text, line, words = BROKEN[what]
    with pytest.raises(ConfigError) as error:
        Chat(tokenizer, template(text), {"enable_thinking": False})
    checked(error, line, words)


@pytest.mark.parametrize("what", BROKEN)
def test_sft_names_file_and_line(tokenizer, template, what):
    text, line, words = BROKEN[what]
    with pytest.raises(ConfigError) as error:
        Conversations(tokenizer, "last_assistant_message", template(text), {"enable_thinking": False}).masked(
            ROW["messages"]
        )
    checked(error, line, words)


@pytest.mark.parametrize("what", SYNTAX)
def test_a_template_that_is_none_is_no_fault_of_a_row(tokenizer, template, what):
    text, line, words = BROKEN[what]
    with pytest.raises(ConfigError) as error:
        Conversations(tokenizer, "last_assistant_message", template(text), {"enable_thinking": False})
    checked(error, line, words)


def test_a_row_that_a_template_does_not_take_is_named_too(tokenizer, template, tmp_path):
    template("{% for message in messages %}\n{{ message.content.text }}\n{{ message.weight * 2 }}{% endfor %}")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    overrides = [
        "train_datasets=[rows.jsonl]",
        "chat_template.source=file",
        "chat_template.name_or_path=own.jinja",
    ]
    with pytest.raises(ConfigError, match=r"rows\.jsonl.*row 0.*own\.jinja, line 3: UndefinedError"):
        load_datasets(SFTConfig.from_cli_overrides(overrides).resolve(), tokenizer)


def test_a_row_of_rl_that_a_template_does_not_take_is_named_too(tokenizer, template, tmp_path):
    text = "{% for message in messages %}\n{% if message.role == 'system' %}\n{{ raise_exception('no system') }}"
    chat = Chat(tokenizer, template(text + "{% endif %}{{ message.content }}<|im_end|>{% endfor %}"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "system", "content": "S"}]}))
    with pytest.raises(ConfigError, match=r"rows\.jsonl, row 0: .*\(own\.jinja, line 3: TemplateError: no system\)"):
        PromptDataset(["rows.jsonl"], PromptReader("gsm8k", lambda prompt: len(chat.render(prompt.messages))), 64)


def test_the_tokenizers_own_template_has_lines_too(tokenizer):
    tokenizer.chat_template = BROKEN["syntax"][0]
    with pytest.raises(ConfigError, match="the tokenizer's template, line 3: TemplateSyntaxError") as error:
        Chat(tokenizer)
    assert "use a tokenizer that has a template" in str(error.value)


def test_a_tokenizer_without_a_template_is_told_in_a_line(tokenizer):
    tokenizer.chat_template = None
    said = r"chat_template_kwargs=\{\}: the tokenizer has no chat template; [^\n]*set [^\n]*chat_template[^\n]*$"
    with pytest.raises(ConfigError, match=said):
        Chat(tokenizer)
    with pytest.raises(ConfigError, match=said):
        Conversations(tokenizer, "last_assistant_message").masked(ROW["messages"])


def test_templates_of_a_tokenizer_of_which_none_is_the_default_are_named_in_a_line(tokenizer):
    tokenizer.chat_template = {"rag": "R", "plain": "P"}
    said = r"several chat templates, none of them named default: plain, rag \([^\n]*chat_template.source=file[^\n]*$"
    with pytest.raises(ConfigError, match=said):
        Chat(tokenizer)
    with pytest.raises(ConfigError, match=said):
        Conversations(tokenizer, "last_assistant_message").masked(ROW["messages"])


def test_a_template_for_tools_alone_renders_chats_with_tools_as_in_transformers(tokenizer):
    tokenizer.chat_template = {"tool_use": tokenizer.chat_template}
    chat, given = Chat(tokenizer), {"tools": [{"type": "function", "function": {"name": "f"}}]}
    theirs = tokenizer.apply_chat_template(ROW["messages"], add_generation_prompt=True, return_dict=False, **given)
    assert chat.render(ROW["messages"], **given) == theirs
    assert tokenizer.decode(chat.end_of_turn) == "<|im_end|>"
    with pytest.raises(TemplateError, match="none of them named default: tool_use"):
        chat.render(ROW["messages"])


def test_a_misspelt_template_has_the_nearest_name():
    with pytest.raises(ConfigError, match=re.escape("did you mean qwen3_with_thinking?; for a file set")):
        load_template(ChatTemplateConfig(name_or_path="qwen3_with_thinkin"))
