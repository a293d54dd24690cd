"""Options of the server: where they come from and what is said about bad ones; and the command line around them."""

import hashlib
import json
import os
import pickle
import subprocess
import sys

import pytest
from platformdirs import user_data_path

from skyrl import cli
from skyrl.tinker.config import EngineConfig, parse_config, without_password
from skyrl.tinker.identity.ids import tenant_of_key


def parsed(*argv: str, **environ: str) -> EngineConfig:
    return parse_config(argv, prog="skyrl serve", environ=environ)


def refusal(capsys, *argv: str, **environ: str) -> str:
    """The line that is printed for bad options."""
    with pytest.raises(SystemExit) as exit_:
        parsed(*argv, **environ)
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_state_is_kept_in_the_users_data_folder_by_default():
    config = parsed()
    assert config.checkpoints_base == user_data_path("skyrl") / "checkpoints"
    assert config.database_url == f"sqlite:///{user_data_path('skyrl') / 'tinker.db'}"


@pytest.mark.full
def test_the_environment_names_another_data_folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    run = [sys.executable, "-m", "skyrl.cli", "gc"]
    gc = subprocess.run(
        run, capture_output=True, text=True, timeout=120, env=os.environ | {"SKYRL_DATA": str(tmp_path)}
    )
    assert f"database_url=sqlite:///{tmp_path}/tinker.db: there is no database" in gc.stderr
    assert (tmp_path / "checkpoints" / ".server.lock").exists()


def test_only_this_machine_is_served_by_default():
    assert parsed().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("argv", "environ", "port"),
    [
        ([], {}, 8000),
        ([], {"TX_PORT": "1"}, 1),
        ([], {"TX_PORT": "1", "SKYRL_PORT": "2"}, 2),
        (["--port", "3"], {"TX_PORT": "1", "SKYRL_PORT": "2"}, 3),
    ],
)
def test_the_command_line_wins_over_skyrl_over_tx_over_the_default(argv, environ, port):
    assert parsed(*argv, **environ).port == port


def test_an_empty_environment_variable_counts_as_absent():
    assert parsed(SKYRL_PORT="").port == 8000


def test_backend_config_is_a_json_object():
    assert parsed("--backend-config", '{"max_lora_rank": 64}').backend_config == {"max_lora_rank": 64}


def test_lists_are_separated_by_commas():
    config = parsed(SKYRL_API_KEYS="tml-a, tml-b", SKYRL_MODEL_ALIASES="x")
    assert (config.api_keys, config.model_aliases) == (("tml-a", "tml-b"), ("x",))


def test_tenants_are_weighed_by_their_keys_or_by_the_ids_of_those():
    name = "key-" + hashlib.sha256(b"tml-a").hexdigest()[:16]
    for given in ("tml-a", name):
        weights = f'{{"{given}": 2.5}}'
        assert parsed(SKYRL_API_KEYS="tml-a,tml-b", SKYRL_TENANT_WEIGHTS=weights).weights == {name: 2.5}
    assert parsed("--tenant-weights", f'{{"{name}": 2.5}}', SKYRL_API_KEYS="tml-a,tml-b").weights == {name: 2.5}
    assert parsed(SKYRL_API_KEYS="tml-a,tml-b").weights == {}


@pytest.mark.parametrize("weight", ["0", "-1", "NaN", "Infinity", "1e9", "true", "null", '"2"', "[1]"])
def test_a_weight_that_is_none_is_refused_with_its_key_and_the_range(capsys, weight):
    message = refusal(capsys, SKYRL_API_KEYS="tml-mine", SKYRL_TENANT_WEIGHTS=f'{{"tml-mine": {weight}}}')
    name = "key-" + hashlib.sha256(b"tml-mine").hexdigest()[:16]
    assert "SKYRL_TENANT_WEIGHTS: the key with the id" in message and "from 0.001 to 1000" in message
    assert f"{name} weighs " in message and "mine" not in message


@pytest.mark.parametrize("environ", [{"SKYRL_API_KEYS": "tml-a,tml-b"}, {}])
def test_a_weight_of_a_key_that_is_not_there_is_refused(capsys, environ):
    message = refusal(capsys, "--tenant-weights", '{"key-nobody": 2}', **environ)
    assert "tenant_weights: 'key-nobody' is the name of none of the keys" in message


SECRET = "tml-very-secret"


