"""Texts of others cannot control a terminal."""

import ast
import io
import logging
import sys
from pathlib import Path

import pytest

from skyrl.utils.console import printable, say
from skyrl.utils.log import TextLines

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b[2J\x1b]0;title\x07 \u202egnp.exe \x9b31m \r overwritten \x08"
WITHOUT = {"console.py": "prints", "check.py": "marks tokens in colour, and escapes the rest", "child.py": "JSON lines"}
"""Files that call `print` themselves."""
PROGRAMS = ("config_page.py", "page.py")
"""Generators of pages of the documentation."""


def test_control_characters_are_escaped_and_line_breaks_are_kept():
    shown = printable(HOSTILE + "\n§ 你好 🎉")
    assert all(one.isprintable() or one == "\n" for one in shown)
    assert shown.startswith(r"\x1b[2J\x1b]0;title\x07 \u202egnp.exe \x9b31m \r over")
    assert shown.endswith("\n§ 你好 🎉")


def test_characters_that_a_terminal_does_not_have_are_escaped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    say("naïve")
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"na\\xefve\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_log_lines_are_escaped():
    record = logging.LogRecord("skyrl", logging.INFO, __file__, 0, "name %s", (HOSTILE,), None)
    assert TextLines().format(record).endswith(printable(f"name {HOSTILE}"))


@pytest.mark.parametrize("room", ["admin", "backends", "train", "tinker", "tx", "utils"])
def test_programs_print_by_say(room):
    calls = [
        path.name
        for path in sorted((ROOT / "skyrl" / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert set(calls) <= WITHOUT.keys() | set(PROGRAMS)
