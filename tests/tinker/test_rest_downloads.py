"""Links to the files of checkpoints: archives, exported weights, encryption."""

import io
import json
import subprocess
import sys
import tarfile
import time
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.request import urlopen

import httpx
import pyrage
import pytest
from pydantic import TypeAdapter

from skyrl.utils.files.atomic_folders import write_folder
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import save
from tests.tinker.test_rest_checkpoints import expire, get, listed, published, saved, url


def export(server: LiveServer, model: str, seq_id: int, name: str = "x", **options) -> str:
    body = {"model_id": model, "seq_id": seq_id, "path": name, **options}
    return server.ok("/save_weights_external", body)["request_id"]


def exported(server: LiveServer, **options) -> str:
    return server.result(export(server, server.model(), 1, **options))["path"]


def links(server: LiveServer, path: str) -> dict[str, str]:
    return get(server, url(path, "/external_weights_urls"))["urls"]


def folder(server: LiveServer, path: str) -> Path:
    """Return the folder of a checkpoint of request 1."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    return Path(server.config.checkpoints_base) / model.replace(":", "-") / kind / f"{name}@1"


def archive_url(server: LiveServer, path: str) -> str:
    return server.http.get(url(path, "/archive"), headers={"Accept": "application/json"}).json()["url"]


def members(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


# -- archives ---------------------------------------------------------------------------------------------------------


def test_archive_holds_the_files_of_the_checkpoint_and_a_mark_of_its_end(server):
    path = published(server)
    data = httpx.get(archive_url(server, path)).content
    stored = {"state.json": (folder(server, path) / "state.json").read_bytes(), "checkpoint_complete": b""}
    assert members(data) == stored


def test_archive_is_a_redirect_for_older_clients(server):
    accept = [("Accept", "application/json"), ("accept", "application/gzip")]
    response = server.http.get(url(saved(server), "/archive"), headers=accept)
    assert response.status_code == 302
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    assert abs(parsedate_to_datetime(response.headers["Expires"]) - in_an_hour) < timedelta(minutes=1)
    assert members(httpx.get(response.headers["Location"]).content)


def test_archive_of_damaged_files_is_cut_off(server):
    path = saved(server)
    file = folder(server, path) / "state.json"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(archive_url(server, path))


def test_archive_of_missing_files_is_410_without_their_place(server):
    path = saved(server)
    (folder(server, path) / "state.json").unlink()
    response = httpx.get(archive_url(server, path))
    assert response.status_code == 410
    assert path in response.json()["detail"] and str(server.folder) not in response.text


MEGABYTES = 300


@pytest.mark.full
def test_large_archive_is_streamed_in_constant_memory(tmp_path):
    """The server is a process of its own, whose high-water mark the kernel keeps."""
    script = Path(__file__).parent / "archive_server.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(MEGABYTES)], stdout=subprocess.PIPE, text=True
    )
    try:
        ready = json.loads(process.stdout.readline())
        before = peak_kib(process.pid)
        with urlopen(ready["url"]) as response:
            size = sum(len(piece) for piece in iter(lambda: response.read(2**20), b""))
        assert size > MEGABYTES * 2**20
        assert peak_kib(process.pid) - before < 40 * 1024
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def peak_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


# -- exported weights -------------------------------------------------------------------------------------------------


def test_export_answers_path_and_size(server):
    model = server.model()
    result = server.result(export(server, model, 1))
    assert result["path"] == f"tinker://{model}/external_weights/x"
    assert result["size_bytes"] == (folder(server, result["path"]) / "state.json").stat().st_size


def test_expiry_of_links_has_a_time_zone(server):
    answer = get(server, url(exported(server), "/external_weights_urls"))
    expires = TypeAdapter(datetime).validate_python(answer["expires"])
    assert timedelta(minutes=59) < expires - datetime.now(UTC) <= timedelta(hours=1)


def test_export_is_listed_as_external(server):
    entry = listed(server, exported(server, ttl_seconds=3600))
    assert entry["checkpoint_type"] == "external" and entry["checkpoint_id"] == "external_weights/x"
    assert "expires_at" in entry


def test_links_to_other_checkpoints_are_refused(server):
    response = server.http.get(url(saved(server), "/external_weights_urls"))
    assert response.status_code == 400 and "save_weights_external" in response.json()["detail"]


def test_export_is_neither_loaded_nor_sampled(server):
    path, session = exported(server), server.session()
    failure = server.failure(
        server.ok("/load_weights", {"session_id": session, "model_seq_id": 0, "path": path})["request_id"]
    )
    assert failure["category"] == "user" and "save_weights" in failure["error"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    response = server.post("/create_sampling_session", body)
    assert response.status_code == 400 and "save_weights_for_sampler" in response.json()["detail"]


# -- links ------------------------------------------------------------------------------------------------------------


def claims_of(link: str) -> tuple[str, str, str]:
    base, token, name = link.rsplit("/", 2)
    return base, token, name


def test_key_is_no_link(server):
    base, _, name = claims_of(links(server, exported(server))["state.json"])
    token = server.ok("/auth/token", {})["jwt"]
    assert httpx.get(f"{base}/{token}/{name}").status_code == 403


def test_expired_link_is_403(server):
    path = exported(server)
    base, _, name = claims_of(links(server, path)["state.json"])
    signer = server.app.state.server.service.keys.signer
    claims = signer.read("download", claims_of(links(server, path)["state.json"])[1])
    old = signer.sign(
        "download", {key: claims[key] for key in ("path", "version", "name", "member")}, int(time.time()) - 1
    )
    response = httpx.get(f"{base}/{old}/{name}")
    assert response.status_code == 403 and "expired" in response.json()["detail"]


@pytest.mark.parametrize("end", ["deleted", "expired"])
def test_link_ends_with_its_checkpoint(server, end):
    path = exported(server)
    link = links(server, path)["state.json"]
    if end == "deleted":
        server.http.delete(url(path))
    else:
        expire(server, path)
    assert httpx.get(link).status_code == 404


def test_link_does_not_lead_to_what_replaced_its_checkpoint(server):
    model = server.model()
    path = server.result(save(server, model, 1))["path"]
    link = archive_url(server, path)
    server.result(save(server, model, 2, overwrite=True))
    assert httpx.get(link).status_code == 404


@pytest.mark.full
def test_links_survive_a_restart(tmp_path):
    with LiveServer(tmp_path) as server:
        wait_until_ready(server)
        link = links(server, exported(server))["state.json"]
        data = httpx.get(link).content
    with LiveServer(tmp_path) as server:
        assert httpx.get(str(server.http.base_url) + link.split("/api/v1/")[1]).content == data


# -- encryption -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ssh_key(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ssh") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def test_each_recipient_can_decrypt_every_file(server, ssh_key):
    identities = [pyrage.x25519.Identity.generate(), pyrage.ssh.Identity.from_buffer(ssh_key.read_bytes())]
    recipients = [str(identities[0].to_public()), ssh_key.with_suffix(".pub").read_text()]
    model = server.model()
    plain = server.result(export(server, model, 1, "plain"))["path"]
    expected = httpx.get(links(server, plain)["state.json"]).content
    path = server.result(export(server, model, 2, "secret", age_encryption_recipients=recipients))["path"]
    assert set(links(server, path)) == {"state.json.age"}
    encrypted = httpx.get(links(server, path)["state.json.age"]).content
    assert [pyrage.decrypt(encrypted, [identity]) for identity in identities] == [expected, expected]


def test_nothing_plain_is_left_of_an_encrypted_export(server):
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    path = exported(server, age_encryption_recipients=[recipient])
    assert {entry.name for entry in folder(server, path).iterdir()} == {"manifest.json", "state.json.age"}
    assert [entry.name for entry in folder(server, path).parent.iterdir()] == ["x@1"]


SECRET_KEY = str(pyrage.x25519.Identity.generate())


@pytest.mark.parametrize(
    "recipients", [[], ["nonsense"], ["age1nonsense"], ["ssh-rsa nonsense"], [SECRET_KEY], ["age1x"] * 11]
)
def test_bad_recipients_fail_by_name(server, recipients):
    failure = server.failure(export(server, server.model(), 1, age_encryption_recipients=recipients))
    assert failure["category"] == "user" and "age_encryption_recipients" in failure["error"]
    assert SECRET_KEY not in failure["error"]


def test_encryption_of_an_interrupted_export_is_finished_from_its_files(tmp_path):
    from skyrl.tinker.checkpoints.transfer.age_encryption import encrypt_folder, read_recipients

    identity = pyrage.x25519.Identity.generate()
    keys = read_recipients([str(identity.to_public())])
    write_folder(tmp_path / "x", {"a": b"data"})
    written = encrypt_folder(str(tmp_path / "x"), keys)
    encrypted = (tmp_path / "x" / "a.age").read_bytes()
    assert encrypt_folder(str(tmp_path / "x"), keys) == written
    assert (tmp_path / "x" / "a.age").read_bytes() == encrypted
    assert pyrage.decrypt(encrypted, [identity]) == b"data"


def test_server_without_the_package_says_how_to_get_it(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyrage", None)
    failure = server.failure(export(server, server.model(), 1, age_encryption_recipients=["age1x"]))
    assert failure["category"] == "user" and "skyrl[age]" in failure["error"]
