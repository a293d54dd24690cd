import hashlib
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SIZES
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from skyrl.tx.io.weights import load_model
from skyrl.tx.synthetic.make_model import builtin_model, make_model
from skyrl.tx.synthetic.make_tokenizer import SMALLEST_VOCABULARY, make_tokenizer


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_equal_arguments_give_equal_bytes_in_another_process(tmp_path):
    make_model(tmp_path / "here", **SIZES, seed=5)
    program = "from skyrl.tx.synthetic.make_model import make_model\n"
    program += f"make_model({str(tmp_path / 'there')!r}, **{SIZES}, seed=5)"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert digests(tmp_path / "here") == digests(tmp_path / "there")
    assert set(digests(tmp_path / "here")) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_seed_changes_the_weights_only(tmp_path):
    first, second = (digests(make_model(tmp_path / str(seed), **SIZES, seed=seed)) for seed in (0, -1))
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


def test_making_a_model_loads_neither_torch_nor_transformers_nor_jax():
    program = (
        "import sys, skyrl.tx.synthetic.make_model; print(sorted({'torch', 'transformers', 'jax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_bfloat16_weights_are_stored_as_such(tmp_path):
    assert load_model(make_model(tmp_path, **SIZES, dtype="bfloat16")).config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "heads=3 is not a multiple of kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"layers": 0}, "layers=0 is not a size"),
        ({"vocab": 100}, f"vocab=100 is below {SMALLEST_VOCABULARY}"),
        ({"dtype": "int4"}, "dtype='int4' is not a dtype of weights"),
    ],
)
def test_impossible_sizes_are_refused_and_leave_nothing(sizes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_model(tmp_path / "model", **{**SIZES, **sizes})
    assert not (tmp_path / "model").exists()


def test_an_unknown_architecture_names_the_known_ones(tmp_path):
    with pytest.raises(KeyError, match=r"no architecture named 'gpt'; known: .*qwen3"):
        make_model(tmp_path, "gpt")


@given(st.text())
def test_any_text_is_encoded_exactly(text):
    tokenizer = make_tokenizer(SMALLEST_VOCABULARY)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("vocab", [SMALLEST_VOCABULARY, 320, 1000, 100_000])
def test_no_token_is_outside_the_vocabulary(vocab):
    tokenizer = make_tokenizer(vocab)
    assert len(tokenizer.get_vocab()) <= vocab
    assert max(tokenizer.get_vocab().values()) < vocab


def test_special_tokens_are_single_tokens():
    tokens = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>"]
    assert make_tokenizer(400).encode("".join(tokens)).tokens == tokens


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("made"), **SIZES)


def test_transformers_tokenizes_as_the_file_says(made):
    tokenizer, text = AutoTokenizer.from_pretrained(made), "Hello, wörld! 123 e\u0301 日本"
    assert tokenizer.encode(text) == Tokenizer.from_file(str(made / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_sequence_ends_with_im_end_and_is_padded_with_endoftext(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert GenerationConfig.from_pretrained(made).eos_token_id == tokenizer.eos_token_id
    assert json.loads((made / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


def chat(folder, messages, **options) -> str:
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, **options)


def test_the_chat_template_writes_chatml(made):
    assert chat(made, MESSAGES, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_chat_template_can_switch_thinking_off(made):
    prompt = chat(made, MESSAGES[:2], add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_chat_template_writes_tools_and_their_results(made):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [*MESSAGES[:2], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    text = chat(made, messages, tools=[{"type": "function", "function": {"name": "add", "parameters": {}}}])
    assert text.count("<|im_start|>system") == 1 and '"name": "add", "parameters": {}' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in text


@pytest.mark.full
def test_the_builtin_model_is_made_once_even_by_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.starmap(builtin_model, [()] * 2)
    assert folders == [tmp_path / "models" / "tiny-qwen3"] * 2
    assert [path.name for path in folders[0].parent.iterdir()] == ["tiny-qwen3"]
    written = (folders[0] / "model.safetensors").stat().st_mtime_ns
    assert builtin_model() == folders[0] and (folders[0] / "model.safetensors").stat().st_mtime_ns == written
    assert 5e6 < (folders[0] / "model.safetensors").stat().st_size / 4 < 10e6


def test_a_builtin_model_of_an_older_program_gets_the_template_of_today(tmp_path, monkeypatch):
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path))
    folder = builtin_model()
    today = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    builtin_model()
    assert (folder / "tokenizer_config.json").read_text() == today


def test_a_cache_folder_that_clients_would_misread_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "a:b"))
    with pytest.raises(ValueError, match="name a folder without a colon"):
        builtin_model()
