"""Features that README says are not there yet are refused, in the words that it quotes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from skyrl.algorithms.traced.graph import specification_of
from skyrl.algorithms.traced.objective import traced_objective
from skyrl.backends.jax import JaxBackendConfig
from skyrl.errors import RequestError
from skyrl.tx.io.weights import abstract_model
from tests.tinker.harness import BASE_MODEL, LiveServer, sample_request, wait_until_ready

README = (Path(__file__).parents[1] / "README.md").read_text()
ROWS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in README.split("| feature | example | error |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
]
WITH = {asked: given.strip("`") for asked, given, _ in ROWS}
ANSWERS = {asked: answer.strip("`") for asked, _, answer in ROWS}


def said(*arguments: str) -> str:
    """Return the output of a command that refuses its arguments."""
    command = [sys.executable, "-c", "import sys; from skyrl.cli import main; sys.exit(main())", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    return done.stderr


def test_an_option_of_the_server_is_refused():
    asked = "an inference server without a shared folder"
    assert ANSWERS[asked] in said("serve", *shlex.split(WITH[asked]))


@pytest.mark.parametrize("asked", ["several processes on JAX"])
def test_an_option_of_the_backend_is_refused(asked):
    option, value = shlex.split(WITH[asked])
    assert option == "--backend-config"
    with pytest.raises(ValidationError) as error:
        JaxBackendConfig.model_validate_json(value)
    assert ANSWERS[asked] in str(error.value)


def test_a_strategy_is_refused():
    assert ANSWERS["Megatron"] in said("train", "rl", WITH["Megatron"])


def test_an_operation_of_a_loss_is_refused():
    asked = "sorting in a traced loss"
    step = {"op": "call_function", "name": "step", "target": WITH[asked], "args": [{"ref": "logprobs"}], "kwargs": {}}
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        step,
        {"op": "output", "name": "output", "target": "output", "args": [{"ref": "step"}], "kwargs": {}},
    ]
    with pytest.raises(RequestError) as error:
        traced_objective(specification_of([("logprobs", 1)], nodes))
    assert ANSWERS[asked] in str(error.value)


def test_a_quantised_base_model_is_refused(tmp_path):
    config = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'awq'") as error:
        abstract_model(tmp_path)
    assert ANSWERS["quantised base models"] in str(error.value)


def test_a_second_base_model_and_an_image_are_refused(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        session = server.session()
        other = {"session_id": session, "model_seq_id": 0, "base_model": "other/model", "lora_config": {"rank": 4}}
        failure = server.failure(server.ok("/create_model", other)["request_id"])
        assert ANSWERS["several base models per server"] in failure["error"]
        sampler = server.sampler(session, 0, base_model=BASE_MODEL)
        image = {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]}
        failure = server.failure(server.ok("/asample", sample_request(sampler, 0, prompt=image))["request_id"])
        assert ANSWERS["images"] in failure["error"]


def test_every_row_has_its_test():
    tested = {
        *["an inference server without a shared folder", "Megatron"],
        "several processes on JAX",
        *["sorting in a traced loss", "quantised base models"],
        *["several base models per server", "images"],
    }
    assert tested == set(WITH)
