"""The layer diagram, executable: an import points down, never sideways or up.

A package inside another one (`config.machinery`, `tx.models.configs`) takes the level of its longest listed prefix.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent / "skyrl"
LAYERS = [
    {"errors"},
    {"utils"},
    {"types"},
    {"config"},
    {"tx", "algorithms", "envs"},
    {"backends"},
    {"tinker", "train"},
    {"admin", "demos", "endpoint"},
    {"cli", "tx_command"},
]
COMMON = [
    ".".join(["skyrl", *path.relative_to(ROOT).with_suffix("").parts])
    for path in sorted((ROOT / "backends" / "common").rglob("[a-z]*.py"))
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(module: str) -> str | None:
    """The listed package that holds `module` (`skyrl.tx.lora` -> `tx`); None for modules that are not ours."""
    if module != "skyrl" and not module.startswith("skyrl."):
        return None
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in LEVEL:
            return ".".join(parts[:length])
    raise AssertionError(f"{module} is in no layer of tests/test_layers.py; add its package to LAYERS")


def is_module(name: str) -> bool:
    path = ROOT.parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it. A name imported from a package may itself be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside.startswith("skyrl.") and is_module(inside) else node.module


def imports(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(file, its package, the package it imports) for every import of one of our packages by another."""
    for path in sorted(root.rglob("*.py")):
        module = ".".join(["skyrl", *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        if module in ("skyrl", "skyrl.tinker", "skyrl.train"):
            continue  # a docstring alone
        importer = package_of(module)
        for imported in imported_modules(path):
            if path.name == "__init__.py" and imported.startswith(f"{module}."):
                continue  # the door of a package names what is behind it
            package = package_of(imported) if imported != "skyrl" else None
            if importer is not None and package is not None:
                yield path, importer, package


def test_imports_point_down():
    upward = [f"{path}: {a} may not import {b}" for path, a, b in imports(ROOT) if a != b and LEVEL[b] >= LEVEL[a]]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize(("folder", "name"), [("jax", "JaxBackend"), ("torch", "TorchBackend")])
def test_only_the_registry_names_a_backend(folder, name):
    outside = [path for path in sorted(ROOT.rglob("*.py")) if f"skyrl/backends/{folder}/" not in path.as_posix()]
    importing = {
        path for path in outside if any(m.startswith(f"skyrl.backends.{folder}") for m in imported_modules(path))
    }
    named = {path for path in outside if name in path.read_text()}
    documented = {ROOT / "backends" / "skyrl_train_backend.py"}
    assert importing == (documented if folder == "torch" else set())
    assert named == (documented if folder == "torch" else {ROOT / "backends" / "registry.py"})


def test_only_the_registry_of_strategies_names_what_serves_one():
    """Options of a backend are a section of its name in configurations, which are documented so."""
    naming = set()
    for path in sorted((ROOT / "train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom | ast.Import) else []
            names += [str(node.value)] if isinstance(node, ast.Constant) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            if any(name == "jax" or name.startswith("Jax") for name in names):
                naming.add(path.relative_to(ROOT / "train").as_posix())
    assert naming == {"strategy/jax_backend.py", "strategy/registry.py"}


def test_only_the_torch_backend_and_the_search_for_gpus_import_torch():
    outside = [path for path in ROOT.rglob("*.py") if "skyrl/backends/torch/" not in path.as_posix()]
    importing = [path for path in outside if any(name.split(".")[0] == "torch" for name in imported_modules(path))]
    assert importing == [ROOT / "utils" / "machine.py"]


def test_nothing_of_the_torch_backend_decides_admission_pages_or_stops():
    """Host policy of sampling is that of any backend."""
    policy = {"Pages", "FairQueue", "StopStrings", "StopRule", "WaitingQueue"}
    torch = ROOT / "backends" / "torch"
    sampling = [torch / "runner.py", *sorted((torch / "sampling").glob("*.py"))]
    assert sum(len(path.read_text().splitlines()) for path in sampling) < 570
    for path in sampling:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not names & policy, path


def test_only_the_jax_backend_and_its_models_import_jax():
    packages = {"backends/jax", "tx"}
    outside = [path for path in ROOT.rglob("*.py") if not any(f"skyrl/{name}/" in path.as_posix() for name in packages)]
    importing = [path for path in outside if any(name.split(".")[0] == "jax" for name in imported_modules(path))]
    assert importing == [ROOT / "algorithms" / "losses.py"]  # a gradient of its own, where an array is jax's


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("skyrl.tinker.api", {"jax", "torch", "transformers"}),
        ("skyrl.tinker.serve", {"jax", "torch", "transformers", "alembic"}),
        ("skyrl.cli", {"jax", "torch", "transformers", "tinker"}),
        ("skyrl.types", {"jax", "torch"}),
        ("skyrl.config", {"jax", "torch", "numpy", "transformers", "omegaconf"}),
        ("skyrl.train.checkpoints", {"jax", "torch", "transformers"}),
        ("skyrl.train.data.prompt_dataset", {"jax", "torch", "transformers", "datasets", "pyarrow"}),
        ("skyrl.train.tracking.dumps", {"jax", "torch", "transformers"}),
        ("skyrl.train.strategy.jax_backend", {"jax", "torch", "transformers"}),
        ("skyrl.train.tracking.plots", {"jax", "torch", "transformers", "matplotlib"}),
        ("skyrl.train.lr_schedules", {"jax", "torch", "transformers"}),
        ("skyrl.train.tracking.clients", {"jax", "torch", "transformers", "wandb", "mlflow", "swanlab", "tensorboard"}),
        ("skyrl.train.sft", {"jax", "torch", "transformers"}),
        ("skyrl.train.strategy.validate", {"jax", "torch", "transformers"}),
        ("skyrl.algorithms.advantages", {"jax", "torch"}),
        ("skyrl.algorithms.corrections", {"jax", "torch"}),
        ("skyrl.algorithms.filters", {"jax", "torch"}),
        ("skyrl.algorithms.objective", {"jax", "torch"}),
        ("skyrl.envs", {"jax", "torch", "numpy", "transformers", "fastapi"}),
        ("skyrl.train.rollouts.rollouts", {"jax", "torch", "transformers"}),
        ("skyrl.train.rollouts.metrics", {"jax", "torch", "transformers"}),
        ("skyrl.backends.backend", {"jax", "torch"}),
        *((module, {"jax", "torch", "skyrl.tx"}) for module in COMMON),
        ("skyrl.backends.jax", {"torch", "transformers"}),
        ("skyrl.backends.torch", {"jax", "transformers", "ray"}),
    ],
)
def test_import_does_not_load(module: str, absent: set[str], loaded: Callable[[str], set[str]]):
    assert not absent & loaded(module)


IMPORTER = """
import os, sys
import asyncio, pydantic, sqlalchemy  # in no list of what is not to be loaded
for line in sys.stdin:
    if os.fork() == 0:
        __import__(line.strip())
        print(*sys.modules, flush=True)
        os._exit(0)
    if os.wait()[1]:
        print(flush=True)
"""


@pytest.fixture(scope="module")
def loaded() -> Iterator[Callable[[str], set[str]]]:
    """Names of all modules that an import loads, in a process forked from one that has imported little."""
    command = [sys.executable, "-c", IMPORTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as importer:
        assert importer.stdin is not None and importer.stdout is not None

        def names(module: str) -> set[str]:
            print(module, file=importer.stdin, flush=True)
            found = set(importer.stdout.readline().split())
            assert module in found, f"{module} cannot be imported"
            return found

        yield names
        importer.stdin.close()


def test_modules_of_tests_have_different_names():
    # pytest imports them by their last name alone: two of one name keep the whole suite from being collected.
    names = [path.stem for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
