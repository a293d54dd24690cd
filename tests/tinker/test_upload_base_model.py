"""Uploaded adapters whose adapter_config.json names a base model."""

import json

import pytest
from safetensors.numpy import save

from skyrl.cli import main
from tests.tinker.harness import BASE_MODEL
from tests.tinker.test_api_checkpoints import load_as_new
from tests.tinker.test_rest_uploads import CONFIG, TENSORS, config, finish, matrices, sent


@pytest.mark.parametrize("named", ["/models/other", "./other", "other", BASE_MODEL, BASE_MODEL.upper(), None, 7])
def test_adapter_that_names_no_other_base_model_has_no_warning(server, named):
    response = finish(server, sent(server, config(base_model_name_or_path=named)))
    assert response.json().keys() == {"tinker_path"}


def test_adapter_that_names_another_base_model_is_taken_with_a_warning(server):
    answer = finish(server, sent(server, config(base_model_name_or_path="other/model"))).json()
    assert server.result(load_as_new(server, answer["tinker_path"]))["model_id"]
    assert f"base_model_name_or_path='other/model', and {BASE_MODEL!r} is served" in answer["warning"]


def test_command_says_that_an_adapter_names_another_base_model(server, tmp_path, capsys):
    (tmp_path / CONFIG).write_text(json.dumps(config(base_model_name_or_path="other/model")))
    (tmp_path / TENSORS).write_bytes(save(matrices()))
    assert main(["adapter", "import", str(tmp_path), "--url", server.url]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("tinker://") and said.out.count("\n") == 1
    assert said.err.startswith("warning: adapter_config.json: base_model_name_or_path='other/model'")
