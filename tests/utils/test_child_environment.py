"""Variables that a child process gets."""

import pytest

from skyrl.utils.processes import without_secrets

SECRET = ["WANDB_API_KEY", "OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
SECRET += ["MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD", "SKYRL_DATABASE_URL", "CLIENT_SECRET"]
PLAIN = ["PATH", "LD_LIBRARY_PATH", "KEYBOARD", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_TOKEN"]


@pytest.mark.parametrize("name", SECRET)
def test_a_key_of_another_service_stays(name):
    assert without_secrets({name: "secret"}) == {}


@pytest.mark.parametrize("name", PLAIN)
def test_a_variable_that_a_child_may_need_is_passed_on(name):
    assert without_secrets({name: "value"}) == {name: "value"}
