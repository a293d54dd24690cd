"""`skyrl keys list`: names and ids of a key file, wrong lines, and no keys."""

import json
from pathlib import Path

import pytest

from skyrl import cli
from skyrl.tinker.identity.ids import tenant_of_key

A, B, OLD = (tenant_of_key(key) for key in (b"tml-a-secret", b"tml-b-secret", b"tml-old"))
TEXT = f"# the team\nalice tml-a-secret\ntml-b-secret\n\ncarol tml-c-secret {OLD}\n"


@pytest.fixture
def file(tmp_path) -> Path:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(TEXT)
    return file


def test_lines_names_and_ids_are_listed_and_no_keys(file, capsys):
    assert cli.main(["keys", "list", str(file)]) == 0
    text = capsys.readouterr().out
    assert [line.split() for line in text.splitlines()] == [
        ["LINE", "NAME", "TENANT", "ID"],
        ["2", "alice", A],
        ["3", "-", B],
        ["5", "carol", OLD],
        ["3", "keys"],
    ]
    assert "secret" not in text


def test_json_has_the_same(file, capsys):
    assert cli.main(["keys", "list", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"line": 2, "name": "alice", "tenant_id": A},
        {"line": 3, "name": None, "tenant_id": B},
        {"line": 5, "name": "carol", "tenant_id": OLD},
    ]


def test_the_file_is_found_where_the_server_finds_it(file, monkeypatch, capsys):
    monkeypatch.setenv("SKYRL_API_KEYS_FILE", str(file))
    assert cli.main(["keys", "list"]) == 0
    assert "alice" in capsys.readouterr().out


def test_each_wrong_line_is_named_and_the_others_are_listed(file, capsys):
    file.write_text(f"{TEXT}secret\nalice tml-d-secret\n")
    assert cli.main(["keys", "list", str(file)]) == 1
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith(f"skyrl keys list: error: file={file}: line 6: the key does not begin with 'tml-'")
    assert second == (
        f"skyrl keys list: error: file={file}: line 7: line 2 has the name alice, too; choose another name"
    )
    assert "3 keys" in said.out and "secret" not in said.out + said.err


@pytest.mark.parametrize(
    ("mode", "text", "told"),
    [(0o644, TEXT, "chmod 600"), (0o600, "# none yet\n", "it contains no keys"), (0o600, None, "cannot be read")],
)
def test_a_file_that_the_server_rejects_is_rejected(file, capsys, mode, text, told):
    file.chmod(mode)
    file.unlink() if text is None else file.write_text(text)
    assert cli.main(["keys", "list", str(file)]) == 1
    message = capsys.readouterr().err
    assert f"file={file}: " in message and told in message


def test_without_a_file_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.delenv("SKYRL_API_KEYS_FILE", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["keys", "list"])
    assert "name one, or set SKYRL_API_KEYS_FILE" in capsys.readouterr().err
