"""A model that cannot be fetched is one line, once, and the hub's cache serves without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from skyrl.backends.base_folder import DOWNLOADED, LEFT_OUT

CODE = """
import sys
from skyrl.backends.base_folder import config_of
from skyrl.errors import RequestError
try:
    print(dict(config_of(sys.argv[1], "model.path")))
except RequestError as error:
    print(error)
"""
NOWHERE = "http://127.0.0.1:9"
"""The port `discard`, at which nothing listens."""


def fetched(home: Path, model: str) -> subprocess.CompletedProcess:
    """A new process that asks a hub which is not there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": NOWHERE}
    return subprocess.run([sys.executable, "-c", CODE, model], env=environment, capture_output=True, text=True)


@pytest.fixture
def cached(tmp_path) -> Path:
    """A cache with a model in it, as the hub's client lays it out."""
    model = tmp_path / "hub" / "models--somebody--small"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc" / "config.json").write_text('{"architectures": ["Small"]}')
    return tmp_path


def test_a_model_that_cannot_be_fetched_is_one_line(tmp_path):
    ran = fetched(tmp_path, "nobody/nothing")
    assert ran.stderr == ""
    [line] = ran.stdout.splitlines()
    assert line.startswith(
        f"model.path=nobody/nothing: no such folder, and the model hub does not give it ({NOWHERE} cannot be reached: "
    )
    assert line.endswith("name a local folder, check the spelling and the network")


def test_a_model_in_the_cache_needs_no_network(cached):
    ran = fetched(cached, "somebody/small")
    assert (ran.stdout, ran.stderr) == ("{'architectures': ['Small']}\n", "")


def test_weights_are_downloaded_once():
    needed = [
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    others = [
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "consolidated.safetensors.index.json",
        "onnx/config.json",
        "onnx/model.safetensors",
        "original/consolidated.00.pth",
        "original/tokenizer/vocab.txt",
        "pytorch_model.bin",
    ]
    found = filter_repo_objects([*needed, *others], allow_patterns=list(DOWNLOADED), ignore_patterns=list(LEFT_OUT))
    assert list(found) == needed
