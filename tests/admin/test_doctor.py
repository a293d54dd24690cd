"""`skyrl doctor` names what is wrong, fault by fault, and finds nothing wrong where nothing is."""

import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyrl import cli
from skyrl.tinker.checkpoints.transfer.uploads import Upload
from skyrl.tinker.database.database import Database
from skyrl.tinker.local_server import reserve_port
from tests.buckets import environment
from tests.tinker.harness import empty_database
from tests.tinker.processes import running

ABSENT = "http://127.0.0.1:9"
"""A port that nobody may listen on without being root."""


@dataclass
class Site:
    """An installation's model and state, which are sound until something is done to them."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    stack: ExitStack
    options: dict[str, object] = field(default_factory=dict)
    skipped: tuple[str, ...] = ("devices",)
    """Checks that are left out: `devices` takes seconds to import JAX."""

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def base(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def database(self) -> Path:
        return self.folder / "server.db"

    def sql(self, statement: str) -> None:
        with closing(sqlite3.connect(self.database)) as database, database:
            database.execute(statement)

    def edit(self, name: str, **values: object) -> None:
        """Change a JSON file of the model."""
        path = self.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def command(self) -> list[str]:
        given = {
            "base-model": self.model,
            "backend": "jax",
            "checkpoints-base": self.base,
            "database-url": f"sqlite:///{self.database}",
            "port": self.stack.enter_context(reserve_port()).getsockname()[1],
            **self.options,
        }
        skipped = [f"--skip={name}" for name in self.skipped]
        return ["doctor", "--json", *skipped, *(f"--{name}={value}" for name, value in given.items())]

    def examined(self, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
        """Return the findings. The exit status says whether there is a problem."""
        status = cli.main(self.command())
        found = json.loads(capsys.readouterr().out)
        assert status == any(one["level"] == "problem" for one in found)
        return found


@pytest.fixture
def site(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with ExitStack() as stack:
        site = Site(tmp_path, monkeypatch, stack)
        shutil.copytree(tiny_model, site.model)
        site.base.mkdir(mode=0o700)
        tmp_path.chmod(0o700)
        site.database.touch(mode=0o600)
        site.database.write_bytes(empty_database())
        yield site


def truncate_weights(site: Site) -> None:
    file = site.model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def name_a_shard_that_is_gone(site: Site) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (site.model / "model.safetensors.index.json").write_text(json.dumps(index))
    (site.model / "model.safetensors").unlink()


def lose_layers(site: Site) -> None:
    site.edit("config.json", num_hidden_layers=3)


def take_an_unknown_architecture(site: Site) -> None:
    site.edit("config.json", architectures=["MambaForCausalLM"])


def break_the_tokenizer(site: Site) -> None:
    (site.model / "tokenizer.json").write_text("{}")


def name_a_model_that_is_not_there(site: Site) -> None:
    site.options["base-model"] = site.folder / "mdoel"


def open_the_folder(site: Site) -> None:
    site.base.chmod(0o777)


def open_the_database(site: Site) -> None:
    site.database.chmod(0o644)


def put_a_file_in_the_way(site: Site) -> None:
    site.base.rmdir()
    site.base.write_text("")


def take_the_port(site: Site) -> None:
    listener = site.stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
    site.options["port"] = listener.getsockname()[1]


def fill_the_disk(site: Site) -> None:
    site.options["min-free-disk-mib"] = shutil.disk_usage(site.folder).free // 2**20 + 1000


def exceed_the_limit(site: Site) -> None:
    entry = site.base / ".trash" / f"20261101T000000Z-{2**31}-0123abcd"
    entry.mkdir(parents=True, mode=0o700)
    entry.parent.chmod(0o700)
    site.options["max-disk-gib"] = 1


def exceed_the_limit_with_an_upload(site: Site) -> None:
    folder = site.base / Upload.begin("0" * 64).folder
    for made in (folder.parent.parent, folder.parent, folder):
        made.mkdir(mode=0o700)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        os.chmod(file.fileno(), 0o600)
        file.truncate(2**31)
    site.options["max-disk-gib"] = 1


def keep_an_old_database(site: Site) -> None:
    site.sql("UPDATE alembic_version SET version_num = '0005'")


def migrate_by_a_newer_version(site: Site) -> None:
    site.sql("UPDATE alembic_version SET version_num = '9999'")


def take_another_programs_database(site: Site) -> None:
    site.database.unlink()
    site.sql("CREATE TABLE recipes (name TEXT)")
    site.database.chmod(0o600)


def tear_the_database(site: Site) -> None:
    site.database.write_bytes(b"no database" * 1000)


def mix_two_states(site: Site) -> None:
    model = "11111111-2222-4333-8444-555555555555-train-0"
    (site.base / model / "weights" / "a@3").mkdir(parents=True)
    (site.base / model).chmod(0o700)
    (site.base / ".state-id").touch(mode=0o600)
    (site.base / ".state-id").write_text("0" * 32)
    site.sql("INSERT INTO settings (name, value) VALUES ('state_id', 'another')")


def install_an_old_package(site: Site) -> None:
    old = site.folder / "packages" / "safetensors-0.4.5.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.4.5\n")
    site.monkeypatch.syspath_prepend(old.parent)


def lose_the_device(site: Site) -> None:
    site.skipped = ()
    site.monkeypatch.setenv("JAX_PLATFORMS", "tpu")


def confine_memory(site: Site, limit: int, usage: int) -> None:
    """To a control group."""
    files = site.folder / "memory.max", site.folder / "memory.current"
    for file, number in zip(files, (limit, usage), strict=True):
        file.write_text(f"{number}\n")
    site.monkeypatch.setattr("skyrl.utils.machine.CGROUPS", (tuple(map(str, files)),))


def have_too_little_memory(site: Site) -> None:
    confine_memory(site, 2**29, 2**20)


def set_the_clock_to_before_the_build(site: Site) -> None:
    site.monkeypatch.setattr("skyrl.admin.doctor.machine.BUILT", time.time() + 86_400)


def ask_where_no_server_is(site: Site) -> None:
    site.options["base-url"] = ABSENT


def use_a_bucket(site: Site, endpoint: str) -> None:
    for name, value in environment(endpoint, 0.1).items():
        site.monkeypatch.setenv(name, value)
    site.monkeypatch.setenv("SKYRL_DATA", str(site.folder / "data"))
    site.options["checkpoints-base"] = "s3://bucket/server"


def use_a_bucket_that_hangs(site: Site) -> None:
    site.monkeypatch.setattr("skyrl.admin.doctor.state.BUCKET_S", 0.2)
    listener = site.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    use_a_bucket(site, f"http://127.0.0.1:{listener.getsockname()[1]}")


def use_a_bucket_whose_store_is_down(site: Site) -> None:
    use_a_bucket(site, ABSENT)


FAULTS: list[tuple[Callable[[Site], None], str, str]] = [
    (truncate_weights, "weights", "model.safetensors cannot be read (it has "),
    (
        name_a_shard_that_is_gone,
        "weights",
        "model-00001-of-00002.safetensors, which model.safetensors.index.json names, is",
    ),
    (lose_layers, "weights", "layer 2 is in no file"),
    (take_an_unknown_architecture, "architecture", "architectures=['MambaForCausalLM'] is not implemented"),
    (break_the_tokenizer, "tokenizer", "tokenizer.json: no readable tokenizer"),
    (name_a_model_that_is_not_there, "base-model", "mdoel: there is no such folder"),
    (open_the_folder, "permissions", "checkpoints has mode 0777, so others can change it"),
    (open_the_database, "permissions", "server.db has mode 0644, so others can read it"),
    (put_a_file_in_the_way, "folders", "checkpoints is no folder"),
    (take_the_port, "port", "Address already in use"),
    (fill_the_disk, "disk-space", "saves are refused"),
    (exceed_the_limit, "disk-limit", "2.000 GiB of max_disk_gib=1: saves are refused"),
    (exceed_the_limit_with_an_upload, "disk-limit", "2.000 GiB of max_disk_gib=1: saves are refused"),
    (keep_an_old_database, "database", "revision 0005; this version upgrades from 0011 on"),
    (migrate_by_a_newer_version, "database", "revision 9999, which this version does not know"),
    (take_another_programs_database, "database", "is no database of this server"),
    (tear_the_database, "database", "it cannot be opened"),
    (mix_two_states, "state-belongs-together", "do not belong together: their ids differ"),
    (install_an_old_package, "packages", "safetensors 0.4.5 (>=0.5 is needed)"),
    (lose_the_device, "devices", "JAX finds no device"),
    (have_too_little_memory, "memory", "0.5 of 0.5 GiB are free, and a server needs 1.0 at least"),
    (set_the_clock_to_before_the_build, "clock", "before this version was made"),
    (use_a_bucket_that_hangs, "bucket", "s3://bucket/server has not answered for 0 s"),
    (use_a_bucket_whose_store_is_down, "bucket", "cannot list s3://bucket/server/doctor"),
    (ask_where_no_server_is, "alive", f"nothing answers at {ABSENT}"),
]


def problems(found: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(one["check"], one["seen"]) for one in found if one["level"] == "problem"]


@pytest.mark.parametrize(("plant", "check", "words"), FAULTS, ids=[plant.__name__ for plant, *_ in FAULTS])
def test_a_planted_fault_is_the_one_that_is_named(plant, check, words, site, capsys):
    plant(site)
    found = site.examined(capsys)
    [(named, seen)] = problems(found)
    assert (named, words in seen) == (check, True), seen
    assert next(one["remedy"] for one in found if one["check"] == check)


def test_nothing_is_wrong_with_a_sound_installation(site, capsys):
    before = {path: (path.stat().st_mode, path.stat().st_mtime) for path in site.folder.rglob("*")}
    assert [one for one in site.examined(capsys) if one["level"] != "ok"] == []
    assert {path: (path.stat().st_mode, path.stat().st_mtime) for path in site.folder.rglob("*")} == before


def use_most_of_the_memory(site: Site) -> None:
    confine_memory(site, 2**31, 2**31 - 2**28)


def set_the_clock_back(site: Site) -> None:
    trash = site.base / ".trash"
    trash.mkdir(mode=0o700)
    os.utime(trash, (time.time() + 3600,) * 2)


def have_a_gpu_that_jax_does_not_find(site: Site) -> None:
    site.skipped = ()
    site.monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    site.monkeypatch.setattr("skyrl.utils.machine.DEVICES", ("null",))


@pytest.mark.parametrize(
    ("plant", "check", "words"),
    [
        (use_most_of_the_memory, "memory", "0.2 of 2.0 GiB are free"),
        (set_the_clock_back, "clock", "so the clock went back"),
        (have_a_gpu_that_jax_does_not_find, "devices", "though this machine has a GPU"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_may_become_a_problem_is_warned_of(plant, check, words, site, capsys):
    plant(site)
    [warned] = [one for one in site.examined(capsys) if one["level"] != "ok"]
    assert (warned["level"], warned["check"], words in warned["seen"]) == ("warning", check, True), warned
    assert warned["remedy"]


@pytest.mark.full
def test_low_limits_of_a_process_are_problems(site):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        resource.setrlimit(resource.RLIMIT_NPROC, (500, 500))

    run = subprocess.run(
        [sys.executable, "-m", "skyrl.cli", *site.command()], preexec_fn=limit, capture_output=True, text=True
    )
    assert problems(json.loads(run.stdout)) == [
        ("open-files", "a process may open 64 files, and each waiting client takes one"),
        ("processes", "this user may have 500 processes and threads; a server may need 512"),
    ]
    assert run.returncode == 1


def test_folders_without_a_name_are_warned_of(site, capsys):
    stray = site.base / "11111111-2222-4333-8444-555555555555-train-0" / "weights" / "a@3"
    stray.mkdir(parents=True)
    stray.parent.parent.chmod(0o700)
    (site.base / ".state-id").touch(mode=0o600)
    (site.base / ".state-id").write_text("0" * 32)
    site.sql(f"INSERT INTO settings (name, value) VALUES ('state_id', '{'0' * 32}')")
    os.utime(stray, (0, 0))
    [warned] = [one for one in site.examined(capsys) if one["level"] != "ok"]
    assert warned["check"] == "orphaned-files" and "weights/a@3" in warned["seen"]


def test_an_older_database_is_warned_of_and_stays_as_it_is(site, capsys, monkeypatch):
    monkeypatch.setattr("skyrl.tinker.database.read_only.KNOWN", ["0011", "0012", "0013"])
    [warned] = [one for one in site.examined(capsys) if one["level"] != "ok"]
    assert warned["check"] == "database" and "the next start brings it to 0013" in warned["seen"]
    assert [one for one in site.examined(capsys) if one["level"] != "ok"] == [warned]


def test_a_report_fits_the_terminal_and_says_all(site, capsys):
    deep = site.folder / ("a" * 100) / ("b" * 100)
    site.options["base-model"] = deep
    cli.main([argument for argument in site.command() if argument != "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].startswith("1 problem, 0 warnings, ")
    assert "".join(line.strip() for line in lines).replace(" ", "").count("b" * 100) == 1


@pytest.mark.full
def test_a_running_server_is_found_by_its_state_and_its_stopped_engine_named(site, capsys):
    # Heartbeats come twice a second, and an engine that misses three is not killed for it.
    port = site.stack.enter_context(reserve_port()).getsockname()[1]
    options = {"engine_heartbeat_timeout_sec": 0, "compute_timeout_sec": 3, "port": port}
    site.base.rmdir()
    site.database.unlink()
    with running(site.folder, **options) as server:
        site.options["port"] = options["port"]
        found = {one["check"]: one for one in site.examined(capsys)}
        assert {one["level"] for one in found.values()} == {"ok"}, found
        assert "a server runs on this state (process" in found["port"]["seen"]
        assert found["ready"]["seen"] == "the engine and the database work"
        site.monkeypatch.setattr("skyrl.admin.doctor.server.__version__", "0.0.9")
        [warned] = [one for one in site.examined(capsys) if one["level"] != "ok"]
        site.monkeypatch.undo()
        assert warned["check"] == "versions" and "this command 0.0.9" in warned["seen"]
        engine = server.pids().engine
        os.kill(engine, signal.SIGSTOP)
        try:
            while server.http.get("/healthz").status_code == 200:
                pass
            [(named, seen)] = problems(site.examined(capsys))
        finally:
            os.kill(engine, signal.SIGCONT)
        assert named == "ready" and "the engine gives no sign of life" in seen


def test_a_database_that_a_server_has_open_is_read_and_stays_its_own(site):
    from skyrl.tinker.database.read_only import ReadOnlyDatabase

    url = f"sqlite:///{site.database}"
    with closing(Database(url)), closing(ReadOnlyDatabase(url)) as reader:
        assert reader.known and reader.revision == reader.newest
    with closing(Database(url)):
        pass
