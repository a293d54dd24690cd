"""Key files: lines with and without names, and what is said about wrong ones, which never shows a key."""

import hashlib

import pytest
from tinker import TinkerError
from tinker.lib._auth_token_provider import ApiKeyAuthProvider

from skyrl.tinker.config import EngineConfig, parse_config
from skyrl.tinker.identity.key_file import ApiKey, parse_keys


def id_of(key: str) -> str:
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]


def parsed(*lines: str) -> list[ApiKey]:
    keys, problems = parse_keys(enumerate(lines, 1))
    assert problems == []
    return keys


def refusal(capsys, tmp_path, text: str, *argv: str, option: str = "--api-keys-file", **environ: str) -> str:
    """The line that is printed for a bad file of keys."""
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(SystemExit):
        parse_config([option, str(file), *argv], prog="skyrl serve", environ=environ)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told.replace(str(file), "FILE")


def served(tmp_path, text: str, *argv: str) -> EngineConfig:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(text)
    return parse_config(["--api-keys-file", str(file), *argv], environ={})


@pytest.mark.parametrize("name", ["alice", "a.b_c-d", "alice@example.com", "42", "key-zebra", "a" * 64])
def test_a_name_before_a_key_changes_nothing_about_its_tenant(name):
    [bare], [named] = parsed("tml-a"), parsed(f"{name} tml-a")
    assert (bare.key, bare.tenant) == (named.key, named.tenant) == ("tml-a", id_of("tml-a"))
    assert (bare.name, named.name) == ("", name)


def test_a_key_that_replaces_another_takes_over_its_tenant_and_gives_it_a_name():
    [key] = parsed(f"alice  tml-new\t{id_of('tml-old')}")
    assert (key.key, key.tenant, key.name) == ("tml-new", id_of("tml-old"), "alice")


def test_both_keys_of_a_tenant_may_have_its_name():
    assert {key.tenant for key in parsed("alice tml-old", f"alice tml-new {id_of('tml-old')}")} == {id_of("tml-old")}


def test_names_are_shown_by_tenant_and_tenants_without_one_by_their_ids(tmp_path):
    config = served(tmp_path, "# the team\nalice tml-a\n\ntml-b\n")
    assert config.display_names == {id_of("tml-a"): "alice", id_of("tml-b"): id_of("tml-b")}
    assert config.tenants == {"tml-a": id_of("tml-a"), "tml-b": id_of("tml-b")}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("alice secret", "does not begin with 'tml-'"),
        ("secret", "does not begin with 'tml-'"),
        ("Tml-secret", "does not begin with 'tml-'"),
        (f"secret {id_of('tml-old')}", "does not begin with 'tml-'"),
        ("alice key-66d7cc263a93fe16", "does not begin with 'tml-'"),
        ("tml-secret alice", "unexpected space"),
        ("tml-secret tml-secret", "unexpected space"),
        ("alice smith tml-secret", "does not begin with 'tml-'"),
        ("alice tml-secret smith", "unexpected space"),
        ("al/ice tml-secret", "'/' in a name; use letters"),
        ("älice tml-secret", "'ä' in a name; use letters"),
        (f"{'a' * 65} tml-secret", "a name has 65 characters; use at most 64"),
        ("key-66d7cc263a93fe16 tml-secret", "the name key-66d7cc263a93fe16 is reserved"),
        ("key-BAD tml-secret", "the name key-BAD is reserved"),
        ("other tml-secret", "the name other is reserved"),
        ("bob tml-secret", "line 2 has the name bob, too"),
        ("carol tml-b", "is called carol here and bob in line 2; use one name"),
        (f"tml-b {id_of('tml-old')}", "duplicate key, given for two tenants (also in line 2)"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number_without_its_key(capsys, tmp_path, line, told):
    message = refusal(capsys, tmp_path, f"# the team\nbob tml-b\n\n{line}\n")
    assert "api_keys_file=FILE: line 4: " in message and told in message
    assert not any(key in message for key in ("secret", "tml-b"))


def test_more_wrong_lines_are_counted(capsys, tmp_path):
    assert "(2 more lines are wrong: skyrl keys list)" in refusal(capsys, tmp_path, "a\nb\nc\ntml-d\n")


@pytest.mark.parametrize("key", ["tml-", "tml-a", "a", "sk-a", "TML-a", " tml", "key-a"])
def test_keys_that_the_sdk_refuses_are_refused(key):
    try:
        ApiKeyAuthProvider(key)
    except TinkerError:
        taken = False
    else:
        taken = True
    assert (parse_keys([(1, key)])[1] == []) == taken


def test_keys_of_the_environment_are_checked_alike_and_named_by_their_position(capsys):
    with pytest.raises(SystemExit):
        parse_config([], environ={"SKYRL_API_KEYS": "alice tml-a,secret"})
    told = capsys.readouterr().err
    assert "SKYRL_API_KEYS: key 2: the key does not begin with 'tml-'" in told and "secret" not in told


def test_a_name_of_the_file_that_the_environment_has_too_is_refused(capsys, tmp_path):
    told = refusal(capsys, tmp_path, "alice tml-a", SKYRL_API_KEYS="alice tml-b")
    assert "has the name alice, too" in told


def test_operators_have_keys_of_any_form_and_no_names(capsys, tmp_path):
    told = refusal(capsys, tmp_path, "secret\ncarol secret\n", option="--operator-keys-file")
    assert "operator_keys_file=FILE: line 2: unexpected space; write one key per line" in told and "secret" not in told
    assert parse_config([], environ={"SKYRL_OPERATOR_KEYS": "secret"}).operator_keys == ("secret",)


def test_tenants_are_weighed_by_their_display_names(tmp_path):
    config = served(tmp_path, "alice tml-a\nbob tml-b", "--tenant-weights", '{"alice": 3}')
    assert config.weights == {id_of("tml-a"): 3}


def test_a_tenant_that_is_weighed_by_its_name_and_its_id_is_refused(capsys, tmp_path):
    told = refusal(capsys, tmp_path, "alice tml-a", "--tenant-weights", f'{{"alice": 3, "{id_of("tml-a")}": 2}}')
    assert "tenant_weights: duplicate key" in told


def test_a_printed_key_has_no_secret():
    assert "tml-a" not in repr(parsed("alice tml-a"))
