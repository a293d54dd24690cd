"""Modules of a user that fail: their file and line are named, and what only is not there is told apart."""

import sys

import pytest

from skyrl.errors import ConfigError
from skyrl.utils.own_code import place_of
from skyrl.utils.registry import Registry

SHAPES: Registry[object] = Registry("shape")

BROKEN = {
    "a module that it imports is not there": (
        "import math\n\nimport numpyy\n",
        "mine.py, line 3: ModuleNotFoundError: No module named 'numpyy'",
    ),
    "a part of a package that is there is not": (
        "import json.nothing\n",
        "mine.py, line 1: ModuleNotFoundError: No module named 'json.nothing'",
    ),
    "a name of a module that is not there": (
        "from math import tau_and_a_half\n",
        "mine.py, line 1: ImportError: cannot import name 'tau_and_a_half'",
    ),
    "an attribute": ("import math\nmath.nothing\n", "mine.py, line 2: AttributeError: module 'math' has no attribute"),
    "syntax": ("x = 1\ndef f(:\n    pass\n", "mine.py, line 2: SyntaxError: invalid syntax"),
    "an error inside an installed package": (
        "import numpy\nnumpy.zeros(-1)\n",
        "mine.py, line 2: ValueError: negative dimensions",
    ),
    "an error inside this project": (
        "from tests.utils.test_own_code import SHAPES\nfrom skyrl.utils.registry import Registry\n"
        "KINDS = Registry('kind')\nKINDS.register('a')(1)\nKINDS.register('a')(2)\n",
        "mine.py, line 5: ValueError: a kind named 'a' is registered already",
    ),
    "an exit": ("import sys\nsys.exit('no GPU')\n", "mine.py, line 2: SystemExit: no GPU"),
    "an error without words": ("assert False\n", "mine.py, line 1: AssertionError;"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory where modules are looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("what", BROKEN)
def test_a_module_that_fails_is_told_with_its_file_and_line(folder, what):
    text, said = BROKEN[what]
    (folder / "mine.py").write_text(text)
    with pytest.raises(ConfigError) as error:
        SHAPES.get("mine:Shape")
    assert str(error.value).startswith("shape 'mine:Shape': the module mine cannot be imported: ")
    assert said in str(error.value)
    assert "PYTHONPATH" not in str(error.value) and "known" not in str(error.value)


def test_a_module_that_it_imports_is_named_where_that_fails(folder):
    (folder / "parts_of_mine.py").write_text("\n\n1 / 0\n")
    (folder / "mine.py").write_text("import parts_of_mine\n")
    with pytest.raises(ConfigError, match=r": parts_of_mine\.py, line 3: ZeroDivisionError: division by zero; fix it"):
        SHAPES.get("mine:Shape")


@pytest.mark.parametrize("name", ["nowhere:Shape", "nowhere.below:Shape", "json.nothing:Shape", ":Shape", ".:Shape"])
def test_a_module_that_is_not_there_is_an_unknown_name(folder, name):
    with pytest.raises(KeyError, match=f"no shape at '{name}'"):
        SHAPES.get(name)


def test_an_attribute_that_is_not_there_has_the_nearest_one(folder):
    (folder / "mine.py").write_text("class Square: pass\n")
    with pytest.raises(KeyError, match=r"no shape at 'mine:Sqare' \(mine has no 'Sqare'; did you mean Square\?\)"):
        SHAPES.get("mine:Sqare")


def test_a_file_outside_of_the_working_directory_has_its_whole_path(folder, monkeypatch):
    (folder / "mine.py").write_text("1 / 0\n")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    with pytest.raises(ConfigError, match=f"{folder}/mine.py, line 1: ZeroDivisionError"):
        SHAPES.get("mine:Shape")


def test_an_error_that_was_never_raised_has_no_place():
    assert place_of(ValueError("no")) == "ValueError: no"
