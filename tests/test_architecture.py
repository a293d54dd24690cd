"""docs/architecture.md names what is there."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from skyrl.tinker.database.tables import ModelStatus
from tests.test_layers import LAYERS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`(skyrl/[\w/]+\.py)`:\s+`([\w.]+)`", PAGE)))


def defined(path: Path) -> set[str]:
    """Names at the top of a file, and `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{part.name}" for part in functions}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_what_the_page_names_is_defined_where_it_says(path, name):
    assert name in defined(ROOT / path)


def test_every_file_that_the_page_names_is_there():
    files = re.findall(r"`((?:skyrl|tests)/[\w/.]+)`", PAGE)
    assert len(NAMED) > 40 and [file for file in files if not (ROOT / file).exists()] == []


def test_the_page_has_every_state_of_a_model():
    diagram = PAGE.split("`ModelStatus`", 1)[1].split("```")[1]
    assert set(get_args(ModelStatus)) <= set(re.findall(r"\w+", diagram))


def test_the_page_has_every_layer():
    section = PAGE.split("## Layers", 1)[1].split("\n## ")[0]
    rooms = {name for layer in LAYERS for name in layer}
    server = {path.name.removesuffix(".py") for path in (ROOT / "skyrl" / "tinker").glob("[a-z]*")}
    assert (rooms | server) - set(re.findall(r"\w+", section)) == {"redaction", "local_server"}


def test_every_file_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`((?:skyrl|tests|docs|benchmarks)/[\w/.-]+)`|\]\((docs/[\w.-]+)\)", text)
    named = [first or second for first, second in files]
    assert len(named) > 25 and [file for file in named if not (ROOT / file).exists()] == []
