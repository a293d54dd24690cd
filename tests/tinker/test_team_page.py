"""The commands of docs/server-for-my-team.md run as they stand, on another port."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from live import make_tiny_model
from skyrl.cli import main
from skyrl.tinker.local_server import LocalServer

PAGE = (Path(__file__).parents[2] / "docs" / "server-for-my-team.md").read_text()
KEYS, SERVE, _, WATCH = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LocalServer]:
    """The server of the page, on the local machine, with the keys of the page in its folder."""
    folder = tmp_path_factory.mktemp("team")
    subprocess.run(["bash", "-c", KEYS], cwd=folder, check=True)
    options = dict(zip(*[iter(shlex.split(SERVE)[2:])] * 2, strict=True))
    files = {name.removeprefix("--"): str(folder / file) for name, file in options.items() if name.endswith("-file")}
    assert len(files) == 2 and options["--host"] == "0.0.0.0"
    own = {"backend": "skyrl_train", "host": "0.0.0.0", **files}
    with LocalServer(folder, str(make_tiny_model(folder / "model")), own) as running:
        yield running


def test_each_key_of_the_page_is_a_tenant(server):
    lines = [line.split() for line in (server.folder / "keys").read_text().splitlines()]
    seen = [tinker.RestClient(base_url=server.url, api_key=key).whoami().result() for _, key in lines]
    assert [one.email for one in seen] == ["alice@localhost", "bob@localhost"]
    assert len({one.user_urn for one in seen}) == 2


@pytest.mark.parametrize("line", WATCH.splitlines())
def test_commands_to_watch_the_server_find_it(server, line, monkeypatch, capsys):
    monkeypatch.chdir(server.folder)
    monkeypatch.setenv("SKYRL_PORT", str(server.port))
    assert main(shlex.split(line.replace("http://127.0.0.1:8000", server.url))[1:]) == 0
    assert "Traceback" not in "".join(capsys.readouterr())
