"""Ends of turns: what a model's own template says, whatever its files name as the end."""

import json
import re
import shutil
from pathlib import Path

import pytest
import trl
from transformers import AutoTokenizer

from skyrl.utils.chat_template import MARKER, SHORT, text_after_answer
from skyrl.utils.files.hf_files import files_beside
from skyrl.utils.tokenizer import Tokenizer

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
OTHER, END = "<|endoftext|>", "<|im_end|>"


@pytest.fixture(scope="module")
def library(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(params=["generation_config.json", "config.json", "tokenizer_config.json", "all"])
def contradictory(request, tiny_model, tmp_path) -> Path:
    """The model's folder, with another token as the end in one file or in all, the others naming none."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    other = Tokenizer(folder).encode(OTHER)[0]
    for name, key, value in (
        ("generation_config.json", "eos_token_id", other),
        ("config.json", "eos_token_id", [other]),
        ("tokenizer_config.json", "eos_token", OTHER),
    ):
        config = json.loads((folder / name).read_text())
        config[key] = value if request.param in (name, "all") else None
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_follows_an_answer_is_what_transformers_renders(library, tmp_path, path):
    (tmp_path / "chat_template.jinja").write_text(path.read_text())
    config = {"eos_token": END, "bos_token": {"content": OTHER}, "pad_token": None}
    try:
        text = library.apply_chat_template(
            SHORT, chat_template=path.read_text(), tokenize=False, eos_token=END, bos_token=OTHER
        )
        _, found, after = text.partition(MARKER)
    except Exception:  # a template of another tokenizer's variables
        found, after = "", None
    assert text_after_answer(tmp_path, config) == (after if found else None)


def test_a_template_of_its_own_file_comes_before_that_of_the_configuration(tmp_path):
    named = {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": f"{MARKER}<a>"}]}
    assert text_after_answer(tmp_path, named) == "<a>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}<b>")
    assert text_after_answer(tmp_path, named) == "<b>"


@pytest.mark.parametrize(
    "template", ["{{ messages[7].content.x }}", "{% for %}", "{{ raise_exception('no') }}", "text"]
)
def test_a_template_that_cannot_be_rendered_says_nothing_of_ends(tiny_model, tmp_path, template):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(template)
    read = Tokenizer(folder)
    assert (read.end_of_turn, read.disagreement, read.eos_ids) == (None, None, Tokenizer(tiny_model).eos_ids)


def test_a_sequence_ends_where_the_template_ends_a_turn_whatever_the_files_say(contradictory):
    read = Tokenizer(contradictory)
    assert {read.decode([token]) for token in read.eos_ids} == {OTHER, END}


def test_files_that_contradict_the_template_are_told_with_the_way_out(contradictory, tiny_model):
    assert re.search(
        r"ends a turn with '<\|im_end\|>' \(\d+\), but \w+.json names '<\|endoftext\|>' \(\d+\) as the end; .* "
        r"list both as eos_token_id in generation_config.json",
        Tokenizer(contradictory).disagreement or "",
    )
    assert Tokenizer(tiny_model).disagreement is None


def test_an_exported_model_ends_where_the_template_does(contradictory):
    eos = json.loads(files_beside(contradictory)["generation_config.json"])["eos_token_id"]
    assert {Tokenizer(contradictory).decode([token]) for token in eos} == {OTHER, END}


def test_what_agrees_is_exported_as_it_is(tiny_model):
    for name, content in files_beside(tiny_model).items():
        assert content == (tiny_model / name).read_bytes()
