"""Links between documents lead to a file, and to a heading of it. Commands that documents name exist."""

import re
from pathlib import Path

import pytest

from skyrl.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), ROOT / "benchmarks/README.md"]


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path):
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in target]
    for target in targets:
        name, _, anchor = target.partition("#")
        found = (page.parent / name) if name else page
        assert found.exists(), target
        assert not anchor or found.suffix != ".md" or anchor in headings(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path):
    named = re.findall(r"(?<![\w./-])skyrl ([a-z][a-z-]*)", page.read_text())
    assert set(named) <= COMMANDS.keys() | {"skyrl"}  # as a container's image


@pytest.mark.parametrize("root", ["skyrl", "benchmarks", "examples", "tests"])
def test_commands_in_the_text_of_modules_exist(root):
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / root).rglob("*.py")
        for name in re.findall(r"`skyrl ([a-z][a-z-]*)", path.read_text("utf-8"))
    }
    assert not {(path, name) for path, name in named if name not in COMMANDS}
