"""Docstrings begin with a noun or a verb, not with a clause: `Its contents.` and not `What it holds.`

Docstrings are those of modules, classes and functions, and string literals below attributes.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLAUSE = re.compile(r"\s*(What|Whatever|Whether|Which|Who|Whoever|Whom|Whose|Where|Wherever|How|When|Whenever|Why)\b")
QUOTED = re.compile(rf"[\"']{CLAUSE.pattern}")
"""Text of every file with such a docstring, and of few others: only these are parsed."""
KINDS = '''"""What a file is."""
class A:
    """Who it is; None: nobody."""
    b: int
    """ How many."""
    c: int
    """Number of them, however they are counted. What else?"""
    def d(self):
        """Whether it is so."""
        return "When it is over."
'''


def clauses(source: str) -> list[tuple[int, str]]:
    """Return the line and the first line of each docstring that begins with a clause."""
    found = []
    for node in ast.walk(ast.parse(source)) if QUOTED.search(source) else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(ast.Constant(str() as text)) if CLAUSE.match(text):
                        found.append((statement.lineno, text.strip().split("\n")[0]))
    return sorted(found)


@pytest.mark.parametrize("root", ["skyrl", "benchmarks", "examples", "tests"])
def test_docstrings_begin_with_a_noun_or_a_verb(root):
    paths = sorted((ROOT / root).rglob("*.py"))
    assert paths
    places = [(path.relative_to(ROOT), *clause) for path in paths for clause in clauses(path.read_text("utf-8"))]
    assert not places, "\n".join(f"{path}:{line}: {text}" for path, line, text in places)


def test_docstrings_of_all_kinds_are_read():
    assert [line for line, _ in clauses(KINDS)] == [1, 3, 5, 9]
