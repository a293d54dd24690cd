"""Names in deploy/ exist: options, extras, routes; and the programs that read its files find no fault."""

import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from skyrl.tinker.config import ENVIRONMENT_PREFIXES, EngineConfig, parse_config
from skyrl.tinker.http.app import create_app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
FILES = [path for path in sorted(DEPLOY.iterdir()) if path.is_file()]
OF_FOLDERS = {"SKYRL_DATA", "SKYRL_CACHE"}
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_variables_and_options_are_those_of_the_server(path):
    text = path.read_text()
    known = {f"{ENVIRONMENT_PREFIXES[0]}{name.upper()}" for name in EngineConfig.model_fields} | OF_FOLDERS
    assert set(re.findall(r"\bSKYRL_[A-Z_]+", text)) <= known
    flags = {flag[2:].replace("-", "_") for flag in re.findall(r"--[a-z-]+(?==/run| %d|\))", text)}
    assert flags <= EngineConfig.model_fields.keys()


def test_extras_of_the_image_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=([a-z,]+)", (DEPLOY / "Containerfile").read_text())
    assert len(named) == 2 and {name for some in named for name in some.split(",")} <= extras.keys()


def test_the_image_has_what_the_package_is_built_of():
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "setup.py", "README.md", *project["license-files"], "skyrl"} == names
    assert all((ROOT / name).exists() for name in names)
    kept = re.findall(r"^!(.+)$", (DEPLOY / "Containerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(kept) == names


def container() -> dict:
    (found,) = [one for one in MANIFEST if one["kind"] == "StatefulSet"]
    return found["spec"]["template"]["spec"]["containers"][0]


def test_probes_ask_routes_of_the_server_at_its_port(tmp_path):
    routes = create_app(EngineConfig(checkpoints_base=tmp_path)).openapi()["paths"].keys()
    probes = [value["httpGet"] for name, value in container().items() if name.endswith("Probe")]
    assert len(probes) == 3 and {probe["path"] for probe in probes} <= routes
    assert container()["ports"] == [{"name": "http", "containerPort": EngineConfig.model_fields["port"].default}]


def test_a_server_takes_keys_with_the_mode_that_the_manifest_gives_them(tmp_path):
    (pod,) = [one["spec"]["template"]["spec"] for one in MANIFEST if one["kind"] == "StatefulSet"]
    mode = next(volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume)
    (tmp_path / "keys").write_text("tml-a\n")
    (tmp_path / "keys").chmod(mode)
    if (tmp_path / "keys").stat().st_uid:  # Kubernetes' are root's
        mode &= ~stat.S_IRGRP
        (tmp_path / "keys").chmod(mode)
    options = [argument.replace("/run/keys", str(tmp_path)) for argument in container()["args"]]
    assert parse_config(options, environ={}).api_keys == ("tml-a",)


def test_systemd_finds_no_fault_in_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "skyrl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "skyrl.service"
    unit.write_text((DEPLOY / "skyrl.service").read_text().replace("/opt/skyrl/bin/skyrl", str(program)))
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
