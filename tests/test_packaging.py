"""The package as users install it: declared dependencies, contents and metadata of the wheel, and the demo from it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from skyrl.config.trackers import TRACKERS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "age": ["tinker/checkpoints/transfer/age_encryption.py"],
    "buckets": ["utils/files/object_store.py"],
    "demo": ["demos/two_adapters.py", "tinker/local_server.py", "utils/captures.py"],
    "search": ["envs/services/retrieval.py"],
    "torch": ["backends/torch/", "backends/common/models/checkpoint_folder.py", "utils/machine.py"],
    "train": ["backends/torch/workers/ray_", "train/data/files.py", "train/tracking/plots.py"],
}
"""Extras, and the files below skyrl/ that may import what they install. All other files have the base install."""
NOT_DECLARED = {"vllm"} | {needs.package for needs in TRACKERS.values() if needs}
"""Packages that users choose and install themselves. They are imported if an option names them."""


def declared(extra: str | None = None) -> set[str]:
    """Return names of the packages that the base install or an extra requires."""
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in listed}


def imported_packages(path: Path) -> Iterator[str]:
    """Top-level names of the modules that a file imports, by a statement or by `import_module` with a constant."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module))],
            ):
                yield module.partition(".")[0]


def test_every_imported_package_is_declared():
    ours = {*sys.stdlib_module_names, "skyrl", *NOT_DECLARED}
    installed = packages_distributions()
    missing = []
    for path in sorted((ROOT / "skyrl").rglob("*.py")):
        name = path.relative_to(ROOT / "skyrl").as_posix()
        extras = [extra for extra, files in EXTRAS.items() if name.startswith(tuple(files))]
        known = declared().union(*map(declared, extras))
        for package in {*imported_packages(path)} - ours:
            if known.isdisjoint(canonicalize_name(one) for one in installed.get(package, [package])):
                missing.append(f"{name} imports {package}")
    assert not missing, "\n".join(missing)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel, built from a copy of the files that the container file copies too."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "skyrl", folder / "skyrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / done.stdout.split()[-1]


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(files.read(name))


def test_the_wheel_has_every_file_of_the_package(wheel):
    paths = [path for path in (ROOT / "skyrl").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    with zipfile.ZipFile(wheel) as files:
        shipped = {name for name in files.namelist() if ".dist-info/" not in name}
    assert shipped == {path.relative_to(ROOT).as_posix() for path in paths}
    assert "skyrl/py.typed" in shipped


def test_links_of_the_long_description_lead_somewhere_without_the_repository(wheel):
    text = metadata(wheel).get_payload()
    assert isinstance(text, str) and text.startswith("# SkyRL\n")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and all(target.startswith("https://") for target in targets)


def test_metadata_names_linux_and_every_extra(wheel):
    fields = metadata(wheel)
    assert "Operating System :: POSIX :: Linux" in fields.get_all("Classifier", [])
    assert {"torch", "train", "fsdp", "skyrl-train"} <= {*fields.get_all("Provides-Extra", [])}
    assert 'skyrl[torch]; extra == "train"' in fields.get_all("Requires-Dist", [])


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_demo_runs_from_the_wheel(wheel, tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path, timeout: float = 60) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    # Dependencies come from this environment. Of a folder named in a .pth file, Python reads no .pth files, and so
    # does not find the editable install there.
    (installed,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import skyrl, skyrl.tinker.http.app as app; print(skyrl.__file__, app.__file__)")
    assert all(Path(path).is_relative_to(installed) for path in where.split())
    said = run(tmp_path / "venv" / "bin" / "skyrl", "demo", timeout=500)
    assert said.count("6 of 6 answers identical") == 2
