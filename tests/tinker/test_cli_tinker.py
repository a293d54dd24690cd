"""The stock `tinker` command line against a server."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import load_as_new, publish, save
from tests.tinker.test_rest_checkpoints import listed, saved
from tests.tinker.test_rest_downloads import exported, folder

TINKER = Path(sys.executable).with_name("tinker")


class Cli:
    """Runs commands as a user of a server does."""

    def __init__(self, server: LiveServer, home: Path):
        self.server = server
        self.home = home

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        url = str(self.server.http.base_url).removesuffix("/api/v1/")
        env = {key: value for key, value in os.environ.items() if not key.startswith("TINKER_")}
        env |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-test", "HOME": str(self.home), **environment}
        # The command needs no torch, whose import takes longer than everything else.
        (self.home / "torch.py").write_text('raise ModuleNotFoundError("no torch", name="torch")')
        env |= {"PYTHONPATH": str(self.home), "PYTHONUNBUFFERED": "1"}
        return subprocess.run(
            [str(TINKER), *arguments], env=env, cwd=self.home, capture_output=True, text=True, timeout=120
        )

    def ok(self, *arguments: str, **environment: str) -> str:
        """The output of a command that succeeds.

        The SDK leaves daemon threads, which may abort a process that has done all its work: Python before 3.14 ends
        them with `pthread_exit` (https://github.com/python/cpython/issues/87135). On a busy machine 1 of 30 did.
        """
        result = self.run(*arguments, **environment)
        aborted_at_exit = result.returncode == -signal.SIGABRT and not result.stderr
        assert result.returncode == 0 or aborted_at_exit, result.stdout + result.stderr
        return result.stdout

    def json(self, *arguments: str):
        return json.loads(self.ok("-f", "json", *arguments))


@pytest.fixture
def tinker(server, tmp_path) -> Cli:
    return Cli(server, tmp_path)


@pytest.mark.full
def test_version_needs_no_server(tinker):
    assert "0.38" in tinker.ok("version")


@pytest.mark.full
def test_model_list(tinker):
    models = tinker.json("model", "list")["models"]
    assert [model["model_name"] for model in models] == [BASE_MODEL, "alias"]


@pytest.mark.full
def test_run_list(own_server, tmp_path):
    models = [own_server.model() for _ in range(3)]
    tinker = Cli(own_server, tmp_path)
    runs = tinker.json("run", "list", "--limit", "2")["runs"]
    assert [run["training_run_id"] for run in runs] == models[:0:-1]
    assert models[0] in tinker.ok("run", "list", "--limit", "0", "--columns", "id")


@pytest.mark.full
def test_run_info(tinker):
    model = tinker.server.model(user_metadata={"note": "first"})
    tinker.server.result(save(tinker.server, model, 1, "final"))
    shown = tinker.ok("run", "info", model)
    assert BASE_MODEL in shown and "weights/final" in shown and "first" in shown


def test_checkpoint_list(tinker):
    model = tinker.server.model()
    paths = [tinker.server.result(save(tinker.server, model, 1, "a"))["path"]]
    paths.append(tinker.server.result(publish(tinker.server, model, 2, path="b"))["path"])
    of_run = tinker.json("checkpoint", "list", "--run-id", model)["checkpoints"]
    everywhere = tinker.json("checkpoint", "list", "--limit", "2")["checkpoints"]
    assert [entry["tinker_path"] for entry in of_run] == paths[::-1]
    assert [entry["tinker_path"] for entry in everywhere] == paths[::-1]


@pytest.mark.slow
def test_checkpoint_info(tinker):
    path = saved(tinker.server, "a", ttl_seconds=3600)
    shown = tinker.json("checkpoint", "info", path)
    assert (shown["tinker_path"], shown["lora_rank"], shown["public"]) == (path, 4, False)
    assert shown["expires_at"] is not None


@pytest.mark.full
def test_checkpoint_publish_and_unpublish(tinker):
    path = saved(tinker.server)
    tinker.ok("checkpoint", "publish", path)
    assert listed(tinker.server, path)["public"] is True
    tinker.ok("checkpoint", "unpublish", path)
    assert listed(tinker.server, path)["public"] is False


@pytest.mark.full
def test_checkpoint_set_ttl(tinker):
    path = saved(tinker.server)
    tinker.ok("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert "expires_at" in listed(tinker.server, path)
    tinker.ok("checkpoint", "set-ttl", path, "--remove")
    assert "expires_at" not in listed(tinker.server, path)


@pytest.mark.full
def test_checkpoint_delete_by_path(tinker):
    paths = [saved(tinker.server, name) for name in "ab"]
    assert "Deleted 2" in tinker.ok("checkpoint", "delete", "-y", *paths)
    assert [listed(tinker.server, path) for path in paths] == [None, None]


@pytest.mark.slow
def test_checkpoint_delete_by_run_and_type(tinker):
    model = tinker.server.model()
    training = tinker.server.result(save(tinker.server, model, 1))["path"]
    sampler = tinker.server.result(publish(tinker.server, model, 2, path="a"))["path"]
    tinker.ok("checkpoint", "delete", "-y", "--run-id", model, "--type", "weights", "--after", "2020-01-01")
    assert listed(tinker.server, training) is None and listed(tinker.server, sampler)


@pytest.mark.full
def test_checkpoint_download_of_exported_weights(tinker):
    path = exported(tinker.server)
    tinker.ok("checkpoint", "download", path, "-o", "out")
    (target,) = (tinker.home / "out").iterdir()
    stored = (folder(tinker.server, path) / "state.json").read_bytes()
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {"state.json": stored}


@pytest.mark.full
def test_checkpoint_download_of_a_training_checkpoint_leaves_no_export_behind(own_server, tmp_path):
    path = saved(own_server)
    Cli(own_server, tmp_path).ok("checkpoint", "download", path, "-o", "out")
    (target,) = (tmp_path / "out").iterdir()
    weights = json.loads((target / "state.json").read_bytes())["weights"]
    assert weights == json.loads((folder(own_server, path) / "state.json").read_bytes())["weights"]
    assert [entry["tinker_path"] for entry in own_server.http.get("/checkpoints").json()["checkpoints"]] == [path]
    assert own_server.result(load_as_new(own_server, path))


@pytest.mark.slow
def test_auth_status(tinker):
    assert "Tinker accessible: yes" in tinker.ok("auth", "status")


@pytest.mark.full
def test_auth_whoami(tinker):
    assert tinker.json("auth", "whoami") == {
        "user_urn": "skyrl:user:local",
        "org_urn": "tml:organization:local",
        "email": "local@localhost",
    }


@pytest.mark.full
def test_wrong_key_is_told_as_such(tmp_path):
    with LiveServer(tmp_path, api_keys=["tml-a"]) as server:
        wait_until_ready(server)
        tinker = Cli(server, tmp_path)
        result = tinker.run("run", "list")
        assert result.returncode != 0 and "X-API-Key is not one of this server's keys" in result.stderr
        assert "No t" in tinker.ok("run", "list", TINKER_API_KEY="tml-a")


@pytest.mark.full
def test_usage_is_read_by_the_command_line(tinker, server):
    model = server.model()
    server.train(model, 1, [1, 2, 3])
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [(now + timedelta(hours=hours)).isoformat() for hours in (-1, 2)]
    events = tinker.json("billing", "usage", *window)["data"]
    (event,) = [event for event in events if event["session_id"] == model.split(":")[0]]
    assert event["event_info"]["type"] == "training" and event["event_info"]["token_count"] == 3
    tinker.ok("billing", "checkpoint-storage")