@pytest.mark.parametrize(
    ("argv", "environ", "way_out"),
    [
        (["--api-keys", SECRET], {}, "--api-keys-file"),
        (["--tenant-weights", f'{{"{SECRET}": 2}}'], {"SKYRL_API_KEYS": SECRET}, "skyrl keys list"),
        (["--database-url", f"postgresql://me:{SECRET}@host/db"], {}, "SKYRL_DATABASE_URL"),
        ([], {"SKYRL_API_KEYS": "tml-a", "SKYRL_TENANT_WEIGHTS": f'{{"{SECRET}": 2}}'}, "correct it"),
        ([], {"SKYRL_API_KEYS": SECRET, "SKYRL_TENANT_WEIGHTS": f'{{"{SECRET}": 0}}'}, "from 0.001"),
        ([], {"SKYRL_API_KEYS": SECRET, "SKYRL_TENANT_WEIGHTS": f'["{SECRET}"]'}, "mapping"),
        (["--external-inference-api-key", SECRET], {}, "without external_inference_url"),
        ([f"--api-key={SECRET}"], {}, "unrecognized arguments: --api-key; did you mean --api-keys?"),
        (["--api-key", SECRET], {}, "unrecognized arguments: --api-key ..."),
        ([f"-k{SECRET}"], {}, "unrecognized arguments: ..."),
    ],
)
def test_no_error_says_a_secret(capsys, argv, environ, way_out):
    message = refusal(capsys, *argv, **environ)
    assert SECRET not in message and way_out in message


def test_keys_are_read_from_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("tml-a\n\ntml-b\n")
    file.chmod(0o600)
    assert parsed("--api-keys-file", str(file), SKYRL_API_KEYS="tml-c,tml-a").api_keys == ("tml-c", "tml-a", "tml-b")


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("tml-a", 0o644, "(mode 0644); keep it to yourself with: chmod 600"),
        ("tml-a", 0o660, "chmod 600"),
        ("tml-a", 0o620, "chmod 600"),
        ("tml-a", 0o602, "chmod 600"),
        ("tml-a", 0o444, "Kubernetes: defaultMode"),
        ("", 0o600, "no key"),
        ("# of Bob\n", 0o600, "no key"),
        ("# of Bob\ntml-a b", 0o600, "line 2: unexpected space"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_file_of_keys_that_is_none_or_that_others_can_read_is_refused(tmp_path, capsys, text, mode, message):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    assert message in refusal(capsys, "--api-keys-file", str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_the_group_may_read_keys_that_are_roots_as_a_container_is_given_them(tmp_path, capsys):
    (tmp_path / "..data").mkdir()
    file = tmp_path / "..data" / "keys"
    file.write_text("tml-a")
    file.chmod(0o440)
    (tmp_path / "keys").symlink_to(file)  # as Kubernetes mounts them
    assert parsed("--api-keys-file", str(tmp_path / "keys")).api_keys == ("tml-a",)
    os.chown(file, 1000, 1000)
    assert "others can read" in refusal(capsys, "--api-keys-file", str(tmp_path / "keys"))


@pytest.mark.parametrize(
    ("argv", "environ", "name"),
    [
        (["--api-keys-file", ""], {}, "--api-keys-file"),
        (["--api-keys-file="], {}, "--api-keys-file"),
        ([], {"SKYRL_API_KEYS_FILE": ""}, "SKYRL_API_KEYS_FILE"),
        ([], {"TX_API_KEYS": ""}, "TX_API_KEYS"),
        ([], {"SKYRL_API_KEYS": " , "}, "SKYRL_API_KEYS"),
    ],
)
def test_a_place_for_keys_without_a_key_does_not_open_the_doors(capsys, argv, environ, name):
    message = refusal(capsys, *argv, **environ)
    assert f" {name}" in message and "it contains no keys" in message


def test_a_variable_without_a_key_is_no_harm_beside_a_file_with_one(tmp_path):
    file = tmp_path / "keys"
    file.write_text("tml-a")
    file.chmod(0o600)
    assert parsed("--api-keys-file", str(file), SKYRL_API_KEYS="").api_keys == ("tml-a",)


def test_the_engine_is_told_no_secrets():
    url = f"postgresql://me:{SECRET}@host/db"
    config = parsed(SKYRL_API_KEYS=f"{SECRET},tml-b", SKYRL_TENANT_WEIGHTS=f'{{"{SECRET}": 2}}', SKYRL_DATABASE_URL=url)
    told = config.without_secrets()
    assert SECRET.encode() not in pickle.dumps(told)
    assert told.weights == config.weights and SECRET not in repr(config).replace(url, "")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "0", "", "10.1", "::ffff:10.0.0.1", "1e9"]
)
def test_an_address_that_others_reach_takes_keys_or_the_word_of_the_operator(capsys, host):
    message = refusal(capsys, f"--host={host}")
    assert f"host={host}" in message and "--api-keys-file" in message and "--insecure" in message
    assert parsed(f"--host={host}", "--insecure").host == host
    assert parsed(f"--host={host}", SKYRL_API_KEYS="tml-a").host == host


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1", "127.1", "[::1]", "::ffff:127.0.0.1"]
)
def test_an_address_of_this_machine_takes_no_keys(host):
    assert parsed(f"--host={host}").host == host


