"""Checkpoints over HTTP: names, overwriting, loading in place and as a new model."""

from pathlib import Path
from uuid import uuid4

import pytest

from skyrl.tinker.identity import ids


def save(server, model: str, seq_id: int, name: str = "a", **options) -> str:
    return server.ok("/save_weights", {"model_id": model, "seq_id": seq_id, "path": name, **options})["request_id"]


def publish(server, model: str, seq_id: int, **options) -> str:
    return server.ok("/save_weights_for_sampler", {"model_id": model, "seq_id": seq_id, **options})["request_id"]


def load(server, model: str, seq_id: int, path: str, optimizer: bool = True) -> str:
    body = {"model_id": model, "seq_id": seq_id, "path": path, "optimizer": optimizer}
    return server.ok("/load_weights", body)["request_id"]


def load_as_new(server, path: str, optimizer: bool = True) -> str:
    body = {"session_id": server.session(), "model_seq_id": 0, "path": path, "optimizer": optimizer}
    return server.ok("/load_weights", body)["request_id"]


def saved(server) -> tuple[str, str]:
    """A trained model (next seq_id 4) and the path of its checkpoint."""
    model = server.model()
    seq_id = server.train(model, 1)
    return model, server.result(save(server, model, seq_id))["path"]


def folders_of(server, model: str) -> list[str]:
    """Names of the folders of a model's training checkpoints."""
    return sorted(path.name for path in (server.folder / "checkpoints" / model.replace(":", "-") / "weights").iterdir())


def test_load_as_a_new_model_starts_with_seq_id_1(server):
    model, path = saved(server)
    before = server.logprobs(model, 4)
    new = server.result(load_as_new(server, path))["model_id"]
    assert new != model
    assert server.logprobs(new, 1) == before


def test_loaded_model_knows_its_rank(server):
    model, path = saved(server)
    new = server.result(load_as_new(server, path))["model_id"]
    infos = [server.ok("/get_info", {"model_id": model_id})["lora_rank"] for model_id in (model, new)]
    assert infos == [4, 4]


def test_weights_info_tells_the_configuration(server):
    model = server.model(lora_config={"rank": 2, "train_mlp": False})
    path = server.result(save(server, model, 1))["path"]
    info = server.ok("/weights_info", {"tinker_path": path})
    assert (info["is_lora"], info["lora_rank"], info["train_mlp"], info["train_attn"]) == (True, 2, False, True)


def test_load_of_an_unknown_checkpoint_fails_as_a_future(server):
    model = server.model()
    failure = server.failure(load(server, model, 1, f"tinker://{model}/weights/none"))
    assert failure["category"] == "user" and "none" in failure["error"]


def test_load_of_sampler_weights_says_what_to_load(server):
    model = server.model()
    path = server.result(publish(server, model, 1, path="a"))["path"]
    failure = server.failure(load_as_new(server, path))
    assert failure["category"] == "user" and "save_weights" in failure["error"]


def test_load_from_something_that_is_no_path_says_so(server):
    failure = server.failure(load_as_new(server, "/tmp/model"))
    assert failure["category"] == "user" and "tinker://" in failure["error"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 181, "ä"])
def test_bad_name_is_refused(server, name):
    failure = server.failure(save(server, server.model(), 1, name))
    assert failure["category"] == "user" and "path=" in failure["error"]


def test_used_name_is_refused(server):
    model, path = saved(server)
    failure = server.failure(save(server, model, 4))
    assert failure["category"] == "user" and path in failure["error"]


@pytest.mark.full
def test_save_that_lost_its_name_leaves_no_files(own_server):
    model = own_server.model()
    first, second = save(own_server, model, 1), save(own_server, model, 2)
    own_server.result(first), own_server.failure(second)
    own_server.__exit__()
    assert folders_of(own_server, model) == ["a@1"]
    own_server.__enter__()


def test_same_name_for_weights_and_sampler_weights(server):
    model = server.model()
    server.result(save(server, model, 1, "final"))
    path = server.result(publish(server, model, 2, path="final"))["path"]
    assert path == f"tinker://{model}/sampler_weights/final"


def test_overwrite_replaces_the_checkpoint(server):
    model, path = saved(server)
    seq_id = server.train(model, 4)
    now = server.logprobs(model, seq_id)
    server.result(save(server, model, seq_id + 1, overwrite=True))
    new = server.result(load_as_new(server, path))["model_id"]
    assert server.logprobs(new, 1) == now


def test_overwrite_removes_the_files_that_were_replaced(server):
    model, _ = saved(server)
    server.result(save(server, model, 4, overwrite=True))
    while len(left := folders_of(server, model)) > 1:
        server.logprobs(server.model(), 1)
    assert left == ["a@4"]


def test_overwrite_does_not_change_what_an_older_sampler_samples(server):
    model, path = saved(server)
    sampler = server.sampler(model.split(":")[0], 0, model_path=path)
    before = server.sample(sampler, 0)
    seq_id = server.train(model, 4)
    server.result(save(server, model, seq_id, overwrite=True))
    assert server.sample(sampler, 1) == before


def test_longest_name_is_a_folder_name_whatever_storage_adds(server):
    longest = ids.folder("m", "weights", "x" * ids.MAX_NAME + f"@{2**63 - 1}")
    assert len(Path(longest).name) + len(".") + len(f".{uuid4().hex}.tmp") <= 255
    assert server.result(save(server, server.model(), 1, "x" * ids.MAX_NAME))["path"].endswith("x")


def test_load_into_a_model_of_another_rank_names_the_checkpoint_as_its_user_does(server):
    path = server.result(save(server, server.model(), 1))["path"]
    model = server.model(lora_config={"rank": 8})
    body = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True}
    failure = server.failure(server.ok("/load_weights", body)["request_id"])
    assert failure["category"] == "user"
    assert f"path={path}: the checkpoint has rank=4, the model 8" in failure["error"]
    server.train(model, 2)


def test_first_load_into_a_new_model_brings_the_modules_of_the_checkpoint(server):
    few = {"rank": 4, "train_mlp": False}
    path = server.result(save(server, server.model(lora_config=few), 1))["path"]
    model = server.model()
    server.result(load(server, model, 1, path))
    saved_again = server.result(save(server, model, 2))["path"]
    assert server.ok("/weights_info", {"tinker_path": saved_again})["train_mlp"] is False


def test_later_load_of_other_modules_is_refused(server):
    path = server.result(save(server, server.model(lora_config={"rank": 4, "train_mlp": False}), 1))["path"]
    model = server.model()
    assert "train_mlp=False" in server.failure(load(server, model, server.train(model, 1), path))["error"]