def test_a_key_that_is_weighed_twice_is_refused(capsys):
    weights = json.dumps({"tml-a": 1, "key-" + hashlib.sha256(b"tml-a").hexdigest()[:16]: 2})
    assert "duplicate key" in refusal(capsys, SKYRL_API_KEYS="tml-a", SKYRL_TENANT_WEIGHTS=weights)


def test_minus_one_keeps_silent_sessions_in_memory():
    config = parsed("--session-timeout-sec=-1", "--session-cleanup-interval-sec=-1")
    assert (config.session_timeout_sec, config.session_cleanup_interval_sec) == (-1, -1)


def test_folders_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parsed("--checkpoints-base", "here").checkpoints_base == tmp_path / "here"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nope", "1"], "unrecognized arguments: --nope"),
        (["--bakend", "jax"], "unrecognized arguments: --bakend ...; did you mean --backend?"),
        (["--base", "x"], "unrecognized arguments: --base ..."),
        (["--port", "many"], "--port=many: give a whole number"),
        (["--port", "70000"], "--port=70000: give 65535 or less"),
        (["--log-level", "loud"], "--log-level=loud: give 'debug', 'info', 'warning' or 'error'"),
        (["--backend-config", "{"], "--backend-config={: not JSON"),
        (["--tenant-weights", "[1]"], "--tenant-weights: give a mapping, such as {name: value}"),
        (["--backend-config", "[1]"], "--backend-config=[1]: give a mapping, such as {name: value}"),
        (
            ["--checkpoints-base", "ftp://b"],
            "--checkpoints-base=ftp://b: ftp:// is not served; use s3://, gs://, az://",
        ),
        (["--session-timeout-sec", "-2"], "--session-timeout-sec=-2: give -1 or more"),
        (
            ["--external-inference-url", "http://x"],
            "external_inference_url=http://x without external_inference_lora_base",
        ),
    ],
)
def test_a_bad_option_gives_one_line_that_names_it(capsys, argv, message):
    assert message in refusal(capsys, *argv)


def test_a_bad_environment_variable_is_named_as_it_was_set(capsys):
    assert "TX_PORT=many: give a whole number" in refusal(capsys, TX_PORT="many")


def test_help_explains_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # at some other widths argparse breaks lines at the hyphens of words
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--plan" in text
    for name, field in EngineConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description and " ".join(field.description.split()) in text


@pytest.mark.full
def test_both_ways_to_start_a_server_print_the_same_help():
    def help_of(*command: str) -> str:
        run = subprocess.run([sys.executable, "-m", *command, "--help"], capture_output=True, text=True, check=True)
        return " ".join(run.stdout.split()).partition("Serve the Tinker API.")[2]

    assert help_of("skyrl.cli", "serve") == help_of("skyrl.tinker.api") != ""


def test_the_command_lists_its_subcommands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in ["serve", "make-model", "demo", "version"])


def test_help_loads_no_numerics():
    code = "import sys, skyrl.cli as c\ntry: c.main(['serve', '--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'jax', 'torch', 'numpy', 'fastapi', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_version_is_printed(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.strip().startswith("0.")


def test_make_model_passes_sizes_on_and_says_how_to_serve_the_result(tmp_path, capsys):
    out = tmp_path / "model"
    sizes = "--hidden 32 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --intermediate 64 --vocab 512 --tied"
    assert cli.main(["make-model", "--out", str(out), *sizes.split()]) == 0
    assert f"skyrl serve --base-model {out}" in capsys.readouterr().out
    assert '"hidden_size": 32' in (out / "config.json").read_text()


def test_make_model_refuses_impossible_sizes_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["make-model", "--out", str(tmp_path / "model"), "--heads", "3", "--kv-heads", "2"])
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@h/db",
        "postgresql://u:secret/secret@h/db",
        "postgresql://u:secret:secret@h/db",
        "postgresql://h/db?user=u&password=secret",
        "postgresql://h/db?sslpassword=secret",
    ],
)
def test_a_password_is_shown_nowhere_in_a_url(url):
    assert "secret" not in without_password(url) and "***" in without_password(url)


def test_a_url_without_a_password_is_shown_as_it_is():
    for url in ("sqlite:////var/lib/a@b.db", "postgresql://u@h:5432/db?sslmode=require"):
        assert without_password(url) == url


NAME = tenant_of_key(b"tml-old")


def test_a_key_may_replace_another_whose_name_and_share_it_takes_over():
    config = parsed(SKYRL_API_KEYS=f"tml-old, tml-new {NAME}", SKYRL_TENANT_WEIGHTS=f'{{"{NAME}": 2}}')
    assert set(config.tenants.values()) == {NAME} and config.weights == {NAME: 2}


def test_a_key_may_be_there_twice_for_one_tenant():
    assert len(parsed(SKYRL_API_KEYS="tml-new,tml-new").tenants) == 1


def test_keys_of_the_environment_may_have_spaces_in_them():
    assert list(parsed(SKYRL_API_KEYS="tml-new key-old").tenants) == ["tml-new key-old"]
